// Modules: a named tree of layers and parameters, with hooks. This is all that an engine needs to know of a model.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/nn/activation_checkpoint.h"
#include "tessera/nn/init.h"
#include "tessera/nn/tape.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn {

/// A trainable tensor. Its memory comes from materialize() or from an engine; the handle is good from construction on.
class TESSERA_API Parameter {
 public:
  Parameter(Context& context, std::string name, Shape shape, Init init);
  const std::string& name() const { return name_; }  ///< canonical: the path of its first registration
  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }  // NOLINT: a parameter is used as a tensor everywhere
  Gradient& gradient() const { return *tensor_.gradient(); }
  const Shape& shape() const { return tensor_.shape(); }
  std::int64_t count() const { return tensor_.count(); }
  DType dtype() const { return tensor_.dtype(); }
  const Init& init() const { return init_; }
  /// False for norms and biases (one-dimensional): they get no weight decay.
  bool decays() const { return shape().size() >= 2; }

 private:
  friend class Module;
  std::string name_;
  Init init_;
  Tensor tensor_;
};

/// What add_buffer() is told.
struct BufferOptions {
  DType dtype = DType::f32;    ///< floating, i32, i64 or u8; integers begin as zeros
  Init init = Init::zeros();   ///< from seed, name and shape, as parameters'
  bool persistent = true;      ///< it is in checkpoints and exports; false: it can be computed again
  bool follows_dtype = false;  ///< set_dtype() changes it, too
};

/// State of a module that isn't trained: running statistics, tables. It has no gradient, and every rank has all of it.
/// Memory comes from materialize() or from an engine; the handle is good from construction on.
class TESSERA_API ModuleBuffer {
 public:
  ModuleBuffer(Context& context, const std::string& name, Shape shape, BufferOptions options)
      : options_(options), tensor_(Tensor::unbound(context, std::move(shape), options.dtype, name)) {}
  const std::string& name() const { return tensor_.name(); }  ///< canonical: "bn.running_mean"
  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }  // NOLINT: as a parameter is used
  const Shape& shape() const { return tensor_.shape(); }
  std::int64_t count() const { return tensor_.count(); }
  DType dtype() const { return tensor_.dtype(); }
  const Init& init() const { return options_.init; }
  bool persistent() const { return options_.persistent; }

 private:
  friend class Module;
  BufferOptions options_;
  Tensor tensor_;
};

/// Called at a module's borders; any may be empty. `post_backward` of a module comes when all gradients that its
/// operations in that call produce are written.
struct ModuleHooks {
  std::function<void(Phase)> pre_forward;
  std::function<void(Phase)> post_forward;
  std::function<void()> pre_backward;
  std::function<void()> post_backward;
};

/// Derive through Layer<Self>. Children and parameters are registered in the order of construction.
class TESSERA_API Module {
 public:
  explicit Module(Context& context) : context_(context) {}
  virtual ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  Context& context() const { return context_; }
  const std::string& path() const { return path_; }  ///< "h.3.attn"; "" for the root
  const std::vector<std::unique_ptr<Module>>& children() const { return children_; }
  /// Own parameters, also tied ones.
  const std::vector<std::shared_ptr<Parameter>>& own_parameters() const { return parameters_; }
  /// All below, depth first in order of registration, tied ones once.
  std::vector<std::shared_ptr<Parameter>> parameters() const;
  const std::vector<std::shared_ptr<ModuleBuffer>>& own_buffers() const { return buffers_; }
  /// All below, as parameters().
  std::vector<std::shared_ptr<ModuleBuffer>> buffers() const;
  /// This and all below, depth first.
  std::vector<Module*> modules();
  /// Throws InvalidUsage that lists what there is at the level where the path ends.
  Module& find(std::string_view path);

  /// A natural unit for sharding: a transformer block.
  bool is_block() const { return is_block_; }
  void mark_block() { is_block_ = true; }

  /// Whether calls under a tape keep only their arguments, and compute again in the backward. For modules that are
  /// called by the call operator and return one tensor; what is asked of a module inside such a one counts, too.
  void checkpoint_activations(bool value) { checkpoints_ = value; }
  bool checkpoints_activations() const { return checkpoints_; }

  void set_hooks(ModuleHooks hooks) { hooks_ = std::move(hooks); }

  /// What this module and all below compute in from here on: their parameters, and with them activations and gradients.
  /// Replaces what was said of modules below, so the whole comes before its parts:
  ///
  ///   model.set_dtype(DType::bf16);
  ///   model.find("ln_f").set_dtype(DType::f32);
  ///
  /// Where that differs from the parent's dtype, calls cast: floating tensors among the arguments to the module's
  /// dtype, and those among the results (a Tensor, or several in a pair or tuple) back to the parent's, so that what
  /// stands around the module goes on in one dtype. Gradients are cast the other way. f64 tensors (losses) stay as they
  /// are. A tied parameter has one dtype: its modules are given the same. Before parameters get memory. Throws
  /// InvalidUsage where they have some, or `dtype` is no floating type.
  void set_dtype(DType dtype);
  /// Its own, else that of the module it is in; f32 at first.
  DType dtype() const;
  /// False: results stay in the module's dtype, for whoever takes any (a head, whose logits go to a loss).
  void set_cast_outputs(bool value) { casts_results_back_ = value; }
  /// Throws InvalidUsage where a tied parameter's modules have several dtypes, or one of f64 is inside one of another.
  /// materialize() and engines ask.
  void validate_dtypes() const;
  /// Gives every parameter and buffer memory and its initial values, which depend on seed, name and shape only. For
  /// training alone.
  void materialize(std::uint64_t seed);

