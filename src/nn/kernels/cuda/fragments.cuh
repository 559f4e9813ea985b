// Products of half-precision fragments, 16 x 16 by 16 x 8 with f32 sums: the warp instruction mma.m16n8k16 of NVIDIA's
// PTX ISA, whose chapter "Matrix Fragments for mma.m16n8k16" defines the elements of each lane. Lane = 4 * group +
// pair:
//
//   left   (16 x 16) rows group and group + 8, columns 2 * pair and 2 * pair + 1, and those + 8
//   right  (16 x 8)  column group, rows 2 * pair and 2 * pair + 1, and those + 8
//   sums   (16 x 8)  rows group and group + 8, columns 2 * pair and 2 * pair + 1
//
// Two adjacent accumulators, rounded, thus form a left operand without rearrangement.
#pragma once

#include "tessera/nn/kernels/cuda/portable.cuh"

namespace tessera::nn::cuda {

// Copies of 16 bytes from global to shared memory that run while their thread continues: cp.async of NVIDIA's PTX ISA.
// The thread that started a copy may read its bytes after wait_copies(), the other threads of the block after a barrier
// that follows it.

#if defined(__CUDACC__)

/// The address of an object in shared memory, as instructions expect it.
TESSERA_DEVICE std::uint32_t shared_address(const void* object) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(object));
}

/// Copies 16 bytes, or writes 16 bytes of zeros and reads nothing if not `inside`. Both addresses are aligned to 16.
TESSERA_DEVICE void copy_async(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(inside ? 16 : 0)
               : "memory");
}
/// The thread's copies since the last call become one group.
TESSERA_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
/// Waits until at most the last `pending` groups of the thread are incomplete.
template <unsigned pending>
TESSERA_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory");
}

#else

using emulation::commit_copies;
using emulation::copy_async;
template <unsigned pending>
void wait_copies() {
  emulation::wait_copies(pending);
}

#endif

/// Padding of rows in shared memory, in elements: the eight rows of a fragment lie in different banks, and rows stay
/// aligned to 16 bytes.
inline constexpr unsigned kFragmentPadding = 8;

template <class T>
struct alignas(16) Eight {
  T v[8];
};

struct Accumulator {
  float v[4];
};
struct LeftFragment {
  std::uint32_t v[4];
};
struct RightFragment {
  std::uint32_t v[2];
};

TESSERA_DEVICE unsigned warp_index() { return thread_index() / kWarp; }
TESSERA_DEVICE unsigned lane_group() { return thread_index() % kWarp / 4; }
TESSERA_DEVICE unsigned lane_pair() { return thread_index() % 4; }

/// Four matrices of 8 x 8 elements, one register each. Lane l passes the address of row l % 8 of matrix l / 8, of 16
/// bytes in shared memory, and receives of each matrix elements 2 * pair and 2 * pair + 1 of row `group`, or,
/// transposed, of column `group`. The whole warp must call it.
struct FourMatrices {
  std::uint32_t v[4];
};
#if defined(__CUDACC__)
template <bool transposed, class T>
TESSERA_DEVICE FourMatrices load_matrices(const T* row) {
  FourMatrices m;
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.v[0]), "=r"(m.v[1]), "=r"(m.v[2]), "=r"(m.v[3])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.v[0]), "=r"(m.v[1]), "=r"(m.v[2]), "=r"(m.v[3])
                 : "r"(shared_address(row))
                 : "memory");
  return m;
}
#else
template <bool transposed, class T>
FourMatrices load_matrices(const T* row) {
  FourMatrices m;
  emulation::load_matrices(row, transposed, m.v);
  return m;
}
#endif

/// Loads from rows of `line` elements in shared memory; at: row 0, column 0.
template <class T>
TESSERA_DEVICE LeftFragment left_fragment(const T* at, unsigned line) {
  const unsigned lane = thread_index() % kWarp;
  const FourMatrices m = load_matrices<false>(at + lane % 16 * line + lane / 16 * 8);
  return {{m.v[0], m.v[1], m.v[2], m.v[3]}};
}
/// Loads from memory that stores the left operand's columns as rows.
template <class T>
TESSERA_DEVICE LeftFragment left_fragment_of_columns(const T* at, unsigned line) {
  const unsigned lane = thread_index() % kWarp;
  const FourMatrices m = load_matrices<true>(at + (lane % 8 + lane / 16 * 8) * line + lane / 8 % 2 * 8);
  return {{m.v[0], m.v[1], m.v[2], m.v[3]}};
}

