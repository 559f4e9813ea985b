#include "tessera/libtorch/model.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <map>
#include <set>
#include <typeinfo>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/libtorch/hooks/boundary.h"
#include "tessera/libtorch/hooks/torch_device.h"
#include "tessera/libtorch/unit.h"

namespace tessera::libtorch {
namespace {

namespace autograd = torch::autograd;
using base::DType;
using base::InvalidUsage;

constexpr std::pair<at::ScalarType, DType> kDTypes[] = {
    {at::kFloat, DType::f32}, {at::kDouble, DType::f64},  {at::kHalf, DType::f16}, {at::kBFloat16, DType::bf16},
    {at::kChar, DType::i8},   {at::kByte, DType::u8},     {at::kInt, DType::i32},  {at::kLong, DType::i64},
    {at::kShort, DType::i16}, {at::kBool, DType::boolean}};

/// Makes a tensor of the meta device one of `device`, without memory yet, for all who have it.
void leave_meta(const at::Tensor& tensor, const at::Device& device) {
  const at::NoGradGuard no_grad;
  const at::Storage storage(c10::Storage::use_byte_size_t(),
                            static_cast<std::size_t>(tensor.numel()) * tensor.element_size(),
                            at::DataPtr(nullptr, device),
                            /*allocator=*/nullptr, /*resizable=*/false);
  const at::Tensor there =
      at::empty({0}, tensor.options().device(device)).set_(storage, 0, tensor.sizes(), tensor.strides());
  tensor.unsafeGetTensorImpl()->shallow_copy_from(there.getIntrusivePtr());
}

DType dtype_of(const std::string& name, const at::Tensor& tensor) {
  for (const auto& [torch, own] : kDTypes)
    if (torch == tensor.scalar_type()) return own;
  throw base::Unsupported(name + " has elements of type " + c10::toString(tensor.scalar_type()) +
                          "; convert it before an engine is made");
}

at::ScalarType torch_dtype_of(DType dtype) {
  for (const auto& [torch, own] : kDTypes)
    if (own == dtype) return torch;
  throw base::Unsupported("no libtorch type for " + std::string(base::name_of(dtype)));
}

class TorchParameter;

/// What the modules of one model share.
struct Shared {
  TorchDevice& device;
  base::Stream& stream;
  const Initializer initializer;
  const std::shared_ptr<Passes> passes;
  std::map<const at::TensorImpl*, std::shared_ptr<TorchParameter>> parameters;
  std::set<const torch::nn::Module*> modules;
  std::map<const void*, std::string> memory;

  /// Throws if another tensor has the same memory.
  void claim(const std::string& name, const void* identity) {
    const auto [known, is_new] = memory.emplace(identity, name);
    if (!is_new)
      throw InvalidUsage(name + " and " + known->second +
                         " are two tensors with the same memory; register the same tensor twice");
  }
};

/// What a parameter and a buffer have alike.
template <class Interface>
class TorchTensor : public Interface {
 public:
  TorchTensor(std::string name, at::Tensor tensor, Shared& shared)
      : name_(std::move(name)),
        shape_(tensor.sizes().vec()),
        dtype_(dtype_of(name_, tensor)),
        tensor_(std::move(tensor)),
        initializer_(leave_meta_with(shared)),
        stream_(shared.stream),
        memory_(name_, tensor_) {}
  const std::string& name() const final { return name_; }
  const base::Shape& shape() const final { return shape_; }
  std::int64_t count() const final { return tensor_.numel(); }
  DType dtype() const final { return dtype_; }
  void* data() const final {
    if (memory_.data() == nullptr && count() > 0) throw InvalidUsage(name_ + " has no memory: " + why_);
    return memory_.data();
  }
  void bind(void* data) override {
    require_unchanged();
    memory_.move_to(data, "");
  }
  void unbind(std::string_view why) final {
    why_ = why;
    memory_.move_to(nullptr, why_);
  }
  void fill_initial(std::uint64_t /*seed*/, base::ElementRange range, DType dtype, void* out) const final {
    stream_.run([this, range, out, type = torch_dtype_of(dtype)] {
      const at::NoGradGuard no_grad;
      at::from_blob(out, {range.count()}, tensor_.options().dtype(type).requires_grad(false))
          .copy_(initial_values().flatten().slice(0, range.begin, range.end));
    });
  }
  const at::Tensor& tensor() const { return tensor_; }
  TensorMemory& memory() { return memory_; }
  /// On the tensor's device.
  at::Tensor initial_values() const {
    if (!initializer_ && memory_.initial() == nullptr && count() > 0)
      throw InvalidUsage(name_ + " can't be initialized again: its first values are gone");
    const at::TensorOptions options = tensor_.options().requires_grad(false);
    if (!initializer_) return at::from_blob(const_cast<void*>(memory_.initial()), tensor_.sizes(), options);
    at::Tensor values = at::empty(tensor_.sizes(), options);
    initializer_(name_, values);
    return values;
  }
  /// Throws InvalidUsage if the program has replaced the tensor's memory or dtype.
  void require_unchanged() const {
    if (!memory_.is_of(tensor_) || dtype_of(name_, tensor_) != dtype_)
      throw InvalidUsage(name_ +
                         " has other memory than when the engine was made, by set_data() or Module::to(); the engine "
                         "would train what the model no longer uses: convert a model before its engine is made");
  }

