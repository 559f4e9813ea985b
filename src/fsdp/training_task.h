// A model together with the data that it learns. A plug-in file offers tasks by name (plugin.h), and the tool's
// commands run them as they run the tool's own models:
//
//   tessera compare --model ./my_model.so:mlp,width=64 --strategies ddp,fsdp
//
// nn_task.h implements most of it for models of tessera::nn, libtorch/torch_task.h for those of libtorch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "tessera/base/memory_tracker.h"
#include "tessera/fsdp/model.h"
#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

/// The options of a task: the KEY=VALUE of the command line, and "data" and "eval", the files of --data and --eval. A
/// task reads those that it knows; what it has not read when it is made is refused. Used by one thread.
class TESSERA_API TaskOptions {
 public:
  explicit TaskOptions(std::map<std::string, std::string> values = {});  ///< the options that were given
  /// The value of an option, or `missing` if it was not given.
  std::string text(const std::string& name, const std::string& missing = "") const;
  /// The same of an integer. Throws InvalidUsage for others and for values outside of [least, most].
  std::int64_t integer(const std::string& name, std::int64_t missing, std::int64_t least = 1,
                       std::int64_t most = std::int64_t{1} << 40) const;
  /// The same of a finite number.
  double number(const std::string& name, double missing) const;
  /// Throws InvalidUsage that names an option that was given and never read, and lists the ones that were read.
  void refuse_unknown(const std::string& task) const;

 private:
  std::map<std::string, std::string> values_;
  mutable std::set<std::string> read_;
};

/// What a task is made with. Ranks may be threads that make theirs concurrently.
struct TaskSetup {
  /// The tool's. nn_context(runtime) is the context of an nn model, which outlives the task. It has no data where a
  /// step is only planned, as by `tessera plan`.
  Runtime& runtime;
  DType dtype = DType::f32;  ///< dtype in which the model computes (--precision); the tool sets an nn model's
  std::uint64_t seed = 0;    ///< --seed: of the data and what else is random. An nn model's values are not the task's
  std::shared_ptr<MemoryTracker> memory_tracker;  ///< counts the memory of a model with another runtime
  TaskOptions options{};                          ///< options that were given
};

/// One per rank, used by one thread. The order of calls is the same on all ranks.
class TESSERA_API TrainingTask {
 public:
  virtual ~TrainingTask();
  /// The model, without an engine at first. It may have no memory yet.
  virtual Model& model() = 0;
  /// The forward and backward of `samples` out of the global batch of step `step`, which counts from 0. Gradients are
  /// those of the samples' mean loss, multiplied by `scale`. The same samples of a step are the same data on every rank
  /// and under every division into ranks and microbatches.
  virtual void forward_backward(std::int64_t step, ElementRange samples, double scale) = 0;
  /// The mean of the losses since the last call, which it waits for. Without data there is none: NaN.
  virtual double mean_loss() = 0;
  /// The tokens, or whatever a speed counts, in one sample.
  virtual std::int64_t tokens_per_sample() const { return 1; }
  /// The number of samples for an evaluation; 0: there is none.
  virtual std::int64_t evaluation_samples() const { return 0; }
  /// The mean loss of some of them, without backward and without dropout. Throws Unsupported by default.
  virtual double evaluation_loss(ElementRange samples);

 protected:
  [[noreturn]] static void refuse_evaluation();  ///< throws Unsupported
};

/// A task that a plug-in file exports.
struct ExportedTask {
  std::string name;  ///< NAME of FILE.so:NAME
  /// Makes a task. Throws InvalidUsage for options that it can't use.
  std::function<std::unique_ptr<TrainingTask>(const TaskSetup& setup)> make;
};

}  // namespace tessera::fsdp