/// Columns 0 to 7 and 8 to 15 of a right operand of 16 columns.
struct RightFragments {
  RightFragment v[2];
};
/// Loads from memory that stores the right operand's columns as rows of `line` elements.
template <class T>
TESSERA_DEVICE RightFragments right_fragments_of_columns(const T* at, unsigned line) {
  const unsigned lane = thread_index() % kWarp;
  const FourMatrices m = load_matrices<false>(at + (lane % 8 + lane / 16 * 8) * line + lane / 8 % 2 * 8);
  return {{{{m.v[0], m.v[1]}}, {{m.v[2], m.v[3]}}}};
}
/// Loads from rows of the right operand.
template <class T>
TESSERA_DEVICE RightFragments right_fragments(const T* at, unsigned line) {
  const unsigned lane = thread_index() % kWarp;
  const FourMatrices m = load_matrices<true>(at + lane % 16 * line + lane / 16 * 8);
  return {{{{m.v[0], m.v[1]}}, {{m.v[2], m.v[3]}}}};
}

/// Two numbers, rounded to adjacent elements of a word.
template <class T>
TESSERA_DEVICE std::uint32_t packed(float low, float high) {
#if defined(__CUDACC__)
  std::uint32_t word;
  if constexpr (std::is_same_v<T, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return static_cast<std::uint32_t>(from_opmath<T>(low).bits) | static_cast<std::uint32_t>(from_opmath<T>(high).bits)
                                                                    << 16;
#endif
}
/// Converts sixteen columns of sums to the left operand of the next product.
template <class T>
TESSERA_DEVICE LeftFragment as_left(const Accumulator& first, const Accumulator& second) {
  return {{packed<T>(first.v[0], first.v[1]), packed<T>(first.v[2], first.v[3]), packed<T>(second.v[0], second.v[1]),
           packed<T>(second.v[2], second.v[3])}};
}

#if defined(__CUDACC__)

/// sums += left x right. The whole warp must call it.
template <class T>
TESSERA_DEVICE void multiply_add(Accumulator& sums, const LeftFragment& left, const RightFragment& right) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(sums.v[0]), "+f"(sums.v[1]), "+f"(sums.v[2]), "+f"(sums.v[3])
        : "r"(left.v[0]), "r"(left.v[1]), "r"(left.v[2]), "r"(left.v[3]), "r"(right.v[0]), "r"(right.v[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(sums.v[0]), "+f"(sums.v[1]), "+f"(sums.v[2]), "+f"(sums.v[3])
        : "r"(left.v[0]), "r"(left.v[1]), "r"(left.v[2]), "r"(left.v[3]), "r"(right.v[0]), "r"(right.v[1]));
  }
}

#else

template <class T>
void multiply_add(Accumulator& sums, const LeftFragment& left, const RightFragment& right) {
  const auto value = [](std::uint64_t words, unsigned i) {  // element i of the four in two words
    T element{};
    element.bits = static_cast<std::uint16_t>(words >> 16 * i);
    return static_cast<float>(element);
  };
  const auto joined = [](std::uint32_t a, std::uint32_t b) { return a | static_cast<std::uint64_t>(b) << 32; };
  const unsigned group = lane_group(), pair = lane_pair();
  float a[2][16];
  float b[2][16];
  for (unsigned side = 0; side < 2; ++side) {  // columns 0 to 7 of the left operand, then 8 to 15
    const std::uint64_t mine = joined(left.v[side * 2], left.v[side * 2 + 1]);
    const auto row = emulation::from_lanes<4>(mine, {group * 4, group * 4 + 1, group * 4 + 2, group * 4 + 3});
    for (unsigned p = 0; p < 4; ++p)
      for (unsigned i = 0; i < 4; ++i) a[i / 2][side * 8 + p * 2 + i % 2] = value(row[p], i);
  }
  std::array<unsigned, 8> lanes{};
  for (unsigned i = 0; i < 8; ++i) lanes[i] = (pair * 2 + i / 4) * 4 + i % 4;
  const auto columns = emulation::from_lanes<8>(joined(right.v[0], right.v[1]), lanes);
  for (unsigned c = 0; c < 8; ++c)
    for (unsigned i = 0; i < 4; ++i) b[c / 4][i / 2 * 8 + c % 4 * 2 + i % 2] = value(columns[c], i);
  for (unsigned e = 0; e < 4; ++e)
    for (unsigned k = 0; k < 16; ++k) sums.v[e] += a[e / 2][k] * b[e % 2][k];
}

#endif

}  // namespace tessera::nn::cuda
