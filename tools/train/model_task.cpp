#include "tools/train/model_task.h"

#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/fsdp/plugin.h"
#include "tessera/nn/activation_checkpoint.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/plan/simulation.h"
#include "tools/cli/output.h"
#include "tools/train/model_files.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

/// Throws InvalidUsage for what the tool can't ask of a model that is not nn's.
void check_foreign(fsdp::Model& model, const TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  for (const auto& [given, name] : {std::pair(!o.recompute.empty(), "--recompute"),
                                    {!o.f32_modules.empty(), "--f32-modules"},
                                    {plan.fp8.has_value(), "--precision fp8"}})
    if (given) throw InvalidUsage(fmt::format("{} with --model {}: it needs a model of tessera::nn", name, o.model));
  if (model.root().dtype() != plan.precision.compute)
    throw InvalidUsage(fmt::format("--model {} computes in {} with --precision {}: its task ignores TaskSetup::dtype",
                                   o.model, base::name_of(model.root().dtype()), o.precision));
  if (o.checkpoint_activations) model.checkpoint_activations();
}

std::unique_ptr<nn::Module> prepared_model(const TrainPlan& plan, nn::Context& context) {
  std::unique_ptr<nn::Module> model = nn::make_model(context, plan.model);
  prepare(*model, plan);
  return model;
}

void overwrite(const nn::Tensor& to, const nn::Tensor& from) {
  nn::Context& context = to.context();
  context.runtime().copy(context.stream(), base::CopyDirection::device_to_device, to.raw(), from.raw(), to.bytes());
}

}  // namespace

std::optional<fsdp::ExportedTask> plugin_task_of(const TrainOptions& o) {
  if (!fsdp::is_plugin_name(o.model)) return std::nullopt;
  for (const auto& [given, name] : {std::pair(o.lora.has_value(), "--lora"),
                                    {!o.quantize.empty(), "--quantize"},
                                    {!o.init.empty(), "--init"},
                                    {!o.init_adapter.empty(), "--init-adapter"},
                                    {!o.export_dir.empty(), "--export"},
                                    {!o.export_adapter.empty(), "--export-adapter"},
                                    {o.seq_len.has_value(), "--seq-len"},
                                    {o.data_format != "bytes", "--data-format"},
                                    {!o.peak_flops.empty(), "--peak-flops"}})
    if (given)
      throw InvalidUsage(
          fmt::format("{} with --model {}: only the tool's own models have it; leave it out", name, o.model));
  std::map<std::string, std::string> files;
  if (!o.data.empty()) files["data"] = joined_by(o.data, ",");
  if (!o.eval.empty()) files["eval"] = o.eval;
  return fsdp::plugin_task(o.model, files);
}

std::unique_ptr<fsdp::TrainingTask> make_task(const TrainPlan& plan, nn::Context& context) {
  if (!plan.task) {
    std::unique_ptr<nn::CausalModel> model = nn::make_model(context, plan.model);
    prepare(*model, plan);
    return tessera::plan::make_token_task(std::move(model), plan.seq_len);
  }
  const std::unique_ptr<fsdp::Runtime> runtime = fsdp::make_runtime(context);
  const base::DType dtype = plan.precision.compute;
  auto task = plan.task->make({.runtime = *runtime,
                               .dtype = dtype,
                               .seed = plan.options.seed,
                               .memory_tracker = context.memory().shared_memory_tracker()});
  if (auto* const own = dynamic_cast<fsdp::NnTask*>(task.get()))
    prepare(own->module(), plan);
  else
    check_foreign(task->model(), plan);
  return task;
}

void prepare(nn::Module& model, const TrainPlan& plan) {
  if (plan.quantized) nn::quantize_nf4(model);
  if (plan.lora) nn::add_lora(model, *plan.lora);
  set_dtypes(model, plan.precision.compute, plan.options.f32_modules);
  if (plan.fp8 && nn::use_fp8(model, *plan.fp8) == 0)
    throw InvalidUsage("--precision fp8: --f32-modules leaves no linear layer to multiply in 8 bits; use bf16");
  if (plan.options.checkpoint_activations) nn::checkpoint_activations(model);
  model.context().set_recomputed(recomputed_of(plan.options));
}

LanguageTask::LanguageTask(const TrainPlan& plan, nn::Context& context)
    : NnTask(prepared_model(plan, context), plan.options.seed), plan_(plan) {
  if (plan.data != nullptr)
    batches_.emplace(
        plan.data, nn::BatchOptions{plan.data->training(), plan.seq_len, plan.options.global_batch, plan.options.seed});
  if (plan.eval != nullptr) windows_.emplace(plan.eval, plan.eval->all(), plan.seq_len);
}

nn::Tensor LanguageTask::loss(std::int64_t step, base::ElementRange samples) {
  batch_ = batches_->batch(context(), step + 1, samples);
  return loss_of(*batch_);
}

nn::Tensor LanguageTask::run_step(std::int64_t step, base::ElementRange samples, double scale) {
  if (graph_ == nullptr || !graph_->obstacle().empty()) {
    nn::Tensor loss = NnTask::run_step(step, samples, scale);
    batch_.reset();
    return loss;
  }
  const nn::TokenBatch batch = batches_->batch(context(), step + 1, samples);
  // A graph's inputs must stay at their addresses.
  if (!batch_) {
    batch_ = batch;
  } else {
    overwrite(batch_->tokens, batch.tokens);
    overwrite(batch_->targets, batch.targets);
  }
  return graph_->run([&] { return differentiate([&] { return loss_of(*batch_); }, scale); });
}

}  // namespace tessera::tools