 private:
  /// That of a tensor of the meta device, which it makes one of the model's; none for others.
  Initializer leave_meta_with(const Shared& shared) const {
    if (!tensor_.is_meta()) return {};
    if (!shared.initializer)
      throw InvalidUsage(name_ + " is on the meta device and has no values; pass an initializer to the engine");
    leave_meta(tensor_, shared.device.device());
    return shared.initializer;
  }

  const std::string name_;
  const base::Shape shape_;
  const DType dtype_;
  const at::Tensor tensor_;
  const Initializer initializer_;
  base::Stream& stream_;
  TensorMemory memory_;
  std::string why_ = "no engine has bound it";
};

/// Takes a parameter's gradient before AccumulateGrad does, which then has none: the parameter's grad() stays
/// undefined.
class GradientHook final : public autograd::FunctionPreHook {
 public:
  using Take = std::function<void(const at::Tensor&)>;
  explicit GradientHook(std::shared_ptr<const Take> take) : take_(std::move(take)) {}
  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    if (!*take_) return gradients;
    if (gradients[0].defined()) (*take_)(gradients[0]);
    return {at::Tensor()};
  }

 private:
  const std::shared_ptr<const Take> take_;
};

class TorchParameter final : public TorchTensor<fsdp::Parameter> {
 public:
  TorchParameter(std::string name, at::Tensor tensor, Shared& shared, std::string owner)
      : TorchTensor(std::move(name), std::move(tensor), shared), owner_(std::move(owner)) {}
  ~TorchParameter() override { *take_ = {}; }
  bool requires_grad() const override { return tensor().requires_grad(); }
  bool decays() const override { return tensor().dim() >= 2; }
  void bind(void* data) override {
    TorchTensor::bind(data);
    if (accumulator_ != nullptr || !requires_grad()) return;
    *take_ = [this](const at::Tensor& gradient) { take(gradient); };
    accumulator_ = autograd::impl::grad_accumulator(tensor());
    accumulator_->add_pre_hook(std::make_unique<GradientHook>(take_));
  }
  void bind_gradient(void* data, bool keep) override {
    target_ = at::from_blob(data, tensor().sizes(), tensor().options().requires_grad(false));
    written_ = keep;
  }
  bool gradient_written() const override { return written_; }
  const void* gradient() const override { return written_ ? target_.data_ptr() : nullptr; }
  void unbind_gradient() override {
    target_ = at::Tensor();
    written_ = false;
  }

