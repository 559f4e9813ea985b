// The engine for models of tessera::nn: the one place where fsdp meets nn.
//
//   fsdp::Engine engine(model, world, options);      // of an nn::Module; it makes its own NnModel
//   fsdp::NnModel adapted(model);                    // for make_units() and formulas without an engine
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <string>

#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/model.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// Keeps the parameters and buffers of a model alive; the model itself, its modules and context outlive it.
class TESSERA_API NnModel : public Model {
 public:
  explicit NnModel(nn::Module& model);  ///< does not change it
  ~NnModel() override;
  Module& root() override;
  Runtime& runtime() override;
  void validate() const override;
  void checkpoint_activations() override;  ///< nn::checkpoint_activations() of the model's blocks

 private:
  class State;
  const std::unique_ptr<State> state_;
};

/// Adapts an nn::Module for Engine's constructor.
template <std::derived_from<nn::Module> M>
struct Adapter<M> {
  static std::unique_ptr<Model> make(nn::Module& model) { return std::make_unique<NnModel>(model); }  ///< an NnModel
};

/// The nn parameter behind one that an engine of an nn::Module passes to a visitor. Throws InvalidUsage for another
/// library's.
TESSERA_API const nn::Parameter& nn_parameter(const Parameter& parameter);
/// Likewise the module.
TESSERA_API nn::Module& nn_module(Module& module);
TESSERA_API const nn::Module& nn_module(const Module& module);  ///< likewise
/// The runtime of an nn model that computes in `context`, which outlives it.
TESSERA_API std::unique_ptr<Runtime> make_runtime(nn::Context& context);
/// A runtime for another library's model, whose arithmetic is that of nn's kernels. It makes a context of its own from
/// `options`, whose first stream is the one on which the model computes. `recording` and `libraries`: as Runtime's
/// functions.
TESSERA_API std::unique_ptr<Runtime> make_runtime(nn::ContextOptions options, std::function<bool()> recording,
                                                  std::string libraries);
/// The context in which an nn model computes, for its kernels: of collective plug-ins. Throws Unsupported for another
/// library's runtime.
TESSERA_API nn::Context& nn_context(Runtime& runtime);

}  // namespace tessera::fsdp
