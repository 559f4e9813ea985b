// Modules: a named tree of layers and parameters, with hooks. An engine needs no other interface of a model.
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

/// A trainable tensor. materialize() or an engine provides its memory; the handle is valid from construction on.
class TESSERA_API Parameter {
 public:
  /// Without memory; see Module::add_parameter().
  Parameter(Context& context, std::string name, Shape shape, Init init);
  const std::string& name() const { return name_; }  ///< canonical: the path of its first registration
  const Tensor& tensor() const { return tensor_; }   ///< unbound until it has memory
  /// The same handle as tensor().
  operator const Tensor&() const { return tensor_; }          // NOLINT: a parameter is used as a tensor everywhere
  Gradient& gradient() const { return *tensor_.gradient(); }  ///< created by the first call
  const Shape& shape() const { return tensor_.shape(); }  ///< shape of the whole parameter, also if an engine shards it
  std::int64_t count() const { return tensor_.count(); }  ///< elements of the whole parameter
  DType dtype() const { return tensor_.dtype(); }         ///< see Module::set_dtype()
  const Init& init() const { return init_; }              ///< how materialize() and engines initialize it
  /// False for norms and biases (one-dimensional): they get no weight decay.
  bool decays() const { return shape().size() >= 2; }

 private:
  friend class Module;
  std::string name_;
  Init init_;
  Tensor tensor_;
};

/// Options of add_buffer().
struct BufferOptions {
  DType dtype = DType::f32;    ///< floating, i32, i64 or u8; integers are initialized to zeros
  Init init = Init::zeros();   ///< initial values, which depend on seed, name and shape as those of parameters do
  bool persistent = true;      ///< stored in checkpoints and exports; false: it can be recomputed
  bool follows_dtype = false;  ///< set_dtype() converts it, too
};

/// State of a module that isn't trained: running statistics, tables. It has no gradient, and every rank holds all of
/// it. materialize() or an engine provides its memory; the handle is valid from construction on.
class TESSERA_API ModuleBuffer {
 public:
  /// Without memory; see Module::add_buffer().
  ModuleBuffer(Context& context, const std::string& name, Shape shape, BufferOptions options)
      : options_(options), tensor_(Tensor::unbound(context, std::move(shape), options.dtype, name)) {}
  const std::string& name() const { return tensor_.name(); }  ///< canonical: "bn.running_mean"
  const Tensor& tensor() const { return tensor_; }            ///< unbound until it has memory
  /// The same handle as tensor().
  operator const Tensor&() const { return tensor_; }       // NOLINT: used as a parameter is
  const Shape& shape() const { return tensor_.shape(); }   ///< shape of the whole buffer
  std::int64_t count() const { return tensor_.count(); }   ///< elements
  DType dtype() const { return tensor_.dtype(); }          ///< BufferOptions::dtype, or the module's if follows_dtype
  const Init& init() const { return options_.init; }       ///< BufferOptions::init
  bool persistent() const { return options_.persistent; }  ///< BufferOptions::persistent

 private:
  friend class Module;
  BufferOptions options_;
  Tensor tensor_;
};

/// Derive through Layer<Self>. Children and parameters are registered in construction order.
class TESSERA_API Module {
 public:
  explicit Module(Context& context) : context_(context) {}  ///< `context` outlives the module
  virtual ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  Context& context() const { return context_; }      ///< the constructor's
  const std::string& path() const { return path_; }  ///< "h.3.attn"; "" for the root
  /// The modules directly below this one, in order of registration; owned by it.
  const std::vector<std::unique_ptr<Module>>& children() const { return children_; }
  /// This module's own parameters, including tied ones.
  const std::vector<std::shared_ptr<Parameter>>& own_parameters() const { return parameters_; }
  /// All parameters of the subtree, depth first in registration order; tied ones once.
  std::vector<std::shared_ptr<Parameter>> parameters() const;
  /// This module's own buffers.
  const std::vector<std::shared_ptr<ModuleBuffer>>& own_buffers() const { return buffers_; }
  /// All buffers of the subtree, ordered like parameters().
  std::vector<std::shared_ptr<ModuleBuffer>> buffers() const;
  /// This module and its descendants, depth first.
  std::vector<Module*> modules();
  /// Throws InvalidUsage that lists the existing names at the level where the path ends.
  Module& find(std::string_view path);

  /// True for a natural unit of sharding: a transformer block.
  bool is_block() const { return is_block_; }
  void mark_block() { is_block_ = true; }  ///< makes is_block() true

  /// If true, calls under a tape save only their arguments, and backward recomputes the activations. For modules that
  /// are called by the call operator and return one tensor. The setting of modules nested in such a module takes
  /// effect, too.
  void checkpoint_activations(bool value) { checkpoints_ = value; }
  bool checkpoints_activations() const { return checkpoints_; }  ///< setting of checkpoint_activations()

  void set_hooks(ModuleHooks hooks) { hooks_ = std::move(hooks); }  ///< replaces the earlier hooks; one set per module
  const ModuleHooks& hooks() const { return hooks_; }  ///< current hooks, which new ones may call, before or after

