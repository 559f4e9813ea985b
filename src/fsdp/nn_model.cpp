#include "tessera/fsdp/nn_model.h"

#include <limits>
#include <map>
#include <typeinfo>

#include "tessera/base/error.h"
#include "tessera/fsdp/nn_task.h"
#include "tessera/nn/activation_checkpoint.h"
#include "tessera/nn/graph_capture.h"
#include "tessera/nn/host_access.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/optimizer.h"
#include "tessera/nn/tape.h"

namespace tessera::fsdp {
namespace {

/// What an nn::Parameter and an nn::ModuleBuffer have alike.
template <class Interface, class Source>
class NnTensor : public Interface {
 public:
  explicit NnTensor(std::shared_ptr<Source> source) : source_(std::move(source)) {}
  const std::string& name() const final { return source_->name(); }
  const Shape& shape() const final { return source_->shape(); }
  std::int64_t count() const final { return source_->count(); }
  DType dtype() const final { return source_->dtype(); }
  void* data() const final { return source_->tensor().raw(); }
  void bind(void* data) final { handle().bind(data); }
  void unbind(std::string_view why) final { handle().unbind(std::string(why)); }
  void fill_initial(std::uint64_t seed, ElementRange range, DType dtype, void* out) const final {
    nn::fill_initial(source_->tensor().context(), {source_->init(), source_->name(), seed, range}, dtype, out);
  }
  const Source& source() const { return *source_; }

 protected:
  nn::Tensor handle() const { return source_->tensor(); }  // copies share the memory

 private:
  const std::shared_ptr<Source> source_;
};

class NnParameter final : public NnTensor<Parameter, nn::Parameter> {
 public:
  using NnTensor::NnTensor;
  bool requires_grad() const override { return source().tensor().requires_grad(); }
  bool decays() const override { return source().decays(); }
  void bind_gradient(void* data, bool keep) override { source().gradient().bind(data, keep); }
  bool gradient_written() const override { return source().gradient().written(); }
  const void* gradient() const override { return gradient_written() ? source().gradient().value().raw() : nullptr; }
  void unbind_gradient() override { source().gradient().unbind(); }
};

class NnBuffer final : public NnTensor<ModuleBuffer, nn::ModuleBuffer> {
 public:
  using NnTensor::NnTensor;
  bool persistent() const override { return source().persistent(); }
};

using Parameters = std::map<const nn::Parameter*, std::shared_ptr<NnParameter>>;

class NnNode final : public Module {
 public:
  /// `parameters`: those of modules before this one, which may share some.
  NnNode(nn::Module& module, Parameters& parameters) : module_(module) {
    for (const auto& parameter : module.own_parameters()) {
      std::shared_ptr<NnParameter>& known = parameters[parameter.get()];
      if (known == nullptr) known = std::make_shared<NnParameter>(parameter);
      parameters_.push_back(known);
    }
    for (const auto& buffer : module.own_buffers()) own_buffers_.push_back(std::make_shared<NnBuffer>(buffer));
    for (const auto& child : module.children()) children_.push_back(std::make_unique<NnNode>(*child, parameters));
  }
  const std::string& path() const override { return module_.path(); }
  std::string type() const override { return class_name(typeid(module_)); }
  DType dtype() const override { return module_.dtype(); }
  bool is_block() const override { return module_.is_block(); }
  void set_hooks(ModuleHooks hooks) override { module_.set_hooks(std::move(hooks)); }
  const ModuleHooks& hooks() const override { return module_.hooks(); }
  nn::Module& module() const { return module_; }

 private:
  nn::Module& module_;
};

class NnRuntime : public Runtime {
 public:
  explicit NnRuntime(nn::Context& context) : context_(context) {}
  base::DeviceRuntime& device_runtime() override { return context_.runtime(); }
  MemoryPool& memory() override { return context_.memory(); }
  Stream& stream() override { return context_.stream(); }
  std::unique_ptr<Stream> make_stream() const override { return context_.make_stream(); }
  bool recording() const override { return context_.tape() != nullptr; }
  void upload(void* to, std::size_t bytes, const std::function<void(void*)>& write) override {
    nn::upload(context_, to, bytes, write);
  }
  void download(const void* from, std::size_t bytes, const std::function<void(const void*)>& read) override {
    nn::download(context_, from, bytes, read);
  }
  void convert(Stream& stream, const void* in, DType from, void* out, DType to, std::size_t count) override {
    context_.device_kernels().convert(stream, {in, from, out, to, count});
  }
  void assign(Stream& stream, DType dtype, const void* in, void* out, std::size_t count, bool accumulate) override {
    nn::ops::for_floating("assign", dtype, [&](auto zero) {
      using T = decltype(zero);
      context_.kernels<T>("assign").assign(stream,
                                           {static_cast<const T*>(in), static_cast<T*>(out), count, accumulate});
    });
  }
  void subtract(Stream& stream, const float* a, const float* b, float* out, std::size_t count) override {
    nn::KernelTable<float>& kernels = context_.kernels<float>("subtract");
    kernels.scale(stream, {b, -1.0F, out, count, false});
    kernels.add(stream, {a, out, out, count});
  }
  void norm_slices(const NormSlices& args) override {
    nn::ops::for_floating("norm", args.dtype, [&](auto zero) {
      using T = decltype(zero);
      const T* const x = static_cast<const T*>(args.x);
      context_.kernels<T>("norm").norm_parts(context_.stream(),
                                             {args.norm, x, args.count, args.slices, args.counters, args.out});
    });
  }
  void clip_factor(Stream& stream, const ClipArgs& args) override {
    context_.device_kernels().clip_factor(stream, args);
  }
  void update(const OptimizerConfig& config, const OptimizerStep& step, const OptimizerRange& range) override {
    nn::update(context_, config, step, range);
  }
  std::unique_ptr<base::Graph> capture(MemoryPool& memory, const std::function<void()>& work) override {
    nn::GraphCapture capture(context_, memory);
    work();
    return capture.finish();
  }
  std::string products() const override {
    const std::optional<nn::Products> chosen = context_.device_kernels().products();
    return chosen ? std::string(name_of(*chosen)) : "";
  }
  std::string libraries() const override { return context_.device_kernels().libraries(); }
  nn::Context& context() const { return context_; }

