// The engine's view of a libtorch model, on the host or on a CUDA device.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>

#include "tessera/fsdp/model.h"

namespace tessera::libtorch {

class Boundary;

/// Writes the first values of a parameter or buffer that the model has on the meta device, where it has none. Called
/// with the whole tensor, perhaps several times, and alike on all ranks that keep their own values.
using Initializer = std::function<void(const std::string& name, at::Tensor& values)>;

/// Makes a stream of the host; called several times.
using StreamMaker = std::function<std::unique_ptr<base::Stream>()>;

/// Keeps the parameters and buffers of a model alive; the model itself outlives it. While it lives, an engine moves the
/// data pointers of their storages. Used by the engine's thread.
class TESSERA_API TorchModel : public fsdp::Model {
 public:
  /// Throws InvalidUsage or Unsupported for tensors that can't be sharded, such as views. On a CUDA device the engine
  /// computes on the stream that is Torch's current one now, under which the model must be called, too; that takes
  /// libtorch 2.11. Tensors of the meta device become tensors of the device of the others, or of the host if there are
  /// no others; they need an initializer. `memory_tracker`: counts the engine's memory; null: one of
  /// the model's own. `make_stream`: makes the engine's streams on the host, such as those of a simulated step.
  explicit TorchModel(torch::nn::Module& model, Initializer initializer = {},
                      std::shared_ptr<base::MemoryTracker> memory_tracker = nullptr, StreamMaker make_stream = {});
  ~TorchModel() override;
  fsdp::Module& root() override;
  fsdp::Runtime& runtime() override;
  /// Frees the values from the construction of the model, which fill_initial() reads until then.
  void release_initial_values();
  /// Tells autograd that the parameters' values change: a backward of an earlier forward is an error from now on.
  /// Throws InvalidUsage if the program has given a parameter or buffer other memory.
  void on_update() override;
  /// Of the outermost units; see activation_checkpoint.h.
  void checkpoint_activations() override;
  /// The root's boundary.
  const std::shared_ptr<Boundary>& boundary() const;
  /// Whether the root is a TESSERA_UNIT, which calls the hooks itself.
  bool root_is_unit() const;

 private:
  class State;
  const std::unique_ptr<State> state_;
};

/// The tensor behind a parameter or buffer that an engine of a libtorch model passes to a visitor. Throws InvalidUsage
/// for another library's.
TESSERA_API const at::Tensor& torch_tensor(const fsdp::ModelTensor& tensor);
/// The first values of such a parameter, on its device, until they are released.
TESSERA_API at::Tensor initial_values(const fsdp::Parameter& parameter);

}  // namespace tessera::libtorch
