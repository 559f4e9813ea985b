#include "tessera/nn/tape.h"

#include "tessera/nn/module.h"

namespace tessera::nn {
namespace {

template <class T>
void add_into(T* target, const T* source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] += source[i];
}

void add(const Tensor& target, const Tensor& source) {
  target.context().stream().run([t = target.raw(), s = source.raw(), count = target.count(), dtype = target.dtype()] {
    if (dtype == DType::f64) {
      add_into(static_cast<double*>(t), static_cast<const double*>(s), count);
    } else {
      add_into(static_cast<float*>(t), static_cast<const float*>(s), count);
    }
  });
}

void copy(const Tensor& target, const Tensor& source) {
  target.context().stream().run([t = target.raw(), s = source.raw(), bytes = target.bytes()] { std::copy_n(static_cast<const std::byte*>(s), bytes, static_cast<std::byte*>(t)); });
}

}  // namespace

GradientTarget Gradient::write() {
  if (!value_) {
    value_ = Tensor::empty(context_, shape_, dtype_, use_);
    shared_ = false;
  }
  if (written_ && shared_) {  // the memory is read by somebody else still: continue in memory of its own
    Tensor own = Tensor::empty(context_, shape_, dtype_, use_);
    copy(own, value_);
    value_ = own;
    shared_ = false;
  }
  return {value_, std::exchange(written_, true)};
}

void Gradient::give(const Tensor& gradient) {
  if (gradient.count() != count_of(shape_))
    throw InvalidUsage("gradient: got " + to_string(gradient.shape()) + " for a tensor of shape " + to_string(shape_));
  if (!written_ && !bound_) {
    value_ = gradient.viewed(shape_);
    written_ = shared_ = true;
    return;
  }
  const GradientTarget target = write();
  if (target.accumulate) {
    add(target.tensor, gradient);
  } else {
    copy(target.tensor, gradient);
  }
}

const Tensor& Gradient::value() const {
  if (!written_) throw InvalidUsage("gradient: nothing was written for the tensor of shape " + to_string(shape_));
  return value_;
}

void Gradient::clear() {
  written_ = shared_ = false;
  if (!bound_) value_ = Tensor();
}

void Gradient::bind(void* data, bool keep) {
  value_ = Tensor::unbound(context_, shape_, dtype_, "");
  value_.bind(data);
  bound_ = true;
  written_ = keep;
  shared_ = false;
}

void Gradient::unbind() {
  value_ = Tensor();
  bound_ = written_ = shared_ = false;
}

Tape::~Tape() = default;

void Tape::record(std::string_view op, const Tensor& output, std::function<void()> backward) {
  nodes_.push_back({Kind::operation, op, output.gradient(), std::move(backward), nullptr});
}

void Tape::enter(Module& module) { nodes_.push_back({Kind::enter, {}, nullptr, nullptr, &module}); }
void Tape::leave(Module& module) { nodes_.push_back({Kind::leave, {}, nullptr, nullptr, &module}); }
void Tape::clear() { nodes_.clear(); }

void Tape::run(Node& node) {
  switch (node.kind) {
    case Kind::leave: node.module->notify_backward_begins(); return;
    case Kind::enter: node.module->notify_backward_ends(); return;
    case Kind::operation: break;
  }
  if (!node.output->written()) return;  // nothing downstream wanted it
  node.backward();
  node.output->clear();
}

void Tape::backward(const Tensor& loss, double seed) {
  if (loss.count() != 1) throw InvalidUsage("backward: the loss has shape " + to_string(loss.shape()) + ", not one element");
  struct Emptied {
    Tape& tape;
    ~Emptied() { tape.clear(); }
  } const emptied{*this};
  const Tensor start = loss.gradient()->write().tensor;
  start.context().stream().run([data = start.raw(), dtype = start.dtype(), seed] {
    if (dtype == DType::f64) {
      *static_cast<double*>(data) = seed;
    } else {
      *static_cast<float*>(data) = static_cast<float>(seed);
    }
  });
  while (!nodes_.empty()) {
    Node node = std::move(nodes_.back());
    nodes_.pop_back();
    run(node);
  }
}

Tape* recording(std::initializer_list<Tensor> inputs, Tensor& output) {
  Tape* tape = output.context().tape();
  if (tape == nullptr) return nullptr;
  for (const Tensor& input : inputs) {
    if (!input || !input.requires_grad()) continue;
    output.set_requires_grad(true);
    return tape;
  }
  return nullptr;
}

}  // namespace tessera::nn