  /// What Layer's call operator and the tape call at the borders.
  void notify_forward_begins();
  void notify_forward_ends();
  void notify_backward_begins();
  void notify_backward_ends();
  /// Around a call that is repeated inside this module's backward.
  void notify_recompute_begins();
  void notify_recompute_ends();

 protected:
  /// Constructs a child M(context, arguments...) named `name` (dots make a path: "h.0").
  template <class M, class... Arguments>
  M& add(std::string name, Arguments&&... arguments) {
    auto child = std::make_unique<M>(context_, std::forward<Arguments>(arguments)...);
    M& reference = *child;
    adopt(std::move(name), std::move(child));
    return reference;
  }
  Parameter& add_parameter(std::string name, Shape shape, Init init);
  /// Uses another module's parameter under this module too: a tied tensor.
  Parameter& tie_parameter(const Parameter& parameter, const Module& owner);

  /// Throws InvalidUsage where the module has something of that name, or integers shall begin as anything but zeros.
  ModuleBuffer& add_buffer(const std::string& name, Shape shape, BufferOptions options = {});
  /// Whether this call counts for running statistics: a forward in training, and not its repetition in a backward.
  bool updates_buffers() const;

  /// From here on the parameter is frozen and made of so many bytes, whose meaning its module knows; they begin as
  /// zeros. set_dtype() leaves it so. Throws InvalidUsage where it has memory already.
  void encode_parameter(Parameter& parameter, std::int64_t bytes);
  /// Throws: the call can't be repeated.
  [[noreturn]] void refuse_checkpoint() const;

  /// Whether calls cast.
  bool is_boundary() const { return own_dtype_ && parent_ != nullptr && *own_dtype_ != parent_->dtype(); }
  template <class T>
  decltype(auto) cast_input(T& argument) const {
    if constexpr (std::is_same_v<std::remove_const_t<T>, Tensor>) {
      return boundary_cast(argument, *own_dtype_);
    } else {
      return (argument);
    }
  }
  template <class T>
  T cast_output(T result) const {
    if (casts_results_back_) cast_back(result);
    return result;
  }

 private:
  /// Floating tensors but those of f64; others stay as they are.
  static Tensor boundary_cast(const Tensor& x, DType dtype);
  void cast_back(Tensor& result) const { result = boundary_cast(result, parent_->dtype()); }
  template <class A, class B>
  void cast_back(std::pair<A, B>& results) const {
    cast_back(results.first);
    cast_back(results.second);
  }
  template <class... Results>
  void cast_back(std::tuple<Results...>& results) const {
    std::apply([this](Results&... each) { (cast_back(each), ...); }, results);
  }
  template <class Other>
  void cast_back(Other& /*result*/) const {}

  void adopt(std::string name, std::unique_ptr<Module> child);
  void rename(const std::string& prefix);
  void remake(Parameter& parameter, std::string name, Shape shape, DType dtype);

  Context& context_;
  const Module* parent_ = nullptr;
  std::string path_;
  std::vector<std::unique_ptr<Module>> children_;
  std::vector<std::shared_ptr<Parameter>> parameters_;
  std::vector<std::string> local_names_;  // of parameters_; "" where tied
  std::vector<std::shared_ptr<ModuleBuffer>> buffers_;
  std::vector<Buffer> storage_;  // from materialize()
  ModuleHooks hooks_;
  bool is_block_ = false;
  bool checkpoints_ = false;
  std::optional<DType> own_dtype_;
  bool casts_results_back_ = true;
};

/// class Mlp : public Layer<Mlp> { ... Tensor forward(const Tensor& x); };  then  mlp(x)  calls forward between the
/// hooks.
template <class Self>
class Layer : public Module {
 public:
  using Module::Module;
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    notify_forward_begins();
    auto result = checkpoints_activations() ? call_checkpointed(std::forward<Arguments>(arguments)...)
                                            : call(std::forward<Arguments>(arguments)...);
    notify_forward_ends();
    return result;
  }

 private:
  /// forward(), with casts where the module's dtype is not that around it. What is checkpointed keeps what comes before
  /// the casts.
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    const auto forward = [this](auto&&... inner) {
      return static_cast<Self*>(this)->forward(static_cast<Arguments&&>(inner)...);
    };
    return is_boundary() ? cast_output(forward(cast_input(arguments)...)) : forward(arguments...);
  }

  template <class... Arguments>
  auto call_checkpointed(Arguments&&... arguments) {
    using Result = decltype(static_cast<Self*>(this)->forward(std::forward<Arguments>(arguments)...));
    constexpr bool kept_by_copy = ((std::is_copy_constructible_v<std::decay_t<Arguments>> &&
                                    std::is_same_v<std::decay_t<Arguments>, std::remove_cvref_t<Arguments>>)&&...);
    if constexpr (std::is_same_v<Result, Tensor> && kept_by_copy) {
      // Each call gets a copy, of the kind that the first caller gave: forward() may move from it.
      return run_checkpointed(
          context(),
          [this, kept = std::tuple<std::decay_t<Arguments>...>(std::forward<Arguments>(arguments)...)] {
            return std::apply([this](auto... copies) { return this->call(static_cast<Arguments&&>(copies)...); }, kept);
          },
          this);
    } else {
      refuse_checkpoint();
      return call(std::forward<Arguments>(arguments)...);
    }
  }
};

}  // namespace tessera::nn
