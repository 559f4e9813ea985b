// Resources that the operations of one rank use: memory, a stream, threads, and the tape that records them.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "tessera/nn/kernels/kernel_table.h"
#include "tessera/nn/thread_pool.h"
#include "tessera/nn/types.h"

namespace tessera::nn {

class Tape;
class PinnedBufferCache;

/// Inputs of a dropout mask besides its module and element. The masks are the same for every world size.
struct RngState {
  std::uint64_t seed = 0;         ///< seed of all dropout masks
  std::uint64_t step = 0;         ///< step of training; other steps have other masks
  std::int64_t first_sample = 0;  ///< global index of the batch's first sequence
};

/// Inputs of a forward besides its tensors.
struct ForwardState {
  RngState random;       ///< see RngState
  bool training = true;  ///< see Context::training()
};

/// Outputs that cost little to compute again, which backward then does instead of keeping them. The bits are the same
/// where the device computes an activation with the product before it as it does alone, as the host does.
struct RecomputedOutputs {
  bool activations = false;                                   ///< those of activation functions and swiglu
  bool norms = false;                                         ///< those of layer and RMS norms
  bool operator==(const RecomputedOutputs&) const = default;  ///< compares all members
};

/// Resources of a Context.
struct ContextOptions {
  int threads = 1;  ///< threads of the compute thread pool, including the caller's; below 1: InvalidUsage
  std::shared_ptr<MemoryTracker> memory_tracker;         ///< null: the context creates one
  MemoryPoolOptions memory;                              ///< options of the device's memory pool
  std::function<std::unique_ptr<Stream>()> make_stream;  ///< null: a stream of the device
  Device device;                                         ///< device of tensors and kernels
  std::shared_ptr<DeviceRuntime> runtime;                ///< null: open_device() of `device`
  std::shared_ptr<base::Logger> logger = nullptr;        ///< null: no logging
  std::int64_t row_multiple = 0;                         ///< see Context::padded_row(); 0: that of the device
  PlannedKernels planned = PlannedKernels::host;         ///< kernels that the device without data stands for
  std::optional<Products> products;  ///< matrix products on the host; empty: products_of_environment()
};

/// Belongs to one rank and is used by one thread. It must outlive every tensor created on it.
class TESSERA_API Context {
 public:
  /// Throws InvalidUsage if the device can't be used.
  explicit Context(ContextOptions options = {});
  ~Context();

  Device device() const { return runtime_->device(); }                  ///< device of tensors and kernels
  DeviceRuntime& runtime() { return *runtime_; }                        ///< owned by the context, perhaps with others
  MemoryPool& memory() { return memory_; }                              ///< memory pool of the device
  MemoryTracker& memory_tracker() { return memory_.memory_tracker(); }  ///< memory tracker of memory()
  Stream& stream() { return *stream_; }                                 ///< the compute stream
  /// Another stream of the kind of stream(); the caller orders the two by events.
  std::unique_ptr<Stream> make_stream() const;
  ThreadPool& threads() { return *threads_; }  ///< thread pool of kernels on the host; used by one operation at a time
  /// The state of the next dropout masks, which the program sets before each step. Throws InvalidUsage during a graph
  /// capture.
  RngState& random() {
    refuse_in_capture("dropout", "its masks change with every step");
    return random_;
  }
  DeviceKernels& device_kernels() { return *kernels_; }  ///< the kernels that have no element type
  /// The kernels for elements of type T. Throws Unsupported "OP: no kernel for DTYPE on DEVICE".
  template <class T>
  KernelTable<T>& kernels(std::string_view op) {
    KernelTable<T>* found = kernels_->of<T>();
    if (found == nullptr) throw_unsupported(op, dtype_of<T>);
    return *found;
  }
  /// The elements that a row of `columns` elements of a large intermediate matrix occupies: a multiple of
  /// ContextOptions::row_multiple, by default the device's DeviceKernels::row_multiple().
  std::int64_t padded_row(std::int64_t columns) const {
    return (columns + row_multiple_ - 1) / row_multiple_ * row_multiple_;
  }
  PinnedBufferCache& staging() { return *staging_; }  ///< pinned buffers of host_access.h

  /// False in evaluation: dropout does nothing.
  bool training() const { return training_; }
  void set_training(bool training) { training_ = training; }  ///< true by default

  /// What the backwards of operations that run from now on compute again.
  const RecomputedOutputs& recomputed() const { return recomputed_; }
  void set_recomputed(const RecomputedOutputs& outputs) { recomputed_ = outputs; }  ///< default: nothing

  /// The current state; ForwardStateScope restores it.
  ForwardState forward_state() const { return {random_, training_}; }

  /// Throws InvalidUsage "WHAT can't be part of a graph: WHY" while a GraphCapture exists.
  void refuse_in_capture(std::string_view what, std::string_view why) const;

  /// The tape that currently records operations; null: none.
  Tape* tape() const { return tape_; }

 private:
  friend class TapeScope;
  friend class ForwardStateScope;
  friend class GraphCapture;
  [[noreturn]] void throw_unsupported(std::string_view op, DType dtype) const;
  const std::shared_ptr<DeviceRuntime> runtime_;
  std::function<std::unique_ptr<Stream>()> make_stream_;
  MemoryPool memory_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<ThreadPool> threads_;
  std::unique_ptr<DeviceKernels> kernels_;
  std::int64_t row_multiple_;
  std::unique_ptr<PinnedBufferCache> staging_;
  RngState random_;
  Tape* tape_ = nullptr;
  RecomputedOutputs recomputed_;
  bool training_ = true;
  bool capturing_ = false;
};

/// Makes a tape the recording one during the scope's lifetime. Scopes nest.
class TESSERA_API TapeScope {
 public:
  explicit TapeScope(Context& context);     ///< a tape of the scope's own; Tensor::backward() runs it
  TapeScope(Context& context, Tape* tape);  ///< null: nothing is recorded; `context` and `tape` outlive the scope
  ~TapeScope();
  TapeScope(const TapeScope&) = delete;
  TapeScope& operator=(const TapeScope&) = delete;

 private:
  const std::unique_ptr<Tape> own_;
  Context& context_;
  Tape* const previous_;
};

/// Sets an earlier forward state during the scope's lifetime, so that a recomputation draws the same masks.
class TESSERA_API ForwardStateScope {
 public:
  ForwardStateScope(Context& context, const ForwardState& state);  ///< `context` outlives the scope
  ~ForwardStateScope();
  ForwardStateScope(const ForwardStateScope&) = delete;
  ForwardStateScope& operator=(const ForwardStateScope&) = delete;

 private:
  Context& context_;
  const ForwardState previous_;
};

/// Disables training mode, and with it dropout, during the scope's lifetime.
class TESSERA_API EvaluationScope {
 public:
  /// `context` outlives the scope.
  explicit EvaluationScope(Context& context) : context_(context), previous_(context.training()) {
    context.set_training(false);
  }
  ~EvaluationScope() { context_.set_training(previous_); }
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  Context& context_;
  const bool previous_;
};

}  // namespace tessera::nn
