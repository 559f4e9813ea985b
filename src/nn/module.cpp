#include "tessera/nn/module.h"

#include <algorithm>
#include <string>

#include "tessera/base/error.h"
#include "tessera/nn/context.h"
#include "tessera/nn/init.h"
#include "tessera/nn/ops/cast.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/random.h"

namespace tessera::nn {
namespace {

void check(std::string_view name, const ElementRange& range) {
  if (range.begin < 0 || range.end < range.begin)
    throw base::InvalidUsage("fill_initial: elements " + std::to_string(range.begin) + " to " +
                             std::to_string(range.end) + " of " + std::string(name) + " are no range");
}

}  // namespace

Parameter::Parameter(Context& context, std::string name, Shape shape, Init init)
    : name_(name), init_(init), tensor_(Tensor::unbound(context, std::move(shape), DType::f32, std::move(name))) {
  tensor_.set_requires_grad(true);
  tensor_.gradient()->set_use(MemoryCategory::gradient);
}

Module::~Module() = default;

std::vector<std::shared_ptr<Parameter>> Module::parameters() const {
  return base::parameters_of(base::modules_of(*this));
}

std::vector<std::shared_ptr<ModuleBuffer>> Module::buffers() const {
  std::vector<std::shared_ptr<ModuleBuffer>> out;
  for (const Module* module : base::modules_of(*this))
    out.insert(out.end(), module->own_buffers().begin(), module->own_buffers().end());
  return out;
}

std::vector<Module*> Module::modules() { return base::modules_of(*this); }

Module& Module::find(std::string_view path) { return base::module_at(*this, path); }

Parameter& Module::add_parameter(std::string name, Shape shape, Init init) {
  parameters_.push_back(std::make_shared<Parameter>(context_, name, std::move(shape), init));
  local_names_.push_back(std::move(name));
  return *parameters_.back();
}

Parameter& Module::tie_parameter(const Parameter& parameter, const Module& owner) {
  for (const auto& candidate : owner.parameters()) {
    if (candidate.get() != &parameter) continue;
    parameters_.push_back(candidate);
    local_names_.emplace_back();
    return *candidate;
  }
  throw InvalidUsage("tie: " + parameter.name() + " is not a parameter of the module that is named as its owner");
}

ModuleBuffer& Module::add_buffer(const std::string& name, Shape shape, BufferOptions options) {
  const std::string full = path_.empty() ? name : path_ + "." + name;  // the module may be in a model already
  const bool taken = std::find(local_names_.begin(), local_names_.end(), name) != local_names_.end() ||
                     std::any_of(buffers_.begin(), buffers_.end(), [&](const auto& b) { return b->name() == full; });
  if (taken) throw InvalidUsage("buffer " + name + ": the module already has a parameter or buffer of that name");
  const DType dtype = options.dtype;
  if (!is_floating(dtype) && dtype != DType::i32 && dtype != DType::i64 && dtype != DType::u8)
    throw InvalidUsage("buffer " + name + " of " + std::string(name_of(dtype)) +
                       " is not supported; use a floating type, i32, i64 or u8");
  if (!is_floating(dtype) && (options.init.kind != Init::Kind::zeros || options.follows_dtype))
    throw InvalidUsage("buffer " + name + " of " + std::string(name_of(dtype)) +
                       ": integer buffers start as zeros and keep their dtype");
  buffers_.push_back(std::make_shared<ModuleBuffer>(context_, full, std::move(shape), options));
  return *buffers_.back();
}

bool Module::updates_buffers() const {
  const Tape* const tape = context_.tape();
  return context_.training() && (tape == nullptr || tape->phase() == Phase::forward);
}

void Module::adopt(std::string name, std::unique_ptr<Module> child) {
  child->parent_ = this;
  child->rename(path_.empty() ? name : path_ + "." + name);  // this module may already have its final path
  children_.push_back(std::move(child));
}

void Module::rename(const std::string& prefix) {
  path_ = path_.empty() ? prefix : prefix + "." + path_;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (local_names_[i].empty()) continue;
    Parameter& parameter = *parameters_[i];
    remake(parameter, prefix + "." + parameter.name_, parameter.shape(), parameter.dtype());
  }
  for (const auto& buffer : buffers_)
    buffer->tensor_ = Tensor::unbound(context_, buffer->shape(), buffer->dtype(), prefix + "." + buffer->name());
  for (const auto& child : children_) child->rename(prefix);
}

