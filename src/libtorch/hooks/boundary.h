// The boundary of a module, at which a call of it runs an engine's hooks; and the nodes of autograd's graph that call
// them.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/fsdp/model.h"
#include "tessera/libtorch/hooks/torch_device.h"

namespace tessera::libtorch {

class Boundary;

/// What the boundaries of one model share. Used by the thread of its engine.
struct Passes {
  TorchDevice& device;                        ///< outlives the engine
  fsdp::Runtime& runtime;                     ///< likewise
  bool checkpoints = false;                   ///< in the forward of a checkpointed call, which isn't recorded
  bool recomputes = false;                    ///< in its recomputation
  bool in_backward = false;                   ///< between the pre_backward and the post_backward of the root
  std::vector<Boundary*> open = {};           ///< calls whose backward ends with the root's
  std::vector<const Boundary*> entered = {};  ///< since the root's last pre_forward
  std::vector<const Boundary*> units = {};    ///< those with hooks, the root among them

  /// To be called before Torch works again. On the host the engine's work is done then. On a device, where Torch uses
  /// the engine's stream, no stream waits for the host any more: Torch may load a kernel or synchronize the device at
  /// any time, and would wait for a collective that can't move on without the device.
  void await_engine();
};

/// Of one module. Its calls, and the nodes of their backward, share it; without hooks it does nothing.
class Boundary {
 public:
  Boundary(std::string path, std::string type, std::shared_ptr<Passes> passes)
      : path_(std::move(path)), type_(std::move(type)), passes_(std::move(passes)) {}
  bool is_root() const { return path_.empty(); }
  std::string description() const;  ///< "blocks.0 (Block)"
  Passes& passes() { return *passes_; }
  void set_hooks(fsdp::ModuleHooks hooks);
  const fsdp::ModuleHooks& hooks() const { return hooks_; }
  bool has_hooks() const { return static_cast<bool>(hooks_.pre_forward); }

  void pre_forward();
  void post_forward();
  /// `ends_with_root`: no node will call post_backward(). Returns true if this begins the backward of the root, whose
  /// post_backward() is to be called at its end.
  bool pre_backward(bool ends_with_root);
  void post_backward();
  /// Throws InvalidUsage if `error`, out of the root's forward, is the read of a resharded parameter by a unit that
  /// wasn't called through its holder.
  void explain(std::string_view error) const;

 private:
  fsdp::Phase phase() const { return passes_->recomputes ? fsdp::Phase::recompute : fsdp::Phase::forward; }

  const std::string path_, type_;
  const std::shared_ptr<Passes> passes_;
  fsdp::ModuleHooks hooks_;
};

/// From Torch 2.14 on nodes count their own references.
using NodePointer = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// A template, since each Torch can compile one of the two ways only.
template <class Made, class Pointer = NodePointer, class... Arguments>
Pointer make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Made>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
}

/// Makes `tensor` the next result of `node`: an alias, which shares the memory, and the count of changes in place.
inline void put_behind(at::Tensor& tensor, const NodePointer& node) {
  at::Tensor alias = tensor.detach();
  torch::autograd::set_history(alias, node);
  tensor = std::move(alias);
}

}  // namespace tessera::libtorch
