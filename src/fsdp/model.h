// What the engine needs of a model and of the library that computes it. nn_model.h implements it for tessera::nn.
//
// A model is a tree of modules with parameters and buffers. The engine provides the memory of both: it binds a
// parameter to a place in an unsharded flat parameter before a module computes, and unbinds it afterwards.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/base/module_tree.h"
#include "tessera/base/optimizer.h"
#include "tessera/base/shape.h"
#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

/// A named tensor without memory of its own: what parameters and buffers share. Used by the engine's thread.
class TESSERA_API ModelTensor {
 public:
  virtual ~ModelTensor();
  virtual const std::string& name() const = 0;    ///< canonical: the path of its first registration
  virtual const Shape& shape() const = 0;         ///< shape of the whole tensor, also if an engine shards it
  virtual std::int64_t count() const = 0;         ///< elements of the whole tensor
  virtual DType dtype() const = 0;                ///< dtype of its elements; u8 for an encoding
  virtual void* data() const = 0;                 ///< the bound memory, on the device. Throws InvalidUsage without any
  virtual void bind(void* data) = 0;              ///< uses `data`, on the device, until it is bound again or unbound
  virtual void unbind(std::string_view why) = 0;  ///< using it from now on throws InvalidUsage that says `why`
  /// Appends work to Runtime::stream() that writes the initial values of elements `range` to `out`, on the device, as
  /// elements of `dtype`. They depend only on seed, name and index.
  virtual void fill_initial(std::uint64_t seed, ElementRange range, DType dtype, void* out) const = 0;
  /// Size of the whole tensor in bytes.
  std::size_t bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype()); }
};

/// A trainable tensor, shared by all modules that use it.
class TESSERA_API Parameter : public ModelTensor {
 public:
  virtual bool requires_grad() const = 0;  ///< false: it is frozen. May change between steps
  virtual bool decays() const = 0;         ///< false for norms and biases: they get no weight decay
  /// The next backward writes the gradient to `data`, on the device, and overwrites what is there unless `keep`: then
  /// it holds the gradient of earlier microbatches, and the backward adds to it.
  virtual void bind_gradient(void* data, bool keep) = 0;
  virtual bool gradient_written() const = 0;  ///< whether a backward has written it since it was bound
  virtual const void* gradient() const = 0;   ///< the gradient, on the device, of dtype(); null if none is written
  virtual void unbind_gradient() = 0;         ///< drops the binding; no effect without one
};

/// State that isn't trained. It has no gradient, and every rank holds all of it.
class TESSERA_API ModuleBuffer : public ModelTensor {
 public:
  virtual bool persistent() const = 0;  ///< stored in checkpoints; false: it can be recomputed
};

/// The name of a class without namespaces, for Module::type().
TESSERA_API std::string class_name(const std::type_info& type);

/// A module and what is below it. The tree does not change while an engine uses it.
class TESSERA_API Module {
 public:
  virtual ~Module();
  virtual const std::string& path() const = 0;    ///< "h.3.attn"; "" for the root
  virtual std::string type() const = 0;           ///< name of its class, without namespaces: "Linear"
  virtual DType dtype() const = 0;                ///< dtype in which it computes
  virtual bool is_block() const = 0;              ///< true for a natural unit of sharding: a transformer block
  virtual void set_hooks(ModuleHooks hooks) = 0;  ///< replaces the earlier ones
  virtual const ModuleHooks& hooks() const = 0;   ///< current hooks, which new ones may call

  /// The modules directly below this one, in order of registration; owned by it.
  const std::vector<std::unique_ptr<Module>>& children() const { return children_; }
  /// This module's own parameters, including those that other modules use, too.
  const std::vector<std::shared_ptr<Parameter>>& own_parameters() const { return parameters_; }
  /// All parameters of the subtree, depth first in registration order; shared ones once.
  std::vector<std::shared_ptr<Parameter>> parameters() const;
  /// All buffers of the subtree, ordered like parameters().
  std::vector<std::shared_ptr<ModuleBuffer>> buffers() const;
  /// This module and its descendants, depth first.
  std::vector<Module*> modules();
  /// Throws InvalidUsage that lists the existing names at the level where the path ends.
  Module& find(std::string_view path);

