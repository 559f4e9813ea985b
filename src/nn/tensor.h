// Tensors: a shape over contiguous memory, which may be part of a larger buffer and may be bound and unbound.
//
// A Tensor is a handle. A parameter's handle stays the same while its owner, such as an engine, binds (unshards) and
// unbinds (reshards) the memory behind it. The tape therefore keeps handles and calls data() only when it needs the
// memory.
#pragma once

#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <utility>

#include "tessera/nn/context.h"
#include "tessera/nn/types.h"

namespace tessera::nn {

class Gradient;
class Recomputation;

/// A handle that is cheap to copy; copies share memory and gradient. A default-constructed tensor is empty (false).
class TESSERA_API Tensor {
 public:
  Tensor() = default;

  /// Uninitialized memory from the context's pool, tracked under category `use`.
  static Tensor empty(Context& context, Shape shape, DType dtype, MemoryCategory use = MemoryCategory::activation);
  /// An empty() tensor that is then filled with zeros on the compute stream.
  static Tensor zeros(Context& context, Shape shape, DType dtype, MemoryCategory use = MemoryCategory::activation);
  /// A copy of `values`, as many as `shape` has, in host memory.
  template <class T>
  static Tensor from(Context& context, std::span<const T> values, Shape shape) {
    return from(context, {values.data(), values.size(), dtype_of<T>}, std::move(shape));
  }
  /// The same from a vector or an array.
  template <std::ranges::contiguous_range R>
  static Tensor from(Context& context, const R& values, Shape shape) {
    return from(context, std::span<const std::ranges::range_value_t<R>>(values), std::move(shape));
  }
  /// A handle without memory; see bind().
  static Tensor unbound(Context& context, Shape shape, DType dtype, std::string name);
  /// The same memory under another shape of equal count, without a gradient. For a parameter it is a view of the memory
  /// that is currently bound, so don't keep it.
  Tensor viewed(Shape shape) const;
  /// The same memory without a gradient: what a backward saves and reads. For a parameter, see viewed().
  Tensor detached() const;

  /// False for an empty handle; all other functions then throw InvalidUsage.
  explicit operator bool() const { return impl_ != nullptr; }
  const Shape& shape() const;                           ///< extents, outermost first
  std::int64_t dim(int index) const;                    ///< negative: counted from the end
  std::int64_t count() const;                           ///< elements
  std::size_t bytes() const;                            ///< bytes of all elements
  DType dtype() const;                                  ///< dtype of the elements
  Context& context() const;                             ///< the context of the memory and stream
  Device device() const { return context().device(); }  ///< the context's

  /// The elements, in device memory (host_access.h reads and writes them from the host). Throws InvalidUsage if T is
  /// not the dtype, or if the memory is unbound (the error names the tensor and the reason).
  template <class T>
  T* data() const {
    return static_cast<T*>(raw(dtype_of<T>));
  }
  /// The same as data(), for any dtype.
  void* raw() const;
  bool bound() const;  ///< true if it has memory
  /// True if writes could be visible elsewhere: the memory is external, or another view shares it.
  bool shares_memory() const;

  /// Binds external memory of at least bytes() until unbind(); its owner keeps it alive.
  void bind(void* data);
  /// Unbinds the memory; later reads throw "NAME is not readable: REASON".
  void unbind(std::string reason);

  /// Waits for the stream and returns the only element, which has a floating-point type.
  double item() const;
  /// Tape::backward() of this loss on the context's recording tape: inside the TapeScope that recorded it. Throws
  /// InvalidUsage outside.
  void backward(double seed = 1.0) const;

  bool requires_grad() const;  ///< false by default, true for parameters
  /// Applies to leaves, such as a parameter to be frozen; recording() sets it on outputs.
  void set_requires_grad(bool value);
  /// The holder of this tensor's gradient (created by the first call).
  const std::shared_ptr<Gradient>& gradient() const;
  /// How backwards may compute this tensor again instead of keeping it (saved_tensor.h); null: they keep it. Views and
  /// detached tensors have none.
  const std::shared_ptr<Recomputation>& recomputation() const;
  void set_recomputation(std::shared_ptr<Recomputation> again);  ///< see recomputation()
  const std::string& name() const;                               ///< name passed to unbound(), else ""

 private:
  struct Impl;
  struct HostValues {
    const void* data;
    std::size_t count;
    DType dtype;
  };
  static Tensor from(Context& context, HostValues values, Shape shape);
  explicit Tensor(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  void* raw(DType expected) const;
  Impl& impl() const;
  std::shared_ptr<Impl> impl_;
};

}  // namespace tessera::nn
