// The opmath type of elements of type T, also used for saved row statistics: f32 for half precision, else T.
#pragma once

#include "tessera/base/dtype.h"

/// Arguments of the kernels of all devices, and the kernels of the host.
namespace tessera::nn::kernels {

/// Defines the opmath type of T; see Wide.
template <class T>
struct OpMathOf {
  using Type = T;  ///< f32 and f64 compute in themselves
};
/// F16 computes in f32.
template <>
struct OpMathOf<base::f16> {
  using Type = float;  ///< the opmath type
};
/// Bf16 computes in f32.
template <>
struct OpMathOf<base::bf16> {
  using Type = float;  ///< the opmath type
};
/// The opmath type of T: float for half precision, else T.
template <class T>
using OpMath = typename OpMathOf<T>::Type;

/// The DType of the opmath type.
constexpr base::DType opmath_dtype(base::DType dtype) {
  return dtype == base::DType::f16 || dtype == base::DType::bf16 ? base::DType::f32 : dtype;
}

}  // namespace tessera::nn::kernels
