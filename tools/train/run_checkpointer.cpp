#include "tools/train/run_checkpointer.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "tessera/base/error.h"
#include "tools/cli/validators.h"
#include "tools/train/model_files.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

constexpr const char* kModel = "model";
constexpr const char* kLossScale = "loss-scale";
constexpr const char* kGoodSteps = "loss-scale-good-steps";
constexpr const char* kSkippedSteps = "loss-scale-skipped-steps";

/// The options that determine the order of the data.
fsdp::Attributes data_attributes(const TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  return {{"seed", std::to_string(o.seed)},
          {"global-batch", std::to_string(o.global_batch)},
          {"seq-len", std::to_string(plan.seq_len)},
          {"data-format", o.data_format},
          {"data-tokens", plan.data == nullptr ? "0" : std::to_string(plan.data->size())}};
}

fsdp::Attributes attributes_of(const TrainPlan& plan) {
  fsdp::Attributes attributes = data_attributes(plan);
  attributes["optimizer"] = plan.options.optimizer;
  attributes[kModel] = nn::config_json(plan.model);
  if (plan.lora) attributes[kLoraAttribute] = lora_json_of(plan);
  if (plan.quantized) attributes[kQuantizeAttribute] = kNf4;
  return attributes;
}

}  // namespace

void add_saving_options(CLI::App& command, TrainOptions& o) {
  command.add_option("--save", o.save, "write checkpoints to this directory at the end and as --save-every says")
      ->type_name("DIR");
  command.add_option("--save-every", o.save_every, "also write a checkpoint every N steps, while training continues")
      ->type_name("N")
      ->transform(whole_number(1, 1ULL << 40));
  command
      .add_option("--keep-last", o.keep_last,
                  "keep only the last N checkpoints in the directory of --save (default: all)")
      ->type_name("N")
      ->transform(whole_number(1, 1 << 20));
  command
      .add_option("--resume", o.resume,
                  "continue from the newest complete checkpoint in this directory, with any ranks and strategy")
      ->type_name("DIR");
}

std::string checkpoint_to_resume(const TrainOptions& o) {
  for (const auto& [given, name] :
       {std::pair(o.save_every.has_value(), "--save-every"), {o.keep_last.has_value(), "--keep-last"}})
    if (given && o.save.empty()) throw InvalidUsage(std::string(name) + " needs --save, the directory to write to");
  if (o.resume.empty()) return "";
  // The same command starts a run and resumes it after a crash.
  std::error_code error;
  const bool own = !o.save.empty() && std::filesystem::weakly_canonical(o.save, error) ==
                                          std::filesystem::weakly_canonical(o.resume, error);
  const bool is_step = std::filesystem::exists(o.resume + "/index.json");
  if (own && !is_step && fsdp::latest_checkpoint(o.resume).empty()) return "";
  return fsdp::Checkpoint(o.resume).directory();
}

nn::ModelConfig model_in(const std::string& directory) {
  const fsdp::Checkpoint checkpoint(directory);
  const auto found = checkpoint.attributes().find(kModel);
  if (found == checkpoint.attributes().end())
    throw InvalidUsage(directory + ": written by another program: it does not name its model");
  return nn::parse_config(found->second, directory);
}

std::int64_t check_resumed(const TrainPlan& plan) {
  const fsdp::Checkpoint checkpoint(plan.checkpoint);
  const auto& before = checkpoint.attributes();
  const auto attribute = [&](const std::string& name) {
    const auto found = before.find(name);
    return found == before.end() ? std::string("?") : found->second;
  };
  if (attribute("optimizer") != plan.options.optimizer)
    throw InvalidUsage(fmt::format("--resume {}: written with --optimizer {}, this run has {}", plan.options.resume,
                                   attribute("optimizer"), plan.options.optimizer));
  const auto step = static_cast<std::int64_t>(checkpoint.step());
  if (plan.data == nullptr || step >= plan.options.steps) return step;  // no further training
  for (const auto& [name, value] : data_attributes(plan))
    if (attribute(name) != value)
      throw InvalidUsage(fmt::format(
          "--resume {}: written with {} {}, this run has {}, so its batches would not be the next ones; use the same, "
          "or start over with --init of an export",
          plan.options.resume, name == "data-tokens" ? "--data of tokens" : "--" + name, attribute(name), value));
  return step;
}

std::string divergence_note(const TrainPlan& plan) {
  if (plan.checkpoint.empty() || fsdp::Checkpoint(plan.checkpoint).finite()) return "";
  const std::string parent = std::filesystem::path(plan.checkpoint).parent_path().string();
  const std::string finite = fsdp::latest_finite_checkpoint(parent);
  return fmt::format("warning: --resume {}: values in {} are not finite, since the training had diverged{}",
                     plan.options.resume, plan.checkpoint,
                     finite.empty() ? "" : "; the newest that is finite is " + finite);
}

void restore_scaler(const fsdp::Checkpoint& checkpoint, fsdp::GradientScaler& scaler) {
  const auto& saved = checkpoint.attributes();
  const auto scale = saved.find(kLossScale);
  if (scale == saved.end()) return;
  const auto number = [&](const char* name) {  // a text without a number is 0
    const auto found = saved.find(name);
    return found == saved.end() ? 0LL : std::strtoll(found->second.c_str(), nullptr, 10);
  };
  scaler.set_state({.scale = std::strtod(scale->second.c_str(), nullptr),
                    .good_steps = number(kGoodSteps),
                    .skipped_steps = static_cast<std::uint64_t>(number(kSkippedSteps))});
}

RunCheckpointer::RunCheckpointer(const TrainPlan& plan, fsdp::Engine& engine, comm::HostCollectives& control,
                                 const fsdp::GradientScaler* scaler)
    : every_(plan.options.save_every.value_or(0)),
      last_(plan.options.steps),
      attributes_(attributes_of(plan)),
      rank_(control.rank()),
      scaler_(scaler),
      writer_(engine, control, {.directory = plan.options.save, .keep_last = plan.options.keep_last.value_or(0)}) {
  attempt([&] { writer_.claim(); });
}

template <class Attempt>
void RunCheckpointer::attempt(Attempt&& attempt) {
  try {
    attempt();
  } catch (const base::SystemError& error) {  // on every rank
    failure_ = error.what();
    if (rank_ == 0) fmt::print(stderr, "tessera: {}; training continues\n", failure_);
  }
}

void RunCheckpointer::after_step(std::int64_t step) {
  if (writer_.saving()) attempt([&] { writer_.poll(); });
  if (step != last_ && (every_ == 0 || step % every_ != 0)) return;
  attempt([&] { writer_.finish(); });
  failure_.clear();
  fsdp::Attributes attributes = attributes_;
  if (scaler_ != nullptr) {
    attributes[kLossScale] = fmt::format("{}", scaler_->state().scale);
    attributes[kGoodSteps] = std::to_string(scaler_->state().good_steps);
    attributes[kSkippedSteps] = std::to_string(scaler_->state().skipped_steps);
  }
  attempt([&] { writer_.save(attributes); });
}

void RunCheckpointer::finish() {
  attempt([&] { writer_.finish(); });
}

}  // namespace tessera::tools
