// The opmath type of elements of type T, also used for saved row statistics: f32 for half precision, else T.
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
