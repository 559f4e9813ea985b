#include "tools/train/run_checkpointer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"
#include "tools/train/model_files.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

constexpr const char* kModel = "model";
constexpr const char* kTask = "task";  // instead: NAME,OPTIONS of a plug-in file, which may lie elsewhere next time
constexpr const char* kLossScale = "loss-scale";
constexpr const char* kGoodSteps = "loss-scale-good-steps";
constexpr const char* kSkippedSteps = "loss-scale-skipped-steps";
constexpr std::int64_t kMostSteps = std::int64_t{1} << 40;  // as for --steps

/// The options that determine the order of the data.
fsdp::Attributes data_attributes(const TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  fsdp::Attributes all = {{"seed", std::to_string(o.seed)}, {"global-batch", std::to_string(o.global_batch)}};
  if (plan.task) return all;  // its own options determine the rest
  all.insert({{"seq-len", std::to_string(plan.seq_len)},
              {"data-format", o.data_format},
              {"data-tokens", plan.data == nullptr ? "0" : std::to_string(plan.data->size())},
              {"data-xxh3", plan.data == nullptr ? "" : plan.data->hash()}});
  return all;
}

/// Options that a resumed run takes over unless they are given: what the next step computes depends on them.
constexpr const char* kContinued[] = {
    "optimizer",   "lr",          "schedule",     "warmup",   "betas",        "eps",       "weight-decay",
    "momentum",    "nesterov",    "amsgrad",      "maximize", "clip-norm",    "norm-type", "precision",
    "fp8-scaling", "f32-modules", "reduce-dtype", "seed",     "global-batch", "seq-len",   "data-format"};
/// Those that only the first of these options gives a meaning.
constexpr std::string_view kOfPrecision[] = {"fp8-scaling", "f32-modules", "reduce-dtype"};

std::string attribute(const fsdp::Attributes& attributes, const std::string& name) {
  const auto found = attributes.find(name);
  return found == attributes.end() ? "" : found->second;
}

std::string task_name(const TrainPlan& plan) {
  const std::string& model = plan.options.model;
  return plan.task ? model.substr(model.find(".so:") + 4) : "";
}

fsdp::Attributes attributes_of(const TrainPlan& plan) {
  fsdp::Attributes attributes = data_attributes(plan), given = plan.options.given;
  attributes.merge(given);
  attributes["optimizer"] = plan.options.optimizer;
  attributes["steps"] = std::to_string(plan.options.steps);
  if (const std::string origin = origin_of(plan); !origin.empty()) attributes[kOriginAttribute] = origin;
  if (plan.task)
    attributes[kTask] = task_name(plan);
  else
    attributes[kModel] = nn::config_json(plan.model);
  if (plan.lora) attributes[kLoraAttribute] = lora_json_of(plan);
  if (plan.quantized) attributes[kQuantizeAttribute] = kNf4;
  return attributes;
}

}  // namespace

void add_saving_options(CLI::App& command, RunOptions& o) {
  add_option(command, "--save", o.save, "write checkpoints to this directory at the end and as --save-every says",
             "DIR");
  add_option(command, "--save-every", o.save_every, "also write a checkpoint every N steps, while training continues",
             {"N", whole_number(1, 1ULL << 40)});
  add_option(command, "--keep-last", o.keep_last,
             "keep only the last N checkpoints in the directory of --save (default: all)",
             {"N", whole_number(1, 1 << 20)});
  add_option(command, "--resume", o.resume,
             "continue from the newest complete checkpoint in this directory, with any ranks and strategy", "DIR");
}

