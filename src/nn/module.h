// Modules: a named tree of layers and parameters, with hooks. This is all that an engine needs to know of a model.
#pragma once

#include <functional>
#include <memory>
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

/// Called at a module's borders; any may be empty. `end_backward` of a module comes when all gradients that its
/// operations in that call produce are written.
struct Hooks {
  std::function<void(Phase)> begin_forward;
  std::function<void(Phase)> end_forward;
  std::function<void()> begin_backward;
  std::function<void()> end_backward;
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

  void set_hooks(Hooks hooks) { hooks_ = std::move(hooks); }

  /// What parameters, and with them activations and gradients, are made of from here on: f32 at first. Before they get
  /// memory. Throws InvalidUsage where they have some, or `dtype` is no floating type.
  void set_dtype(DType dtype);
  /// Gives every parameter memory and its initial values, which depend on seed, name and shape only. For training
  /// alone.
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

  /// From here on the parameter is frozen and made of so many bytes, whose meaning its module knows; they begin as
  /// zeros. set_dtype() leaves it so. Throws InvalidUsage where it has memory already.
  void encode_parameter(Parameter& parameter, std::int64_t bytes);
  /// Throws: the call can't be repeated.
  [[noreturn]] void refuse_checkpoint() const;

 private:
  void adopt(std::string name, std::unique_ptr<Module> child);
  void rename(const std::string& prefix);
  void remake(Parameter& parameter, std::string name, Shape shape, DType dtype);

  Context& context_;
  std::string path_;
  std::vector<std::unique_ptr<Module>> children_;
  std::vector<std::shared_ptr<Parameter>> parameters_;
  std::vector<std::string> local_names_;  // of parameters_; "" where tied
  std::vector<Buffer> storage_;           // from materialize()
  Hooks hooks_;
  bool is_block_ = false;
  bool checkpoints_ = false;
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
                                            : static_cast<Self*>(this)->forward(std::forward<Arguments>(arguments)...);
    notify_forward_ends();
    return result;
  }

 private:
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
            return std::apply(
                [this](auto... copies) {
                  return static_cast<Self*>(this)->forward(static_cast<Arguments&&>(copies)...);
                },
                kept);
          },
          this);
    } else {
      refuse_checkpoint();
      return static_cast<Self*>(this)->forward(std::forward<Arguments>(arguments)...);
    }
  }
};

}  // namespace tessera::nn
