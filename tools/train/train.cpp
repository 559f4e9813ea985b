// tessera train: trains with one strategy and prints a line per step.
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/launch.h"
#include "tools/cli/commands.h"
#include "tools/cli/line_file.h"
#include "tools/cli/output.h"
#include "tools/cli/progress_line.h"
#include "tools/cli/validators.h"
#include "tools/launch/launcher.h"
#include "tools/launch/ranks.h"
#include "tools/train/csv_log.h"
#include "tools/train/engine_options.h"
#include "tools/train/run_checkpointer.h"
#include "tools/train/step_progress.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

void check_outputs(const TrainPlan& plan) {
  const TrainOptions& options = plan.options;
  check_directory("--save", options.save, "latest");
  check_results(options);
  check_csv_log(options.log_csv, plan.first_step);
  check_directory("--export", options.export_dir, "config.json");
  check_directory("--export-adapter", options.export_adapter, "adapter_config.json");
}

void write_json(LineFile& file, const nlohmann::ordered_json& object) { file.write(json_text(object) + "\n"); }

void print_step(const StepReport& step, LineFile& json) {
  print_clean(
      "step {} loss {:.6f} grad_norm {:.4f} lr {:.3g} {:.0f} tokens/s{}\n", step.step, step.loss, step.grad_norm,
      step.learning_rate, step.tokens_per_second,
      step.skipped ? fmt::format(" skipped: gradients overflowed; the loss scale is now {}", *step.loss_scale) : "");
  std::fflush(stdout);
  nlohmann::ordered_json line = {{"step", step.step},
                                 {"loss", step.loss},
                                 {"tokens_per_second", step.tokens_per_second},
                                 {"grad_norm", step.grad_norm},
                                 {"learning_rate", step.learning_rate}};
  if (step.loss_scale) {
    line["loss_scale"] = *step.loss_scale;
    line["skipped"] = step.skipped;
    line["skipped_steps"] = step.skipped_steps;
  }
  if (step.mfu) line["mfu"] = *step.mfu;
  write_json(json, line);
}

/// The progress line of rank 0: shown by its launcher, or by the rank itself.
class RankProgress {
 public:
  explicit RankProgress(const TrainPlan& plan) : through_launcher_(plan.options.progress), text_(plan) {}
  void hide() { line_.hide(); }
  void show(const StepReport& step) {
    if (through_launcher_)
      print_progress(text_.text_after(step));
    else if (line_.on())
      line_.show(text_.text_after(step));
  }

 private:
  const bool through_launcher_;
  StepProgress text_;
  ProgressLine line_;
};

int train_as_rank(const TrainPlan& plan) {
  const TrainOptions& options = plan.options;
  const auto memory_tracker = std::make_shared<base::MemoryTracker>();
  const auto world = init_world(world_of(plan, memory_tracker));
  const bool first = world->rank() == 0;
  if (first && plan.data != nullptr) {
    print_clean("{}: trains on the first {} of {} tokens; the last tenth is left for --eval\n",
                base::printable(plan.data->name()), plan.data->training().count(), plan.data->size());
    std::fflush(stdout);
  }
  LineFile json("--json", first ? options.json : "");
  CsvLog csv(first ? options.log_csv : "", plan.first_step);
  RankProgress progress(plan);
  const auto on_step = [&](const StepReport& step) {
    progress.hide();
    print_step(step, json);
    csv.write(step);
    if (step.step < options.steps) progress.show(step);
  };
  const TrainingOutcome outcome =
      run_training(plan, options.strategy, *world, memory_tracker, {.on_step = on_step, .measure_norm = true});
  if (!first) return 0;
  if (const auto& evaluation = outcome.result.evaluation) {
    print_clean("eval loss {:.6f} over {} tokens\n", evaluation->loss, evaluation->tokens);
    write_json(json, {{"eval_loss", evaluation->loss}, {"tokens", evaluation->tokens}});
  }
  if (outcome.result.link) print_clean("{}", lateness_line(*outcome.result.link));
  print_clean("final parameters {}\n", outcome.result.final_parameters_hash);
  nlohmann::ordered_json end = {{"final_parameters_hash", outcome.result.final_parameters_hash},
                                {"steps", options.steps}};
  if (outcome.result.replayed) end["graphs"] = true;
  write_json(json, end);
  if (!options.trace.empty()) {
    std::ostringstream trace;
    base::write_chrome_trace(trace, outcome.last_step);
    write_file(options.trace, trace.str());
  }
  if (!outcome.save_failure.empty()) throw base::SystemError(outcome.save_failure);
  return 0;
}

int train(const CommandLine& commands, const TrainOptions& options) {
  const int ranks = world_size(options.ranks);
  const bool spawn = must_spawn(ranks);
  const TrainPlan plan = make_plan(options, ranks);
  engine_options(plan, options.strategy);
  if (spawn || comm::resolve_launch().rank == 0) {
    check_outputs(plan);
    if (comm_variable("TESSERA_LAUNCHER") != "tessera") {  // else the launching process has printed it
      warn_ineffective_options(options);
      std::vector<std::string> notes = options.notes;
      notes.insert(notes.end(), {plan.model.note, schedule_note(plan), divergence_note(plan),
                                 accumulation_note(plan, options.strategy)});
      for (const std::string& note : notes)
        if (!note.empty()) print_clean(stderr, "tessera: {}\n", note);
    }
  }
  if (!spawn) return train_as_rank(plan);
  warn_if_alone_under_launcher(ranks);
  ProgressLine progress;
  std::vector<std::string> arguments = commands.arguments;
  if (progress.on()) arguments.emplace_back("--progress");
  LaunchSpec spec = training_launch_spec(plan, std::move(arguments));
  if (progress.on()) spec.progress = &progress;
  return launch(spec);
}

}  // namespace

void add_train(CommandLine& commands) {
  CLI::App* train_command = commands.app.add_subcommand("train", "train a model under one strategy");
  const auto options = std::make_shared<TrainOptions>();
  add_train_options(*train_command, *options);
  add_strategy_option(*train_command, *options);
  add_saving_options(*train_command, *options);
  add_option(*train_command, "--log-csv", options->log_csv,
             "write a table with a line per step; with --resume, continue an existing one", "FILE");
  train_command->add_flag("--progress", options->progress)->group("");  // of the ranks that this command starts
  add_option(*train_command, "--export", options->export_dir,
             "write the trained model, with adapters merged, as a Hugging Face directory", "DIR");
  add_option(*train_command, "--export-adapter", options->export_adapter, "write the adapters as a PEFT directory",
             "DIR");
  train_command->callback([&commands, train_command, options] {
    commands.chosen = [&commands, train_command, options] {
      restore_options(*train_command, *options);
      return train(commands, *options);
    };
  });
}

}  // namespace tessera::tools
