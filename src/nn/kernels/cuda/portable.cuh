// The language of the kernels in this directory: CUDA C++, or plain C++ if a test has included an emulation of a
// device's blocks and threads before this file (tests/nn/ops/cuda/emulation.h). Kernels use the vendor's API only
// through this file.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "tessera/base/dtype.h"
#include "tessera/base/error.h"
#include "tessera/nn/kernels/opmath.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define TESSERA_DEVICE __device__ __forceinline__
#define TESSERA_KERNEL __global__
// For blocks of up to `threads`, so few registers that a multiprocessor holds `blocks` of them.
#define TESSERA_BOUNDED_KERNEL(threads, blocks) __global__ __launch_bounds__(threads, blocks)
#define TESSERA_PLAIN_KERNEL static __global__   // for kernels that are not templates
#define TESSERA_GRID_CONSTANT __grid_constant__  // a parameter that is indexed where it is, not copied to the stack
#define TESSERA_BOTH __host__ __device__ __forceinline__
#define TESSERA_UNROLL _Pragma("unroll")
#define TESSERA_NO_UNROLL _Pragma("unroll 1")
#define TESSERA_UNROLL_BY_8 _Pragma("unroll 8")  // for loads of several rounds at once
#elif !defined(TESSERA_EMULATED_CUDA)
#error "portable.cuh: neither CUDA nor its emulation"
#endif

namespace tessera::nn::cuda {

using base::bf16;
using base::f16;
using kernels::OpMath;

inline constexpr unsigned kWarp = 32;

/// Launch configuration: the numbers of blocks and threads, and the dynamic shared memory of a block.
struct Grid {
  std::size_t blocks = 1;
  unsigned threads = 256;
  std::size_t shared = 0;
};

#if defined(__CUDACC__)

using NativeStream = cudaStream_t;

template <class... Parameters, class... Arguments>
void launch(NativeStream stream, const Grid& grid, void (*kernel)(Parameters...), Arguments... arguments) {
  if (grid.blocks == 0) return;
  if (grid.shared > 48 * 1024) {
    const cudaError_t allowed =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(grid.shared));
    if (allowed != cudaSuccess) {
      cudaGetLastError();  // it is reported
      throw base::Unsupported("cuda: a kernel needs " + std::to_string(grid.shared) +
                              " bytes of shared memory for a block, which this GPU does not have (" +
                              cudaGetErrorString(allowed) + ")");
    }
  }
  kernel<<<dim3(static_cast<unsigned>(grid.blocks)), dim3(grid.threads), grid.shared, stream>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw base::BackendError(std::string("cuda: launch: ") + cudaGetErrorString(error));
}

/// The dynamic shared memory of the block.
template <class T>
TESSERA_DEVICE T* shared_memory() {
  extern __shared__ __align__(16) unsigned char tessera_shared[];
  return reinterpret_cast<T*>(tessera_shared);
}

TESSERA_DEVICE std::size_t block_index() { return blockIdx.x; }
TESSERA_DEVICE std::size_t block_count() { return gridDim.x; }
TESSERA_DEVICE unsigned thread_index() { return threadIdx.x; }
TESSERA_DEVICE unsigned thread_count() { return blockDim.x; }
TESSERA_DEVICE void sync_block() { __syncthreads(); }
/// The value of the lane whose index differs in the bits of `mask`. All lanes of the warp must call it.
template <class T>
TESSERA_DEVICE T shuffle_xor(T value, unsigned mask) {
  return __shfl_xor_sync(0xffffffffU, value, static_cast<int>(mask));
}

/// The lanes of the warp with the same value, as bits. All lanes must call it.
TESSERA_DEVICE unsigned lanes_with(unsigned value) { return __match_any_sync(0xffffffffU, value); }
/// Orders the warp's accesses to memory. All lanes must call it.
TESSERA_DEVICE void sync_warp() { __syncwarp(); }
TESSERA_DEVICE unsigned bits_set(unsigned x) { return static_cast<unsigned>(__popc(x)); }

