// Helpers of the operations: element type dispatch and argument checks.
#pragma once

#include <string>
#include <string_view>

#include "tessera/nn/tape.h"
#include "tessera/nn/tensor.h"

/// Operations on tensors, which record their backward on the tape.
namespace tessera::nn::ops {

/// Calls function(T{}) with the C++ type of `dtype`.
template <class Function>
void for_floating(std::string_view op, DType dtype, Function&& function) {
  if (!base::is_floating(dtype)) throw Unsupported(std::string(op) + ": no kernel for " + std::string(name_of(dtype)));
  base::with_dtype(dtype, [&](auto zero) {
    if constexpr (base::is_floating(base::dtype_of<decltype(zero)>)) function(zero);
  });
}

/// Calls function(table, stream): the kernels for x's elements, a KernelTable<T>&, and the stream of x's context.
template <class Function>
void with_kernels(std::string_view op, const Tensor& x, Function&& function) {
  for_floating(op, x.dtype(),
               [&](auto zero) { function(x.context().kernels<decltype(zero)>(op), x.context().stream()); });
}

/// An extent as the kernels' unsigned type.
inline std::size_t size(std::int64_t extent) { return static_cast<std::size_t>(extent); }

/// Number of rows: the product of all extents but the last.
inline std::int64_t rows_of(const Tensor& x) { return x.dim(-1) == 0 ? 0 : x.count() / x.dim(-1); }

/// The tensor's data, or null for an empty handle.
template <class T>
T* data_or_null(const Tensor& tensor) {
  return tensor ? tensor.data<T>() : nullptr;
}

/// The tensor's gradient, or null if the tensor doesn't require one.
inline std::shared_ptr<Gradient> slot_of(const Tensor& tensor) {
  return tensor && tensor.requires_grad() ? tensor.gradient() : nullptr;
}

/// Sets a kernel's arguments to the memory of a gradient and to whether to add to its values. Leaves them if `slot` is
/// null: no gradient is required.
template <class T>
void write_to(const std::shared_ptr<Gradient>& slot, T*& data, bool& accumulate) {
  if (slot == nullptr) return;
  const GradientTarget target = slot->write();
  data = target.tensor.data<T>();
  accumulate = target.accumulate;
}

/// Throws InvalidUsage "OP: WHAT has shape S, needs T".
inline void require_shape(std::string_view op, std::string_view what, const Tensor& tensor, const Shape& needed) {
  if (tensor.shape() != needed)
    throw InvalidUsage(std::string(op) + ": " + std::string(what) + " has shape " + to_string(tensor.shape()) +
                       ", needs " + to_string(needed));
}

/// Throws InvalidUsage "OP: WHAT is D, needs E".
inline void require_dtype(std::string_view op, std::string_view what, const Tensor& tensor, DType needed) {
  if (tensor.dtype() != needed)
    throw InvalidUsage(std::string(op) + ": " + std::string(what) + " is " + std::string(name_of(tensor.dtype())) +
                       ", needs " + std::string(name_of(needed)));
}

}  // namespace tessera::nn::ops
