// Matrix products, by a library (BLAS or oneDNN, both single-threaded) or by this project's own code, split over the
// pool by tiles of C, and the linear layer.
//
// All matrices are row-major. The bits are the same for every number of threads: the tiles of a library depend only on
// m and n, and k is never split.
#pragma once

#include <cstddef>
#include <string>

#include "tessera/nn/kernels/activation.h"
#include "tessera/nn/kernels/opmath.h"
#include "tessera/nn/products.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// Whether op() transposes the stored matrix.
enum class Transpose : bool { no, yes };

/// C[m, n] = op(A) * op(B), or += if `accumulate`; op(A)[m, k], op(B)[k, n].
template <class T>
struct GemmArgs {
  Transpose trans_a = Transpose::no;  ///< yes: A is stored as [k, m]
  Transpose trans_b = Transpose::no;  ///< yes: B is stored as [n, k]
  std::size_t m = 0,                  ///< rows of C
      n = 0,                          ///< columns of C
      k = 0;                          ///< extent of the sums
  const T* a = nullptr;               ///< the stored A
  std::size_t lda = 0;                ///< elements between the starts of two stored rows; 0: packed
  const T* b = nullptr;               ///< the stored B
  std::size_t ldb = 0;                ///< the same as lda, for B
  bool accumulate = false;            ///< false: C is not read (NaN in it is ignored)
  T* c = nullptr;                     ///< the result, [m, n]
  std::size_t ldc = 0;                ///< the same as lda, for C
};

/// T: float, double; bf16 and f16 where has_product(): sums are computed in f32 and rounded once.
template <class T>
TESSERA_API void gemm(ThreadPool& pool, const GemmArgs<T>& args, Products products = Products::library);

/// True if matrices of this type are multiplied without a conversion to f32 beforehand.
TESSERA_API bool has_product(Products products, base::DType dtype);

/// Names what multiplies f32 and half-precision matrices in this process, such as "OpenBLAS 0.3.21 (Zen)",
/// "oneDNN 2.6.3 (avx512_core_bf16)" or "tessera". Processes with different names round differently.
TESSERA_API std::string products_name(Products products = Products::library);

/// Storage of a linear layer's weight.
enum class WeightLayout : bool {
  out_in,  ///< [out, in], as in torch.nn.Linear
  in_out   ///< [in, out], as in GPT-2's Conv1D
};

/// The extents of a linear layer.
struct LinearShape {
  std::size_t rows = 0,                        ///< rows of x and y
      in = 0,                                  ///< columns of x
      out = 0;                                 ///< columns of y
  WeightLayout layout = WeightLayout::out_in;  ///< layout of the weight
};

/// The elements between the starts of two rows of `row` elements: `stride`, or `row` if it is 0. Throws InvalidUsage
/// for a stride below `row`, or above it with `packed`: something else in the call needs packed rows.
TESSERA_API std::size_t checked_stride(std::size_t stride, std::size_t row, bool packed);

/// y[rows, out] = x[rows, in] * W + bias[out]; bias may be null. Overwrites y. If `activated` is not null, also
/// computes activated = activation(y), in the same pass if the device supports it (then before y is rounded).
template <class T>
struct LinearForward {
  LinearShape shape;                         ///< extents of all arrays
  const T* x = nullptr;                      ///< [rows, in]
  const T* weight = nullptr;                 ///< [out, in] or [in, out], by shape.layout
  const T* bias = nullptr;                   ///< [out], or null
  T* y = nullptr;                            ///< [rows, out]
  T* activated = nullptr;                    ///< [rows, out], or null
  Activation activation = Activation::relu;  ///< unused if `activated` is null
  std::size_t y_stride = 0;                  ///< elements between the starts of two rows of y; 0: packed
};
/// LinearForward::y_stride, or the length of a packed row; a bias or an activation needs packed rows.
template <class T>
std::size_t row_stride(const LinearForward<T>& args) {
  return checked_stride(args.y_stride, args.shape.out, args.bias != nullptr || args.activated != nullptr);
}
/// Ignores `activated`.
template <class T>
TESSERA_API void linear_forward(ThreadPool& pool, const LinearForward<T>& args, Products products = Products::library);

/// The remaining activation, for products that don't apply it.
template <class T>
ActivationForward<T> activation_after(const LinearForward<T>& args) {
  return {args.activation, args.y, args.activated, args.shape.rows * args.shape.out};
}

/// Gradients of linear_forward; for half precision without dbias. Gradients that are null are not computed.
/// accumulate_*: add to the existing value, else overwrite. Only dweight needs x and only dx needs weight; the other
/// may be null.
template <class T>
struct LinearBackward {
  LinearShape shape;                ///< the same as in forward
  const T* x = nullptr;             ///< the same as in forward; may be null without dweight
  const T* weight = nullptr;        ///< the same as in forward; may be null without dx
  const T* dy = nullptr;            ///< [rows, out], gradient of y
  T* dx = nullptr;                  ///< gradient of x, or null
  T* dweight = nullptr;             ///< gradient of weight, or null
  T* dbias = nullptr;               ///< gradient of bias, or null
  bool accumulate_dx = false;       ///< true: dx += ...
  bool accumulate_dweight = false;  ///< true: dweight += ...
  bool accumulate_dbias = false;    ///< true: dbias += ...
  std::size_t dy_stride = 0;        ///< elements between the starts of two rows of dy; 0: packed
};
/// LinearBackward::dy_stride, or the length of a packed row; a bias gradient needs packed rows.
template <class T>
std::size_t row_stride(const LinearBackward<T>& args) {
  return checked_stride(args.dy_stride, args.shape.out, args.dbias != nullptr);
}
/// The gradients of linear_forward().
template <class T>
TESSERA_API void linear_backward(ThreadPool& pool, const LinearBackward<T>& args,
                                 Products products = Products::library);

}  // namespace tessera::nn::kernels
