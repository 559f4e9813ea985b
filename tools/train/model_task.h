// The model of a run with its data, as a training task: the tool's own model, or one that a plug-in file offers.
#pragma once

#include <memory>

#include "tessera/fsdp/graphed_step.h"
#include "tessera/fsdp/nn_task.h"
#include "tessera/nn/data.h"
#include "tessera/nn/models/causal_model.h"
#include "tools/train/plan.h"

namespace tessera::tools {

/// The plug-in's task that --model names, with --data and --eval as options; nothing for a model of the tool. Throws
/// InvalidUsage for options that only the tool's models have.
std::optional<fsdp::ExportedTask> plugin_task_of(const TrainOptions& options);

/// The task of a plug-in file, or the tool's model with tokens that mean nothing: for what needs no data. With the
/// plan's dtypes, adapters and recomputation. `context` outlives it.
std::unique_ptr<fsdp::TrainingTask> make_task(const TrainPlan& plan, nn::Context& context);

/// Applies the plan's adapters, dtypes and activation checkpointing. Call it before an engine has the model.
void prepare(nn::Module& model, const TrainPlan& plan);

/// The tool's model and the plan's data.
class LanguageTask final : public fsdp::NnTask {
 public:
  /// `plan` and `context` outlive it.
  LanguageTask(const TrainPlan& plan, nn::Context& context);
  /// Steps from now on are replays of this graph, as far as it can contain them; `graph` outlives their use.
  void replay_with(fsdp::GraphedStep& graph) { graph_ = &graph; }
  std::int64_t tokens_per_sample() const override { return plan_.seq_len; }
  std::int64_t evaluation_samples() const override { return windows_ ? windows_->count() : 0; }

 protected:
  nn::Tensor evaluation(base::ElementRange samples) override { return loss_of(windows_->batch(context(), samples)); }
  nn::Tensor loss(std::int64_t step, base::ElementRange samples) override;
  nn::Tensor run_step(std::int64_t step, base::ElementRange samples, double scale) override;

 private:
  nn::Tensor loss_of(const nn::TokenBatch& batch) {
    return module_as<nn::CausalModel>().loss(batch.tokens, batch.targets);
  }
  const TrainPlan& plan_;
  std::optional<nn::BatchSampler> batches_;
  std::optional<nn::SequentialSampler> windows_;  // with --eval
  fsdp::GraphedStep* graph_ = nullptr;            // null: steps are not replayed
  std::optional<nn::TokenBatch> batch_;           // until the backward is done; of a graph all the time
};

}  // namespace tessera::tools