  /// Sets the compute dtype of this module and its descendants: that of parameters, activations and gradients. It
  /// overrides earlier settings of descendants, so set a module before its parts:
  ///
  ///   model.set_dtype(DType::bf16);
  ///   model.find("ln_f").set_dtype(DType::f32);
  ///
  /// If the dtype differs from the parent's, each call casts floating tensors among the arguments to the module's
  /// dtype, and those among the results (a Tensor, or several in a pair or tuple) back to the parent's, so the
  /// surrounding modules keep one dtype. Gradients are cast in the opposite direction. f64 tensors (losses) stay
  /// unchanged. A tied parameter has one dtype, so all its modules need the same one. Call it before parameters have
  /// memory. Throws InvalidUsage if they have some, or if `dtype` is no floating type.
  void set_dtype(DType dtype);
  /// This module's dtype, or else its parent's; f32 by default.
  DType dtype() const;
  /// False: results stay in the module's dtype, for consumers that accept any (a head, whose logits a loss reads).
  void set_cast_outputs(bool value) { casts_results_back_ = value; }
  /// Throws InvalidUsage if a tied parameter's modules have several dtypes, or if an f64 module is inside a module of
  /// another dtype. materialize() and engines call it.
  void validate_dtypes() const;
  /// Allocates memory for all parameters and buffers and writes their initial values, which depend only on seed, name
  /// and shape. For training without an engine.
  void materialize(std::uint64_t seed);

  /// Called at the module's boundaries by Layer's call operator and by the tape.
  void notify_forward_begins();
  void notify_forward_ends();     ///< calls post_forward
  void notify_backward_begins();  ///< calls pre_backward
  void notify_backward_ends();    ///< calls post_backward
  /// Called before and after a recomputation in this module's backward.
  void notify_recompute_begins();
  void notify_recompute_ends();  ///< calls post_forward

 protected:
  /// Constructs a child M(context, arguments...) named `name` (dots make a path: "h.0").
  template <class M, class... Arguments>
  M& add(std::string name, Arguments&&... arguments) {
    auto child = std::make_unique<M>(context_, std::forward<Arguments>(arguments)...);
    M& reference = *child;
    adopt(std::move(name), std::move(child));
    return reference;
  }
  /// Registers a parameter, without memory; `name` is relative to this module's path. The module owns it.
  Parameter& add_parameter(std::string name, Shape shape, Init init);
  /// Uses another module's parameter under this module, too: a tied parameter.
  Parameter& tie_parameter(const Parameter& parameter, const Module& owner);

  /// `name` is relative to this module, which may be in a model already. Throws InvalidUsage if the module already has
  /// a member of that name, or for integers with nonzero initial values.
  ModuleBuffer& add_buffer(const std::string& name, Shape shape, BufferOptions options = {});
  /// True if this call updates running statistics: a forward in training mode, but not its recomputation in backward.
  bool updates_buffers() const;

  /// Freezes the parameter and stores it in `bytes` bytes, whose encoding only its module knows; they are initialized
  /// to zeros. set_dtype() doesn't convert it. Throws InvalidUsage if it already has memory.
  void quantize_parameter(Parameter& parameter, std::int64_t bytes);
  /// Throws: the call can't be recomputed.
  [[noreturn]] void refuse_checkpoint() const;

  /// True if calls cast.
  bool is_boundary() const { return own_dtype_ && parent_ != nullptr && *own_dtype_ != parent_->dtype(); }
  /// The argument in the module's dtype: a copy for tensors, the argument itself for all else.
  template <class T>
  decltype(auto) cast_input(T& argument) const {
    if constexpr (std::is_same_v<std::remove_const_t<T>, Tensor>) {
      return boundary_cast(argument, *own_dtype_);
    } else {
      return (argument);
    }
  }
  /// The result in the parent's dtype unless set_cast_outputs(false).
  template <class T>
  T cast_output(T result) const {
    if (casts_results_back_) cast_back(result);
    return result;
  }

 private:
  /// Casts floating tensors except f64; others stay unchanged.
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
  std::vector<std::string> local_names_;  // local names of parameters_; "" where tied
  std::vector<std::shared_ptr<ModuleBuffer>> buffers_;
  std::vector<Buffer> storage_;  // memory from materialize()
  ModuleHooks hooks_;
  bool is_block_ = false;
  bool checkpoints_ = false;
  std::optional<DType> own_dtype_;
  bool casts_results_back_ = true;
};

/// class Mlp : public Layer<Mlp> { ... Tensor forward(const Tensor& x); };  mlp(x) then calls forward() between the
/// hooks.
template <class Self>
class Layer : public Module {
 public:
  using Module::Module;  ///< Module's constructors
  /// Calls Self::forward(arguments...) between the module's hooks, with the casts of set_dtype(); checkpointed if
  /// checkpoint_activations() is set.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    notify_forward_begins();
    auto result = checkpoints_activations() ? call_checkpointed(std::forward<Arguments>(arguments)...)
                                            : call(std::forward<Arguments>(arguments)...);
    notify_forward_ends();
    return result;
  }

 private:
  /// Calls forward(), with casts if the module's dtype differs from its parent's. A checkpointed call saves its
  /// arguments as they were before the casts.
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
      // Each call gets a copy, of the value category that the first caller passed: forward() may move from it.
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
