// Tensors: a shape over contiguous memory, which may be a part of something larger, and which may come and go.
//
// A Tensor is a handle. A parameter's handle stays the same while the memory behind it is bound (unsharded) and unbound
// (resharded) by whoever manages it; that is why the tape keeps handles and asks for data() only when it needs them.
#pragma once

#include <memory>
#include <string>

#include "tessera/nn/context.h"
#include "tessera/nn/types.h"

namespace tessera::nn {

class Gradient;

/// Product of the extents.
TESSERA_API std::int64_t count_of(const Shape& shape);
/// "[2, 3]".
TESSERA_API std::string to_string(const Shape& shape);

/// Cheap to copy; copies share memory and gradient. A default one is empty (false).
class TESSERA_API Tensor {
 public:
  Tensor() = default;

  /// Uninitialised memory from the context's pool, booked under `use`.
  static Tensor empty(Context& context, Shape shape, DType dtype, MemoryCategory use = MemoryCategory::activation);
  static Tensor zeros(Context& context, Shape shape, DType dtype, MemoryCategory use = MemoryCategory::activation);
  /// A handle without memory; see bind().
  static Tensor unbound(Context& context, Shape shape, DType dtype, std::string name);
  /// The same memory under another shape of equal count, without a gradient. Of a parameter it is a view of what is
  /// bound now, so never kept.
  Tensor viewed(Shape shape) const;
  /// The same memory without a gradient: what a backward saves and reads. Of a parameter: as viewed().
  Tensor detached() const;

  explicit operator bool() const { return impl_ != nullptr; }
  const Shape& shape() const;
  std::int64_t dim(int index) const;  ///< negative: from the end
  std::int64_t count() const;
  std::size_t bytes() const;
  DType dtype() const;
  Context& context() const;
  Device device() const { return context().device(); }

  /// The elements, in the device's memory (host_access.h reads and writes them from the host). Throws InvalidUsage
  /// where T is not the dtype, or where the memory is unbound (names the tensor and why).
  template <class T>
  T* data() const {
    return static_cast<T*>(raw(dtype_of<T>));
  }
  void* raw() const;
  bool bound() const;
  /// True where writing could be seen elsewhere: the memory is lent, or a tensor of another shape holds it too.
  bool shares_memory() const;

  /// Lends memory of at least bytes() to this tensor, until unbind(); the lender keeps it alive.
  void bind(void* data);
  /// Takes it away; later reads throw "NAME is not readable: REASON".
  void unbind(std::string reason);

  /// Waits for the stream and reads the only element, of a floating-point type.
  double item() const;

  bool requires_grad() const;
  void set_requires_grad(bool value);
  /// The slot for this tensor's gradient (made at the first call).
  const std::shared_ptr<Gradient>& gradient() const;
  const std::string& name() const;

 private:
  struct Impl;
  explicit Tensor(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  void* raw(DType expected) const;
  Impl& impl() const;
  std::shared_ptr<Impl> impl_;
};

}  // namespace tessera::nn