/// A handle's name and dtype are fixed, so this creates a new handle.
void Module::remake(Parameter& parameter, std::string name, Shape shape, DType dtype) {
  const bool trainable = parameter.tensor_.requires_grad();
  parameter.tensor_ = Tensor::unbound(context_, std::move(shape), dtype, name);
  parameter.name_ = std::move(name);
  parameter.tensor_.set_requires_grad(trainable);
  parameter.tensor_.gradient()->set_use(MemoryCategory::gradient);
}

void Module::set_dtype(DType dtype) {
  if (!is_floating(dtype))
    throw InvalidUsage("set_dtype: " + std::string(name_of(dtype)) + " is not a floating type, which parameters need");
  const auto require_no_memory = [](const Tensor& tensor) {
    if (tensor.bound())
      throw InvalidUsage("set_dtype: " + tensor.name() + " already has memory; call set_dtype() before");
  };
  for (const auto& parameter : parameters()) {
    require_no_memory(parameter->tensor());
    if (is_floating(parameter->dtype())) remake(*parameter, parameter->name(), parameter->shape(), dtype);
  }
  for (const auto& buffer : buffers()) {
    if (!buffer->options_.follows_dtype) continue;
    require_no_memory(buffer->tensor());
    buffer->tensor_ = Tensor::unbound(context_, buffer->shape(), dtype, buffer->name());
  }
  for (Module* module : modules()) module->own_dtype_.reset();
  own_dtype_ = dtype;
}

DType Module::dtype() const {
  if (own_dtype_) return *own_dtype_;
  return parent_ != nullptr ? parent_->dtype() : DType::f32;
}

void Module::validate_dtypes() const {
  const DType own = dtype();
  for (const auto& parameter : parameters_)
    if (is_floating(parameter->dtype()) && parameter->dtype() != own)
      throw InvalidUsage(
          (path_.empty() ? "the root" : path_) + " is of " + std::string(name_of(own)) + ", and its parameter " +
          parameter->name() + " of " + std::string(name_of(parameter->dtype())) +
          ": modules that share a parameter need the same dtype; call set_dtype() after all parameters were added");
  if (is_boundary() && (own == DType::f64 || parent_->dtype() == DType::f64))
    throw InvalidUsage(path_ + " is of " + std::string(name_of(own)) + " inside " +
                       std::string(name_of(parent_->dtype())) + ": f64 is never cast; use one dtype");
  for (const auto& child : children_) child->validate_dtypes();
}

Tensor Module::boundary_cast(const Tensor& x, DType dtype) {
  return x && is_floating(x.dtype()) && x.dtype() != DType::f64 ? ops::cast(x, dtype) : x;
}

void Module::quantize_parameter(Parameter& parameter, std::int64_t bytes) {
  if (parameter.tensor().bound())
    throw InvalidUsage("encode: " + parameter.name() + " already has memory; choose the encoding before");
  parameter.tensor_.set_requires_grad(false);
  parameter.init_ = Init::zeros();
  remake(parameter, parameter.name(), {bytes}, DType::u8);
}

void Module::materialize(std::uint64_t seed) {
  validate_dtypes();
  const auto allocate = [&](const auto& owner, MemoryCategory use) {
    Tensor tensor = owner.tensor();
    storage_.push_back(context_.memory().allocate(tensor.bytes(), use));
    tensor.bind(storage_.back().data());
    fill_initial(context_, {owner.init(), owner.name(), seed, {0, owner.count()}}, tensor.dtype(), tensor.raw());
  };
  for (const auto& parameter : parameters()) allocate(*parameter, MemoryCategory::parameter);
  for (const auto& buffer : buffers()) allocate(*buffer, MemoryCategory::other);
}

