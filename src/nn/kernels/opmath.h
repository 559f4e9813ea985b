// What a kernel computes in, and keeps of a row, for elements of type T: f32 for the 16-bit types, T itself else.
#pragma once

#include "tessera/base/dtype.h"

namespace tessera::nn::kernels {

template <class T>
struct WideOf {
  using Type = T;
};
template <>
struct WideOf<base::f16> {
  using Type = float;
};
template <>
struct WideOf<base::bf16> {
  using Type = float;
};
template <class T>
using Wide = typename WideOf<T>::Type;

constexpr base::DType wide_dtype(base::DType dtype) {
  return dtype == base::DType::f16 || dtype == base::DType::bf16 ? base::DType::f32 : dtype;
}

}  // namespace tessera::nn::kernels
