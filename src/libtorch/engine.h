// An engine for a libtorch model, with the values that the model was constructed with:
//
//   tessera::libtorch::Engine engine(*model, *world, {.strategy = fsdp::strategies::fsdp()});
//   for (...) {
//     torch::Tensor loss = model->forward(x);      // of a TESSERA_UNIT; else engine.forward(...)
//     loss.backward();
//     engine.step(1e-3);
//   }
#pragma once

#include <torch/types.h>

#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include "tessera/fsdp/engine.h"
#include "tessera/libtorch/model.h"
#include "tessera/libtorch/unit.h"

namespace tessera::libtorch {

/// The ranks with whose values the parameters and buffers of a model begin.
enum class InitialValues : std::uint8_t {
  first_rank,  ///< rank 0's: broadcast unit by unit
  own,         ///< each rank's own: all ranks have constructed the same ones
};

namespace detail {
/// The base of an Engine that is made before the engine itself.
struct EngineModel {
  TorchModel torch_model;
};
}  // namespace detail

/// An fsdp::Engine. While it exists, the parameters and buffers of the model have memory of the engine: a parameter has
/// none between the calls of its unit, and its grad() stays undefined.
class TESSERA_API Engine : detail::EngineModel, public fsdp::Engine {
 public:
  /// `model` and `world` outlive it. Collective. Throws what fsdp::Engine's constructor throws, and InvalidUsage for a
  /// unit that is no TESSERA_UNIT.
  Engine(torch::nn::Module& model, comm::Communicator& world, fsdp::EngineOptions options = {},
         InitialValues values = InitialValues::first_rank, Initializer initializer = {});

  /// A forward of the whole model: calls forward(arguments...), which returns tensors, between the root's hooks. For a
  /// model whose class is no TESSERA_UNIT.
  template <class Forward, class... Arguments>
  auto forward(Forward&& forward, Arguments&&... arguments) {
    return detail::run_between_hooks(torch_model.root_is_unit() ? nullptr : torch_model.boundary(),
                                     std::forward<Forward>(forward), std::forward<Arguments>(arguments)...);
  }
  /// The values of all parameters and buffers by name, as tensors of their own on the host. Collective.
  std::map<std::string, torch::Tensor> state_dict();
  /// Copies the values to a model without engine that has the same names: for torch::save(). Collective. Throws
  /// InvalidUsage if a name is missing or a shape differs.
  void consolidate(torch::nn::Module& plain);
};

}  // namespace tessera::libtorch