std::string checkpoint_to_resume(const RunOptions& o) {
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

void restore_options(CLI::App& command, RunOptions& o) {
  for (const char* name : kContinued)
    if (const CLI::Option* option = command.get_option(std::string("--") + name); option->count() > 0)
      o.given[name] = joined_by(option->results(), ",");
  const std::string directory = checkpoint_to_resume(o);
  if (directory.empty()) return;
  const fsdp::Checkpoint checkpoint(directory);
  const bool precision_given = o.given.contains("precision");
  std::string restored;
  for (const char* name : kContinued) {
    const std::string before = attribute(checkpoint.attributes(), name), option = std::string("--") + name;
    const auto given = o.given.find(name);
    if (given != o.given.end()) {
      if (given->second != before)
        o.notes.push_back(fmt::format("--resume {}: {} {} instead of {}", o.resume, option, given->second,
                                      before.empty() ? "the default" : before));
      continue;
    }
    if (before.empty() || (precision_given && std::ranges::find(kOfPrecision, name) != std::end(kOfPrecision)))
      continue;
    CLI::Option* const target = command.get_option(option);
    const bool of_model = option == "--seq-len";  // its default is, so it goes without saying
    if (before != target->get_default_str() && !of_model) restored += fmt::format(" {} {}", option, before);
    try {
      target->add_result(before);
      target->run_callback();
    } catch (const CLI::Error& error) {
      throw InvalidUsage(fmt::format("--resume {}: {}", o.resume, error.what()));
    }
    o.given[name] = before;
  }
  if (!restored.empty()) o.notes.push_back(fmt::format("--resume {}: continues with{}", o.resume, restored));
}

nn::ModelConfig model_in(const std::string& directory) {
  const fsdp::Checkpoint checkpoint(directory);
  const auto found = checkpoint.attributes().find(kModel);
  if (const std::string task = attribute(checkpoint.attributes(), kTask); !task.empty())
    throw InvalidUsage(directory + ": is of the plug-in model " + task +
                       ": only train reads it, by --resume with --model FILE.so:" + task);
  if (found == checkpoint.attributes().end())
    throw InvalidUsage(directory + ": written by another program: it does not name its model");
  nn::ModelConfig config = nn::parse_config(found->second, directory);
  if (static_cast<std::size_t>(config.layers) > checkpoint.tensors().size())  // modules of so many would take memory
    throw InvalidUsage(fmt::format("{}: does not match its model of {} layers: it has {} tensors", directory,
                                   config.layers, checkpoint.tensors().size()));
  return config;
}

std::int64_t check_resumed(const TrainPlan& plan) {
  const fsdp::Checkpoint checkpoint(plan.checkpoint);
  const auto& attributes = checkpoint.attributes();
  if (const std::string before = attribute(attributes, "optimizer"); before != plan.options.optimizer)
    throw InvalidUsage(fmt::format("--resume {}: written with --optimizer {}, this run has {}", plan.options.resume,
                                   before, plan.options.optimizer));
  if (const std::string before = attribute(attributes, kTask); before != task_name(plan))
    throw InvalidUsage(fmt::format("--resume {}: written with --model {}, this run has {}", plan.options.resume,
                                   before.empty() ? "of the tool" : "FILE.so:" + before, plan.options.model));
  const auto step = static_cast<std::int64_t>(checkpoint.step());
  if ((plan.data == nullptr && !plan.task) || step >= plan.options.steps) return step;  // no further training
  for (const auto& [name, value] : data_attributes(plan)) {
    const std::string before = attribute(attributes, name);
    if (before == value || (before.empty() && name == "data-xxh3")) continue;  // which older checkpoints lack
    const std::string what = name == "data-tokens" ? "--data of tokens"
                             : name == "data-xxh3" ? "--data of XXH3"
                                                   : "--" + name;
    throw InvalidUsage(fmt::format(
        "--resume {}: written with {} {}, this run has {}, so its batches would not be the next ones; use the same{}, "
        "or start over with --init of an export",
        plan.options.resume, what, before, value, name == "data-xxh3" ? " files in the same order" : ""));
  }
  return step;
}

std::string nothing_left_note(const TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  if (plan.checkpoint.empty() || o.steps == 0 || plan.first_step < o.steps) return "";
  std::string unwritten;
  for (const auto& [option, value] : {std::pair("--save", o.save), {"--log-csv", o.log_csv}, {"--trace", o.trace}})
    if (!value.empty()) unwritten += (unwritten.empty() ? "; nothing is written by " : ", ") + std::string(option);
  return fmt::format("--steps {}: {} is at step {} already, so no step is made{}", o.steps, plan.checkpoint,
                     plan.first_step, unwritten);
}

std::string schedule_note(const TrainPlan& plan) {
  if (plan.checkpoint.empty() || plan.schedule.kind != nn::LrSchedule::Kind::cosine) return "";
  const fsdp::Checkpoint checkpoint(plan.checkpoint);
  nn::LrSchedule before = plan.schedule;
  before.steps = std::strtoll(attribute(checkpoint.attributes(), "steps").c_str(), nullptr, 10);
  if (before.steps <= 0 || before.steps == plan.schedule.steps || plan.first_step >= plan.schedule.steps) return "";
  return fmt::format(
      "--resume {}: the cosine schedule now ends in step {} instead of {}: the learning rate was {:.3g} in step {} and "
      "is {:.3g} in step {}",
      plan.options.resume, plan.schedule.steps, before.steps, nn::learning_rate(before, plan.first_step),
      plan.first_step, nn::learning_rate(plan.schedule, plan.first_step + 1), plan.first_step + 1);
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
  const auto number = [&](const char* name) {
    const auto found = saved.find(name);
    return found == saved.end()
               ? 0
               : base::parse_integer(found->second, checkpoint.directory() + ": " + name, 0, kMostSteps);
  };
  const double value = std::strtod(scale->second.c_str(), nullptr);
  if (!(value > 0) || !std::isfinite(value))
    throw InvalidUsage(
        fmt::format("{}: {} is '{}'; needs a number above 0", checkpoint.directory(), kLossScale, scale->second));
  scaler.set_state({.scale = value,
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
    if (rank_ == 0) print_clean(stderr, "tessera: {}; training continues\n", failure_);
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