 private:
  /// The gradient behind the program's hooks, which Torch 2 has called already.
  at::Tensor hooked(const at::Tensor& gradient) const {
    autograd::variable_list changed{gradient};
#if TORCH_VERSION_MAJOR < 2
    for (const auto& hook : autograd::impl::hooks(tensor())) changed = (*hook)(changed);
#endif
    return changed.at(0);
  }
  void take(const at::Tensor& given) {
    if (at::GradMode::is_enabled())
      throw base::Unsupported(
          "backward: create_graph, for a backward through this one, is not supported with an engine");
    if (!target_.defined())
      throw InvalidUsage("backward: a gradient of " + name() +
                         " comes outside of the backward of its unit: call module " + owner_ +
                         " through its TESSERA_UNIT, as unit(x), unit->forward(x) or "
                         "module->as<Unit>()->forward(x)");
    const at::Tensor gradient = hooked(given);
    if (gradient.layout() != at::kStrided)
      throw base::Unsupported("backward: the gradient of " + name() + " is sparse; use one that is dense");
    const at::NoGradGuard no_grad;
    if (std::exchange(written_, true))
      target_.add_(gradient);
    else
      target_.copy_(gradient);
  }

  const std::string owner_;
  at::Tensor target_;
  bool written_ = false;
  const std::shared_ptr<GradientHook::Take> take_ = std::make_shared<GradientHook::Take>();
  decltype(autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) accumulator_;  // a tensor's is weak
};

class TorchBuffer final : public TorchTensor<fsdp::ModuleBuffer> {
 public:
  using TorchTensor::TorchTensor;
  bool persistent() const override { return true; }
};

std::string class_name(const std::type_info& type) {
  std::string name = fsdp::class_name(type);
  if (name.ends_with("Impl")) name.resize(name.size() - 4);  // "Linear", as its holder is called
  return name;
}

class Node final : public fsdp::Module {
 public:
  Node(torch::nn::Module& module, std::string path, Shared& shared)
      : path_(std::move(path)),
        hooked_(dynamic_cast<UnitHooks*>(&module)),
        type_(class_name(hooked_ != nullptr ? hooked_->own_class() : typeid(module))) {
    const bool is_new = shared.modules.insert(&module).second;
    boundary_ = std::make_shared<Boundary>(path_, type_, shared.passes);
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = item.value();
      if (!tensor.defined()) continue;
      std::shared_ptr<TorchParameter>& parameter = shared.parameters[tensor.unsafeGetTensorImpl()];
      if (parameter == nullptr) {
        parameter =
            std::make_shared<TorchParameter>(below(item.key()), tensor, shared, path_.empty() ? "the model" : path_);
        shared.claim(parameter->name(), parameter->memory().identity());
      }
      dtype_ = parameters_.empty() ? parameter->dtype() : dtype_;
      parameters_.push_back(parameter);
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      if (!item.value().defined() || !is_new) continue;
      auto buffer = std::make_shared<TorchBuffer>(below(item.key()), item.value(), shared);
      shared.claim(buffer->name(), buffer->memory().identity());
      own_buffers_.push_back(std::move(buffer));
    }
    for (const auto& item : module.named_children())
      children_.push_back(std::make_unique<Node>(*item.value(), below(item.key()), shared));
    if (parameters_.empty() && !children_.empty()) dtype_ = children_.front()->dtype();
  }
  ~Node() override {
    boundary_->set_hooks({});
    if (hooked_ != nullptr && hooked_->boundary() == boundary_) hooked_->set_boundary(nullptr);
  }
  const std::string& path() const override { return path_; }
  std::string type() const override { return type_; }
  DType dtype() const override { return dtype_; }
  bool is_block() const override { return hooked_ != nullptr && !path_.empty(); }
  void set_hooks(fsdp::ModuleHooks hooks) override {
    const bool installs = static_cast<bool>(hooks.pre_forward);
    if (installs && hooked_ == nullptr && !path_.empty())
      throw InvalidUsage("module " + path_ + " is a unit, but its class calls no hooks: write TESSERA_UNIT(" + type_ +
                         ") instead of TORCH_MODULE(" + type_ + "), and make and call it through that holder");
    boundary_->set_hooks(std::move(hooks));
    if (hooked_ != nullptr && installs) hooked_->set_boundary(boundary_);
  }
  const fsdp::ModuleHooks& hooks() const override { return boundary_->hooks(); }
  const std::shared_ptr<Boundary>& boundary() const { return boundary_; }
  bool calls_hooks() const { return hooked_ != nullptr; }

