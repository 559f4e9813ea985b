#include "tessera/nn/tensor.h"

#include <cstdint>
#include <cstring>

#include "tessera/nn/gradient.h"
#include "tessera/nn/host_access.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/tape.h"

namespace tessera::nn {
namespace {

void assign(const Tensor& target, const Tensor& source, bool accumulate) {
  ops::with_kernels("gradient", target, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    device.assign(stream, {source.data<T>(), target.data<T>(), ops::size(target.count()), accumulate});
  });
}

}  // namespace

struct Tensor::Impl {
  Context* context = nullptr;
  Shape shape;
  DType dtype = DType::f32;
  std::shared_ptr<Buffer> storage;  // null if the memory is bound externally
  void* data = nullptr;
  bool requires_grad = false;
  std::shared_ptr<Gradient> gradient;
  std::shared_ptr<Recomputation> recomputation;
  std::string name;
  std::string reason;  // why it is unbound
};

namespace {

/// Memory that the host released must stay unchanged until the stream has completed the work that uses it.
std::shared_ptr<Buffer> stream_ordered(Context& context, Buffer buffer) {
  if (context.stream().immediate()) return std::make_shared<Buffer>(std::move(buffer));
  return {new Buffer(std::move(buffer)),
          [&stream = context.stream()](Buffer* released) { stream.hold(std::shared_ptr<Buffer>(released)); }};
}

}  // namespace

Tensor Tensor::empty(Context& context, Shape shape, DType dtype, MemoryCategory use) {
  auto impl = std::make_shared<Impl>();
  impl->context = &context;
  const auto bytes = static_cast<std::size_t>(count_of(shape)) * size_of(dtype);
  impl->shape = std::move(shape);
  impl->dtype = dtype;
  impl->storage = stream_ordered(context, context.memory().allocate(bytes, use));
  impl->data = impl->storage->data();
  return Tensor(std::move(impl));
}

Tensor Tensor::zeros(Context& context, Shape shape, DType dtype, MemoryCategory use) {
  Tensor tensor = empty(context, std::move(shape), dtype, use);
  context.runtime().fill(context.stream(), tensor.raw(), 0, tensor.bytes());
  return tensor;
}

Tensor Tensor::from(Context& context, HostValues values, Shape shape) {
  if (count_of(shape) != static_cast<std::int64_t>(values.count))
    throw InvalidUsage("a tensor of shape " + to_string(shape) + " has " + std::to_string(count_of(shape)) +
                       " elements, " + std::to_string(values.count) + " values were given");
  Tensor tensor = empty(context, std::move(shape), values.dtype);
  upload(context, tensor.raw(), tensor.bytes(), [&](void* to) { std::memcpy(to, values.data, tensor.bytes()); });
  return tensor;
}

Tensor Tensor::unbound(Context& context, Shape shape, DType dtype, std::string name) {
  auto impl = std::make_shared<Impl>();
  impl->context = &context;
  impl->shape = std::move(shape);
  impl->dtype = dtype;
  impl->name = std::move(name);
  impl->reason = "it has no memory yet (materialize the model, or wrap it in an engine)";
  return Tensor(std::move(impl));
}

Tensor Tensor::viewed(Shape shape) const {
  if (count_of(shape) != count())
    throw InvalidUsage("view: " + to_string(impl().shape) + " has " + std::to_string(count()) + " elements, " +
                       to_string(shape) + " has " + std::to_string(count_of(shape)));
  Tensor view = detached();
  view.impl_->shape = std::move(shape);
  return view;
}

Tensor Tensor::detached() const {
  auto copy = std::make_shared<Impl>(impl());
  copy->requires_grad = false;
  copy->gradient = nullptr;
  copy->recomputation = nullptr;
  return Tensor(std::move(copy));
}

Tensor::Impl& Tensor::impl() const {
  if (impl_ == nullptr) throw InvalidUsage("an empty tensor was used");
  return *impl_;
}