TESSERA_DEVICE float to_opmath(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
TESSERA_DEVICE float to_opmath(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
template <class T>
TESSERA_DEVICE T from_opmath(OpMath<T> x) {
  if constexpr (std::is_same_v<T, f16>) {
    T result;
    result.bits = __half_as_ushort(__float2half_rn(x));
    return result;
  } else if constexpr (std::is_same_v<T, bf16>) {
    T result;
    result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return result;
  } else {
    return x;
  }
}
template <class To, class From>
TESSERA_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

TESSERA_DEVICE void store_16_bytes(void* to, const uint4& words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}
/// A value in global memory, by accesses of 16 bytes if it consists of these. The compiler splits other stores of
/// structs where it likes, also those of its own vector types.
template <class V>
TESSERA_DEVICE V load_whole(const V* from) {
  if constexpr (sizeof(V) == 16) {
    return bits_as<V>(*reinterpret_cast<const uint4*>(from));
  } else {
    return *from;
  }
}
template <class V>
TESSERA_DEVICE void store_whole(V* to, const V& value) {
  if constexpr (sizeof(V) == 16) {
    store_16_bytes(to, bits_as<uint4>(value));
  } else if constexpr (sizeof(V) == 32) {
    struct Halves {
      uint4 first, second;
    };
    const auto halves = bits_as<Halves>(value);
    store_16_bytes(to, halves.first);
    store_16_bytes(reinterpret_cast<uint4*>(to) + 1, halves.second);
  } else {
    *to = value;
  }
}

#else

using NativeStream = emulation::NativeStream;
using emulation::lanes_with;
using emulation::shuffle_xor;
using emulation::sync_block;
using emulation::sync_warp;

template <class... Parameters, class... Arguments>
void launch(NativeStream stream, const Grid& grid, void (*kernel)(Parameters...), Arguments... arguments) {
  emulation::run(stream, grid, [&] { kernel(arguments...); });
}
template <class T>
T* shared_memory() {
  return static_cast<T*>(emulation::block().shared());
}
inline std::size_t block_index() { return emulation::block().index; }
inline std::size_t block_count() { return emulation::block().blocks; }
inline unsigned thread_index() { return emulation::block().current; }
inline unsigned thread_count() { return emulation::block().count; }

inline unsigned bits_set(unsigned x) { return static_cast<unsigned>(std::popcount(x)); }

inline float to_opmath(f16 x) { return static_cast<float>(x); }
inline float to_opmath(bf16 x) { return static_cast<float>(x); }
template <class T>
T from_opmath(OpMath<T> x) {
  return static_cast<T>(x);
}
template <class To, class From>
To bits_as(From from) {
  return std::bit_cast<To>(from);
}
template <class V>
V load_whole(const V* from) {
  emulation::accesses().on_read(from, sizeof(V));
  return *from;
}
template <class V>
void store_whole(V* to, const V& value) {
  emulation::accesses().on_write(to, sizeof(V));
  *to = value;
}

#endif

TESSERA_DEVICE float to_opmath(float x) { return x; }
TESSERA_DEVICE double to_opmath(double x) { return x; }

#if defined(__CUDACC__)
TESSERA_DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
#else
inline float fused(float a, float b, float c) { return emulation::with_device_nan(fmaf(a, b, c)); }
#endif
TESSERA_DEVICE double fused(double a, double b, double c) { return fma(a, b, c); }
TESSERA_DEVICE float root(float x) { return sqrtf(x); }
TESSERA_DEVICE double root(double x) { return sqrt(x); }
TESSERA_DEVICE double cube_root(double x) { return cbrt(x); }
/// The larger number; ignores NaN.
TESSERA_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
TESSERA_DEVICE double maximum(double a, double b) { return fmax(a, b); }
template <class T>
TESSERA_BOTH T larger(T a, T b) {
  return a > b ? a : b;
}
template <class T>
TESSERA_BOTH T smaller(T a, T b) {
  return a < b ? a : b;
}
TESSERA_DEVICE float not_a_number(float) { return bits_as<float>(0x7fc00000U); }
TESSERA_DEVICE double not_a_number(double) { return bits_as<double>(std::uint64_t{0x7ff8000000000000U}); }
template <class T>
TESSERA_DEVICE T minus_infinity() {
  if constexpr (sizeof(T) == 4)
    return bits_as<float>(0xff800000U);
  else
    return bits_as<double>(std::uint64_t{0xfff0000000000000U});
}

constexpr std::size_t divided_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

}  // namespace tessera::nn::cuda