 private:
  std::string below(const std::string& name) const { return path_.empty() ? name : path_ + "." + name; }

  const std::string path_;
  UnitHooks* const hooked_;
  const std::string type_;
  DType dtype_ = DType::f32;
  std::shared_ptr<Boundary> boundary_;
};

}  // namespace

class TorchModel::State {
 public:
  State(torch::nn::Module& model, Initializer initializer, std::shared_ptr<base::MemoryTracker> memory_tracker,
        StreamMaker make_stream)
      : module(model),
        device(model),
        runtime(fsdp::make_runtime(
            device.context_options(std::move(memory_tracker), std::move(make_stream)),
            [this] { return at::GradMode::is_enabled() || shared.passes->checkpoints; }, "libtorch " TORCH_VERSION)),
        shared{.device = device,
               .stream = runtime->stream(),
               .initializer = std::move(initializer),
               .passes = std::make_shared<Passes>(Passes{device, *runtime})},
        root(model, "", shared) {}
  template <class Visit>
  void for_each_memory(const Visit& visit) {
    for (const auto& [impl, parameter] : shared.parameters) visit(parameter->memory());
    for (const auto& buffer : root.buffers()) visit(static_cast<TorchBuffer&>(*buffer).memory());
  }
  /// Throws InvalidUsage if the program has registered or replaced a trained parameter, or a module that has one.
  void require_same_tensors() const {
    for (const auto& item : module.named_parameters())
      if (item.value().requires_grad() && !shared.parameters.contains(item.value().unsafeGetTensorImpl()))
        throw InvalidUsage(item.key() +
                           " was registered, or a module with it was replaced, after the engine was made, which does "
                           "not train it: change a model before its engine is made");
  }

  torch::nn::Module& module;
  TorchDevice device;
  const std::unique_ptr<fsdp::Runtime> runtime;
  Shared shared;
  Node root;
};

TorchModel::TorchModel(torch::nn::Module& model, Initializer initializer,
                       std::shared_ptr<base::MemoryTracker> memory_tracker, StreamMaker make_stream)
    : state_(
          std::make_unique<State>(model, std::move(initializer), std::move(memory_tracker), std::move(make_stream))) {}
TorchModel::~TorchModel() = default;
fsdp::Module& TorchModel::root() { return state_->root; }
fsdp::Runtime& TorchModel::runtime() { return *state_->runtime; }
void TorchModel::release_initial_values() {
  state_->for_each_memory([](TensorMemory& memory) { memory.release_initial(); });
}
void TorchModel::on_update() {
  state_->require_same_tensors();
  for (const auto& [impl, parameter] : state_->shared.parameters) {
    parameter->require_unchanged();
    parameter->tensor().unsafeGetTensorImpl()->bump_version();
  }
  for (const auto& buffer : state_->root.buffers()) static_cast<TorchBuffer&>(*buffer).require_unchanged();
  state_->shared.passes->await_engine();
}
const at::Tensor& torch_tensor(const fsdp::ModelTensor& tensor) {
  if (const auto* const parameter = dynamic_cast<const TorchParameter*>(&tensor)) return parameter->tensor();
  if (const auto* const buffer = dynamic_cast<const TorchBuffer*>(&tensor)) return buffer->tensor();
  throw InvalidUsage(tensor.name() + " is not of a libtorch model");
}

at::Tensor initial_values(const fsdp::Parameter& parameter) {
  return static_cast<const TorchParameter&>(parameter).initial_values();
}

void TorchModel::checkpoint_activations() { libtorch::checkpoint_activations(state_->module); }
const std::shared_ptr<Boundary>& TorchModel::boundary() const { return state_->root.boundary(); }
bool TorchModel::root_is_unit() const { return state_->root.calls_hooks(); }

}  // namespace tessera::libtorch