void Module::notify_forward_begins() {
  Tape* const tape = context_.tape();
  if (tape != nullptr) tape->enter(*this);
  if (hooks_.pre_forward) hooks_.pre_forward(tape != nullptr ? tape->phase() : Phase::forward);
}

void Module::notify_forward_ends() {
  Tape* const tape = context_.tape();
  if (hooks_.post_forward) hooks_.post_forward(tape != nullptr ? tape->phase() : Phase::forward);
  if (tape != nullptr) tape->leave(*this);
}

void Module::notify_recompute_begins() {
  if (hooks_.pre_forward) hooks_.pre_forward(Phase::recompute);
}

void Module::notify_recompute_ends() {
  if (hooks_.post_forward) hooks_.post_forward(Phase::recompute);
}

void Module::refuse_checkpoint() const {
  throw InvalidUsage("checkpoint_activations: " + (path_.empty() ? "the root" : path_) +
                     " does not return one tensor, or has an argument that can't be copied; checkpoint its submodules");
}

void Module::notify_backward_begins() {
  if (hooks_.pre_backward) hooks_.pre_backward();
}

void Module::notify_backward_ends() {
  if (hooks_.post_backward) hooks_.post_backward();
}

void fill_initial(const Init& init, std::string_view name, std::uint64_t seed, ElementRange range, float* out) {
  check(name, range);
  const RandomRange drawn{name, seed, static_cast<std::uint64_t>(range.begin), static_cast<std::uint64_t>(range.end)};
  const auto deviation = static_cast<float>(init.deviation);
  switch (init.kind) {
    case Init::Kind::zeros:
      std::fill_n(out, range.count(), 0.0F);
      return;
    case Init::Kind::ones:
      std::fill_n(out, range.count(), 1.0F);
      return;
    case Init::Kind::normal:
      return fill_normal(drawn, 0.0F, deviation, out);
    case Init::Kind::uniform:
      return fill_uniform(drawn, -deviation, deviation, out);
  }
}

namespace {

template <class T>
void draw(Context& context, const InitialValues& values, T* out) {
  const ElementRange& range = values.range;
  KernelTable<T>& device = context.kernels<T>("init");
  const auto number = [](float value) { return static_cast<T>(value); };
  const auto deviation = static_cast<kernels::OpMath<T>>(values.init.deviation);
  const StreamRange drawn{tensor_stream(values.seed, values.name), static_cast<std::uint64_t>(range.begin),
                          static_cast<std::uint64_t>(range.end)};
  switch (values.init.kind) {
    case Init::Kind::zeros:
    case Init::Kind::ones:
      device.fill(context.stream(), number(values.init.kind == Init::Kind::ones ? 1.0F : 0.0F), out,
                  static_cast<std::size_t>(range.count()));
      return;
    case Init::Kind::normal:
      return device.fill_normal(context.stream(), {.range = drawn, .deviation = deviation, .out = out});
    case Init::Kind::uniform:
      return device.fill_uniform(context.stream(), {drawn, -deviation, deviation, out});
  }
}

}  // namespace

void fill_initial(Context& context, const InitialValues& values, float* out) {
  check(values.name, values.range);
  draw(context, values, out);
}

void fill_initial(Context& context, const InitialValues& values, DType dtype, void* out) {
  check(values.name, values.range);
  if (!is_floating(dtype))  // an encoding, which is written later, or a buffer's integer counts
    return context.runtime().fill(context.stream(), out, 0,
                                  static_cast<std::size_t>(values.range.count()) * size_of(dtype));
  ops::for_floating("init", dtype, [&](auto zero) { draw(context, values, static_cast<decltype(zero)*>(out)); });
}

}  // namespace tessera::nn
