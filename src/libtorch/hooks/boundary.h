// The boundary of a module, at which a call of it runs an engine's hooks.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/fsdp/model.h"

namespace tessera::libtorch {

class Boundary;

/// What the boundaries of one model share. Used by the thread of its engine.
struct Passes {
  bool in_backward = false;              ///< between the pre_backward and the post_backward of the root
  std::vector<Boundary*> open;           ///< calls whose backward ends with the root's
  std::vector<const Boundary*> entered;  ///< since the root's last pre_forward
  std::vector<const Boundary*> units;    ///< those with hooks, the root among them
};

/// Of one module. Its calls, and the nodes of their backward, share it; without hooks it does nothing.
class Boundary {
 public:
  /// `stream`: on which the engine computes. Work on it is done before the module computes.
  Boundary(std::string path, std::string type, std::shared_ptr<Passes> passes, base::Stream& stream)
      : path_(std::move(path)), type_(std::move(type)), passes_(std::move(passes)), stream_(stream) {}
  bool is_root() const { return path_.empty(); }
  std::string description() const;  ///< "blocks.0 (Block)"
  void set_hooks(fsdp::ModuleHooks hooks);
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
  const std::string path_, type_;
  const std::shared_ptr<Passes> passes_;
  base::Stream& stream_;
  fsdp::ModuleHooks hooks_;
};

}  // namespace tessera::libtorch