 private:
  nn::Context& context_;
};

struct OwnContext {
  nn::Context context;
};

/// For a model of another library, with a context of its own.
class ForeignRuntime final : OwnContext, public NnRuntime {
 public:
  ForeignRuntime(nn::ContextOptions options, std::function<bool()> recording, std::string libraries)
      : OwnContext{nn::Context(std::move(options))},
        NnRuntime(OwnContext::context),
        recording_(std::move(recording)),
        libraries_(std::move(libraries)) {}
  bool recording() const override { return recording_(); }
  std::string products() const override { return ""; }
  std::string libraries() const override { return libraries_; }

 private:
  const std::function<bool()> recording_;
  const std::string libraries_;
};

}  // namespace

class NnModel::State {
 public:
  explicit State(nn::Module& model) : runtime(model.context()), root(model, parameters) {}
  NnRuntime runtime;
  Parameters parameters;
  NnNode root;
};

NnModel::NnModel(nn::Module& model) : state_(std::make_unique<State>(model)) {}
NnModel::~NnModel() = default;
Module& NnModel::root() { return state_->root; }
Runtime& NnModel::runtime() { return state_->runtime; }
void NnModel::checkpoint_activations() { nn::checkpoint_activations(state_->root.module()); }
void NnModel::validate() const { state_->root.module().validate_dtypes(); }

const nn::Parameter& nn_parameter(const Parameter& parameter) {
  if (const auto* const known = dynamic_cast<const NnParameter*>(&parameter)) return known->source();
  throw InvalidUsage("parameter " + parameter.name() + " is not of a tessera::nn model");
}

nn::Module& nn_module(Module& module) {
  if (const auto* const known = dynamic_cast<const NnNode*>(&module)) return known->module();
  throw InvalidUsage("module " + module.path() + " is not of a tessera::nn model");
}

const nn::Module& nn_module(const Module& module) { return nn_module(const_cast<Module&>(module)); }

std::unique_ptr<Runtime> make_runtime(nn::Context& context) { return std::make_unique<NnRuntime>(context); }

std::unique_ptr<Runtime> make_runtime(nn::ContextOptions options, std::function<bool()> recording,
                                      std::string libraries) {
  return std::make_unique<ForeignRuntime>(std::move(options), std::move(recording), std::move(libraries));
}

nn::Context& nn_context(Runtime& runtime) {
  if (const auto* const known = dynamic_cast<const NnRuntime*>(&runtime)) return known->context();
  throw Unsupported("this runtime has no tessera::nn kernels; use a collective that needs none, such as plain");
}

NnTask::NnTask(std::unique_ptr<nn::Module> module, std::uint64_t seed) : module_(std::move(module)), seed_(seed) {}
NnTask::~NnTask() = default;

Model& NnTask::model() {
  if (model_ == nullptr) model_ = std::make_unique<NnModel>(*module_);
  return *model_;
}

void NnTask::forward_backward(std::int64_t step, ElementRange samples, double scale) {
  context().random() = {.seed = seed_, .step = static_cast<std::uint64_t>(step), .first_sample = samples.begin};
  losses_.push_back(run_step(step, samples, scale));
}

nn::Tensor NnTask::run_step(std::int64_t step, ElementRange samples, double scale) {
  return differentiate([&] { return loss(step, samples); }, scale);
}

double NnTask::evaluation_loss(ElementRange samples) {
  const nn::EvaluationScope no_dropout(context());
  return evaluation(samples).item();
}

nn::Tensor NnTask::evaluation(ElementRange /*samples*/) { refuse_evaluation(); }

nn::Tensor NnTask::differentiate(const std::function<nn::Tensor()>& forward, double scale) {
  nn::Tape tape;
  nn::Tensor loss;
  {
    const nn::TapeScope recording(context(), &tape);
    loss = forward();
  }
  tape.backward(loss, scale);
  return loss;
}

double NnTask::mean_loss() {
  const std::vector<nn::Tensor> losses = std::exchange(losses_, {});
  if (context().device().type == base::DeviceType::meta) return std::numeric_limits<double>::quiet_NaN();
  double mean = 0;
  for (const nn::Tensor& loss : losses) mean += loss.item() / static_cast<double>(losses.size());
  return mean;
}

}  // namespace tessera::fsdp