 protected:
  std::vector<std::unique_ptr<Module>> children_;           ///< see children()
  std::vector<std::shared_ptr<Parameter>> parameters_;      ///< see own_parameters()
  std::vector<std::shared_ptr<ModuleBuffer>> own_buffers_;  ///< this module's own buffers
};

/// The device of a model, and the arithmetic that the engine needs there. Pointers are on the device; work is appended
/// to the stream that is passed, or else to stream(). Used by the engine's thread.
class TESSERA_API Runtime {
 public:
  virtual ~Runtime();
  virtual base::DeviceRuntime& device_runtime() = 0;        ///< runtime of the device
  virtual MemoryPool& memory() = 0;                         ///< memory pool of the device
  virtual Stream& stream() = 0;                             ///< stream on which the model computes
  virtual std::unique_ptr<Stream> make_stream() const = 0;  ///< another one of the same kind; events order the two
  Device device() { return device_runtime().device(); }     ///< device of the tensors
  MemoryTracker& memory_tracker() { return memory().memory_tracker(); }  ///< memory tracker of memory()
  /// Whether forwards record what a backward needs.
  virtual bool recording() const = 0;

  /// Calls `write` with host memory of `bytes` bytes, which it fills before it returns; work appended to stream() after
  /// this call finds the data at `to`. Where the host shares the device's memory, `write` gets `to` itself, and earlier
  /// work that uses it must be done. Not called on a device without data.
  virtual void upload(void* to, std::size_t bytes, const std::function<void(void*)>& write) = 0;
  /// Waits for stream() and calls `read` with host memory that holds the data at `from`; valid during the call.
  virtual void download(const void* from, std::size_t bytes, const std::function<void(const void*)>& read) = 0;

  /// Converts `count` elements between two floating types; the ranges do not overlap.
  virtual void convert(Stream& stream, const void* in, DType from, void* out, DType to, std::size_t count) = 0;
  /// out = in, or out += in if `accumulate`, in `dtype`; floating.
  virtual void assign(Stream& stream, DType dtype, const void* in, void* out, std::size_t count, bool accumulate) = 0;
  /// out = a - b
  virtual void subtract(Stream& stream, const float* a, const float* b, float* out, std::size_t count) = 0;
  virtual void norm_slices(const NormSlices& args) = 0;                ///< see NormSlices
  virtual void clip_factor(Stream& stream, const ClipArgs& args) = 0;  ///< see ClipArgs
  /// An optimizer step. The update of an element depends only on its own values.
  virtual void update(const OptimizerConfig& config, const OptimizerStep& step, const OptimizerRange& range) = 0;
  /// Runs `work`, whose memory comes from `memory`, and records it instead of executing it. Throws Unsupported where
  /// the device has no graphs, and what `work` throws.
  virtual std::unique_ptr<base::Graph> capture(MemoryPool& memory, const std::function<void()>& work) = 0;

  /// The choice of matrix products, which all ranks must have alike: "own"; "" where there is none.
  virtual std::string products() const = 0;
  /// Names what computes here; ranks with different names may round differently.
  virtual std::string libraries() const = 0;
};

/// A model that an engine trains.
class TESSERA_API Model {
 public:
  virtual ~Model();
  virtual Module& root() = 0;      ///< the whole model
  virtual Runtime& runtime() = 0;  ///< device and arithmetic of the model
  /// Throws InvalidUsage if the model can't be trained as it is, such as for contradictory dtypes.
  virtual void validate() const {}
  /// Called after an engine's step has submitted new values of the parameters.
  virtual void on_update() {}
  /// From now on backward recomputes the activations of blocks. Throws Unsupported by default.
  virtual void checkpoint_activations();
};

/// Makes a Model of another library's, which outlives it: a header that specializes it, such as nn_model.h for
/// nn::Module, has `static std::unique_ptr<Model> make(M& model)`.
template <class M>
struct Adapter {
  /// Without a specialization: says what to include.
  static std::unique_ptr<Model> make(M& /*model*/) {
    static_assert(sizeof(M) == 0, "include the header that adapts this model, such as tessera/fsdp/nn_model.h");
    return nullptr;
  }
};

}  // namespace tessera::fsdp
