#include "tessera/nn/gradient.h"

#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn {
namespace {

void assign(const Tensor& target, const Tensor& source, bool accumulate) {
  Context& context = target.context();
  ops::for_floating("gradient", target.dtype(), [&](auto zero) {
    using T = decltype(zero);
    context.kernels<T>("gradient")
        .assign(context.stream(), {source.data<T>(), target.data<T>(), ops::size(target.count()), accumulate});
  });
}

}  // namespace

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
