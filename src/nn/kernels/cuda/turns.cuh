// The order of blocks that add to the same numbers in global memory: a counter per group of numbers, at which the
// blocks wait for their turns, or by which the last block knows that it is the last. So sums have a fixed order and
// need no atomic additions.
#pragma once

#include "tessera/nn/kernels/cuda/portable.cuh"

namespace tessera::nn::cuda {

#if defined(__CUDACC__)

/// Returns 0, 1, 2, ... in the order in which blocks begin. A block that waits only for blocks with lower numbers can't
/// deadlock: these have begun, and a block that has begun keeps its multiprocessor.
TESSERA_DEVICE std::uint32_t next_number(std::uint32_t* counter) { return atomicAdd(counter, 1U); }

/// As next_number(), by a block that has written for the one with the highest number: that block's calling thread, and
/// after a barrier the others, read what the blocks with lower numbers wrote.
TESSERA_DEVICE std::uint32_t arrive(std::uint32_t* counter) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
}

/// Waits until the counter is `turn`. What the block that set it had written is then visible to the caller, and after a
/// barrier to its block.
TESSERA_DEVICE void await_turn(const std::uint32_t* counter, std::uint32_t turn) {
  std::uint32_t now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(__cvta_generic_to_global(counter)) : "memory");
  } while (now != turn);
}
/// Sets the counter after a barrier that follows the block's writes, which the barrier and the release order before it.
TESSERA_DEVICE void pass_turn(std::uint32_t* counter, std::uint32_t turn) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(__cvta_generic_to_global(counter)), "r"(turn) : "memory");
}

/// Reads and writes what other blocks write and read, past the first-level cache.
template <class T>
TESSERA_DEVICE T read_shared_sum(const T* from) {
  static_assert(sizeof(T) == sizeof(float4));
  return bits_as<T>(__ldcg(reinterpret_cast<const float4*>(from)));
}
template <class T>
TESSERA_DEVICE void write_shared_sum(T* to, const T& value) {
  static_assert(sizeof(T) == sizeof(float4));
  __stcg(reinterpret_cast<float4*>(to), bits_as<float4>(value));
}

#else

inline std::uint32_t next_number(std::uint32_t* counter) { return (*counter)++; }
inline std::uint32_t arrive(std::uint32_t* counter) { return (*counter)++; }
inline void await_turn(const std::uint32_t* counter, std::uint32_t turn) {
  if (*counter != turn)
    throw emulation::Failure("a block waits for turn " + std::to_string(turn) + " of a block that begins after it");
}
inline void pass_turn(std::uint32_t* counter, std::uint32_t turn) { *counter = turn; }
template <class T>
T read_shared_sum(const T* from) {
  return *from;
}
template <class T>
void write_shared_sum(T* to, const T& value) {
  *to = value;
}

#endif

}  // namespace tessera::nn::cuda
