// Units of a libtorch model: modules whose forward() runs an engine's hooks.
//
//   struct BlockImpl : torch::nn::Module { torch::Tensor forward(torch::Tensor x); ... };
//   TESSERA_UNIT(Block);                 // instead of TORCH_MODULE(Block)
//
// torch::nn::Module has no hooks in C++. So the holder Block makes a module of a class derived from BlockImpl, whose
// forward() calls the hooks around BlockImpl's: by block(x), block->forward(x), and in a torch::nn::Sequential. Without
// an engine it is BlockImpl's forward() and nothing else.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/libtorch/activation_checkpoint.h"

namespace tessera::libtorch {

/// What a module of a TESSERA_UNIT has beside its own class. An engine sets the boundary; null: no hooks.
class TESSERA_API UnitHooks {
 public:
  virtual ~UnitHooks();
  void set_boundary(std::shared_ptr<Boundary> boundary) { boundary_ = std::move(boundary); }  ///< null: no hooks
  const std::shared_ptr<Boundary>& boundary() const { return boundary_; }  ///< null without an engine
  virtual const std::type_info& own_class() const = 0;                     ///< the program's class: BlockImpl
  void set_checkpointed(bool on) { checkpointed_ = on; }                   ///< see checkpoint_activations()
  bool checkpointed() const { return checkpointed_; }                      ///< false by default