const Shape& Tensor::shape() const { return impl().shape; }
std::int64_t Tensor::dim(int index) const {
  const Shape& s = impl().shape;
  return s.at(static_cast<std::size_t>(index < 0 ? static_cast<int>(s.size()) + index : index));
}
std::int64_t Tensor::count() const { return count_of(impl().shape); }
std::size_t Tensor::bytes() const { return static_cast<std::size_t>(count()) * size_of(impl().dtype); }
DType Tensor::dtype() const { return impl().dtype; }
Context& Tensor::context() const { return *impl().context; }
bool Tensor::bound() const { return impl().data != nullptr; }
bool Tensor::shares_memory() const { return impl().storage == nullptr || impl().storage.use_count() > 1; }
bool Tensor::requires_grad() const { return impl().requires_grad; }
void Tensor::set_requires_grad(bool value) { impl().requires_grad = value; }
const std::string& Tensor::name() const { return impl().name; }

void* Tensor::raw() const {
  const Impl& self = impl();
  if (self.data == nullptr)
    throw InvalidUsage((self.name.empty() ? "tensor " + to_string(self.shape) : self.name) +
                       " is not readable: " + self.reason);
  return self.data;
}

void* Tensor::raw(DType expected) const {
  if (impl().dtype != expected)
    throw InvalidUsage("tensor " + impl().name + to_string(impl().shape) + " holds " +
                       std::string(name_of(impl().dtype)) + ", read as " + std::string(name_of(expected)));
  return raw();
}

void Tensor::bind(void* data) {
  impl().storage = nullptr;
  impl().data = data;
}

void Tensor::unbind(std::string reason) {
  impl().storage = nullptr;
  impl().data = nullptr;
  impl().reason = std::move(reason);
}

double Tensor::item() const {
  if (count() != 1) throw InvalidUsage("item: the tensor has shape " + to_string(shape()) + ", not one element");
  double value = 0;
  download(context(), raw(), bytes(), [&](const void* from) {
    ops::for_floating("item", dtype(), [&](auto zero) {
      using T = decltype(zero);
      value = static_cast<double>(static_cast<kernels::OpMath<T>>(*static_cast<const T*>(from)));
    });
  });
  return value;
}

void Tensor::backward(double seed) const {
  Tape* const tape = context().tape();
  if (tape == nullptr)
    throw InvalidUsage("backward: nothing is recorded here; compute the loss and call backward() in one TapeScope");
  tape->backward(*this, seed);
}

const std::shared_ptr<Recomputation>& Tensor::recomputation() const { return impl().recomputation; }
void Tensor::set_recomputation(std::shared_ptr<Recomputation> again) { impl().recomputation = std::move(again); }

const std::shared_ptr<Gradient>& Tensor::gradient() const {
  Impl& self = impl();
  if (self.gradient == nullptr) self.gradient = std::make_shared<Gradient>(*self.context, self.shape, self.dtype);
  return self.gradient;
}

GradientTarget Gradient::write() {
  if (!value_) value_ = Tensor::empty(context_, shape_, dtype_, use_);
  if (written_ && !bound_ && value_.shares_memory()) {  // another owner reads it: continue in new memory
    const Tensor own = Tensor::empty(context_, shape_, dtype_, use_);
    assign(own, value_, false);
    value_ = own;
  }
  return {value_, std::exchange(written_, true)};
}

GradientTarget Gradient::acquire_reusing(const Gradient& finished) {
  const Tensor& source = finished.value();
  if (written_ || bound_ || source.shares_memory() || source.dtype() != dtype_ || source.count() != count_of(shape_))
    return write();
  accumulate(source);
  return {value_, false};
}

void Gradient::accumulate(const Tensor& gradient) {
  if (gradient.count() != count_of(shape_) || gradient.dtype() != dtype_)
    throw InvalidUsage("gradient: got " + to_string(gradient.shape()) + " " + std::string(name_of(gradient.dtype())) +
                       " for a tensor of shape " + to_string(shape_) + " " + std::string(name_of(dtype_)));
  if (!written_ && !bound_) {
    value_ = gradient.viewed(shape_);
    written_ = true;
    return;
  }
  const GradientTarget target = write();
  assign(target.tensor, gradient, target.accumulate);
}

const Tensor& Gradient::value() const {
  if (!written_) throw InvalidUsage("gradient: nothing was written for the tensor of shape " + to_string(shape_));
  return value_;
}

void Gradient::clear() {
  written_ = false;
  if (!bound_) value_ = Tensor();
}

void Gradient::bind(void* data, bool keep) {
  value_ = Tensor::unbound(context_, shape_, dtype_, "");
  value_.bind(data);
  bound_ = true;
  written_ = keep;
}

void Gradient::unbind() {
  value_ = Tensor();
  bound_ = written_ = false;
}

}  // namespace tessera::nn