 private:
  bool checkpointed_ = false;
  std::shared_ptr<Boundary> boundary_;
};

/// One call of a module between its hooks. Where autograd records, nodes at the tensors that go in and come out call
/// the hooks of the backward. Used by run_between_hooks().
class TESSERA_API BoundaryCall {
 public:
  explicit BoundaryCall(std::shared_ptr<Boundary> boundary);  ///< calls pre_forward
  ~BoundaryCall();
  BoundaryCall(const BoundaryCall&) = delete;
  BoundaryCall& operator=(const BoundaryCall&) = delete;
  /// Replaces the tensors by aliases behind this call's node; those without gradient stay.
  void enter(const std::vector<at::Tensor*>& arguments);
  void leave(const std::vector<at::Tensor*>& results);  ///< likewise; then calls post_forward
  /// Rethrows the exception in flight, or a clearer one if a module below read a resharded parameter.
  [[noreturn]] void fail();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

namespace detail {

template <class T>
concept Optional = requires(T& value) {
  value.has_value();
  *value;
};
template <class T>
concept Tuple = requires {
  std::tuple_size<T>::value;
};
template <class T>
concept Range = !std::is_same_v<T, at::Tensor> && requires(T & value) {
  *value.begin();
  value.push_back(*value.begin());
};

/// Whether a type is a tensor, or an optional, a tuple or a vector of such.
template <class T>
struct HasTensors : std::is_same<T, at::Tensor> {};
template <Optional T>
requires(!std::is_same_v<T, at::Tensor>) struct HasTensors<T>
    : HasTensors<std::remove_cvref_t<decltype(*std::declval<T&>())>> {
};
template <Range T>
struct HasTensors<T> : HasTensors<std::remove_cvref_t<decltype(*std::declval<T&>().begin())>> {};
template <class... Parts>
struct HasTensors<std::tuple<Parts...>> : std::disjunction<HasTensors<Parts>...> {};
template <class A, class B>
struct HasTensors<std::pair<A, B>> : std::disjunction<HasTensors<A>, HasTensors<B>> {};
template <class T, std::size_t N>
struct HasTensors<std::array<T, N>> : HasTensors<T> {};

template <class T>
void collect(T& value, std::vector<at::Tensor*>& out) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    out.push_back(&value);
  } else if constexpr (!HasTensors<T>::value) {
  } else if constexpr (Tuple<T>) {
    std::apply([&](auto&... each) { (collect(each, out), ...); }, value);
  } else if constexpr (Optional<T>) {
    if (value.has_value()) collect(*value, out);
  } else {
    for (auto& each : value) collect(each, out);
  }
}

/// An argument as forward() gets it: tensors as copies of their handles, which a call replaces; all else as it is, and
/// so is what forward() may change.
template <class T>
inline constexpr bool kCopied = HasTensors<std::remove_cvref_t<T>>::value &&
                                (!std::is_lvalue_reference_v<T> || std::is_const_v<std::remove_reference_t<T>>);
template <class T>
using Passed = std::conditional_t<kCopied<T>, std::remove_cvref_t<T>, T&&>;

/// `value` as forward() may read it.
template <class T>
decltype(auto) read_only(std::remove_reference_t<T>& value) {
  if constexpr (std::is_lvalue_reference_v<T>)
    return std::as_const(value);
  else
    return std::move(value);
}

/// Calls `forward` between the hooks of `boundary`.
template <class Forward, class... Arguments>
auto run_between_hooks(const std::shared_ptr<Boundary>& boundary, Forward&& forward, Arguments&&... arguments) {
  using Result = std::decay_t<std::invoke_result_t<Forward, Arguments...>>;
  static_assert(HasTensors<Result>::value,
                "the forward() of a unit returns a torch::Tensor, or an optional, tuple or vector of them: the engine "
                "sees its backward there");
  if (boundary == nullptr) return forward(std::forward<Arguments>(arguments)...);
  BoundaryCall call(boundary);
  std::tuple<Passed<Arguments>...> passed(std::forward<Arguments>(arguments)...);
  std::vector<at::Tensor*> tensors;
  const auto collect_copied = [&]<class T>(std::type_identity<T>, auto& each) {
    if constexpr (kCopied<T>) collect(each, tensors);
  };
  std::apply([&](auto&... each) { (collect_copied(std::type_identity<Arguments>(), each), ...); }, passed);
  call.enter(tensors);
  try {
    Result result =
        std::apply([&](auto&... each) -> Result { return forward(static_cast<Arguments&&>(each)...); }, passed);
    tensors.clear();
    collect(result, tensors);
    call.leave(tensors);
    return result;
  } catch (const c10::Error&) {
    call.fail();
  }
}

/// Calls `forward` now and in the backward, with copies of the arguments.
template <class Result, class Forward, class Arguments>
Result run_again_in_backward(const std::shared_ptr<Boundary>& boundary, Forward forward, Arguments arguments) {
  const auto tensors_of = [](auto& of) {
    std::vector<at::Tensor*> tensors;
    if constexpr (HasTensors<std::remove_cvref_t<decltype(of)>>::value) collect(of, tensors);
    return tensors;
  };
  std::vector<at::Tensor> inputs;
  for (const at::Tensor* const input : tensors_of(arguments)) inputs.push_back(*input);
  const auto first = std::make_shared<std::optional<Result>>(std::nullopt);
  const auto region = [=, wanted = std::weak_ptr(first)](const std::vector<at::Tensor>& given) {
    Arguments passed = arguments;
    std::size_t next = 0;
    for (at::Tensor* const tensor : tensors_of(passed)) *tensor = given.at(next++);
    Result result = std::apply(forward, passed);
    std::vector<at::Tensor> results;
    for (const at::Tensor* const tensor : tensors_of(result)) results.push_back(*tensor);
    if (const auto slot = wanted.lock()) *slot = std::move(result);
    return results;
  };
  const std::vector<at::Tensor> results = run_checkpointed(boundary, inputs, region);
  Result result = std::move(**first);
  std::size_t next = 0;
  for (at::Tensor* const tensor : tensors_of(result)) *tensor = results.at(next++);
  return result;
}

/// Impl with the hooks of a unit, without forward().
template <class Impl>
class UnitBase : public Impl, public UnitHooks {
 public:
  using Impl::Impl;
  UnitBase() = default;

 protected:
  template <class... Arguments>
  auto run(Arguments&&... arguments) {
    const auto forward = [this](auto&&... each) -> decltype(auto) {
      return Impl::forward(std::forward<decltype(each)>(each)...);
    };
    if constexpr ((std::is_copy_constructible_v<std::decay_t<Arguments>> && ...)) {
      using Result = std::decay_t<std::invoke_result_t<decltype(forward), std::decay_t<Arguments>&...>>;
      if (checkpointed() && at::GradMode::is_enabled())
        return run_again_in_backward<Result>(boundary(), forward, std::tuple<std::decay_t<Arguments>...>(arguments...));
    }
    return run_between_hooks(boundary(), forward, std::forward<Arguments>(arguments)...);
  }
};

/// A unit with the forward() of Impl, whose address a torch::nn::Sequential takes: for an Impl with one that is no
/// template.
template <class Impl, class Signature>
class ExactUnit : public UnitBase<Impl> {
 protected:
  using UnitBase<Impl>::UnitBase;
  ExactUnit() = default;
};
template <class Impl, class Class, class Result, class... Arguments>
class ExactUnit<Impl, Result (Class::*)(Arguments...)> : public UnitBase<Impl> {
 public:
  Result forward(Arguments... arguments) { return this->run(std::forward<Arguments>(arguments)...); }

 protected:
  using UnitBase<Impl>::UnitBase;
  ExactUnit() = default;
};

template <class Impl>
struct SignatureOf {
  using type = void;
};
template <class Impl>
requires requires { &Impl::forward; }
struct SignatureOf<Impl> {
  using type = decltype(&Impl::forward);
};

/// What a holder contains: abstract, so that only HeldUnit can be made.
template <class Impl>
using Unit = ExactUnit<Impl, typename SignatureOf<Impl>::type>;

/// A unit whose forward() takes fewer arguments, too, if Impl's has default arguments, and any overload.
template <class Impl>
class HeldUnit final : public Unit<Impl> {
 public:
  using Unit<Impl>::Unit;
  HeldUnit() = default;
  const std::type_info& own_class() const override { return typeid(Impl); }
  template <class... Arguments>
  auto forward(Arguments&&... arguments)
      -> decltype(std::declval<Impl&>().forward(std::forward<Arguments>(arguments)...)) {
    if constexpr (requires(Impl & impl) { impl.forward(read_only<Arguments>(arguments)...); })
      return this->run(read_only<Arguments>(arguments)...);
    else
      return this->run(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace detail

/// The base of a holder that TESSERA_UNIT defines.
template <class Impl>
class UnitHolder : public torch::nn::ModuleHolder<detail::Unit<Impl>> {
  using Base = torch::nn::ModuleHolder<detail::Unit<Impl>>;
  using Held = detail::HeldUnit<Impl>;

 public:
  UnitHolder() : Base(make()) {}
  /// Empty: holds no module.
  UnitHolder(std::nullptr_t) : Base(nullptr) {}  // NOLINT: as ModuleHolder
  /// Holds a module that another holder has made.
  UnitHolder(std::shared_ptr<detail::Unit<Impl>> unit) : Base(std::move(unit)) {}  // NOLINT: likewise
  /// Makes Impl(arguments...).
  template <class Head, class... Tail>
  requires std::is_constructible_v<Impl, Head, Tail...>
  explicit UnitHolder(Head&& head, Tail&&... tail)
      : Base(std::shared_ptr<detail::Unit<Impl>>(
            std::make_shared<Held>(std::forward<Head>(head), std::forward<Tail>(tail)...))) {}

  /// The module, whose forward() runs the hooks. Throws c10::Error if the holder is empty.
  Held* operator->() { return static_cast<Held*>(this->get()); }
  /// Likewise.
  const Held* operator->() const { return static_cast<const Held*>(this->get()); }
  /// Calls forward(arguments...) of the module.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return operator->()->forward(std::forward<Arguments>(arguments)...);
  }

 private:
  static std::shared_ptr<detail::Unit<Impl>> make() {
    if constexpr (std::is_default_constructible_v<Impl>)
      return std::make_shared<Held>();
    else
      return nullptr;
  }
};

}  // namespace tessera::libtorch

/// Like TORCH_MODULE(Name), for a module that an engine may shard as a unit.
#define TESSERA_UNIT(Name)                                                     \
  class Name : public tessera::libtorch::UnitHolder<Name##Impl> {              \
   public:                                                                     \
    using tessera::libtorch::UnitHolder<Name##Impl>::UnitHolder;               \
    using Impl [[maybe_unused]] = tessera::libtorch::detail::Unit<Name##Impl>; \
  }
