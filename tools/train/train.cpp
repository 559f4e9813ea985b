// tessera train: trains with one strategy and prints a line per step.
#include <fmt/format.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/text.h"
#include "tessera/comm/launch.h"
#include "tools/cli/commands.h"
#include "tools/cli/output.h"
#include "tools/cli/progress_line.h"
#include "tools/cli/validators.h"
#include "tools/launch/launcher.h"
#include "tools/launch/ranks.h"
#include "tools/train/run_checkpointer.h"
#include "tools/train/step_progress.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

/// An output file that grows by whole lines while the work goes on, so that other programs can follow it.
class LineFile {
 public:
  /// `option`: named in errors. A `path` of "" is no file: write() then does nothing. Throws InvalidUsage.
  LineFile(std::string option, const std::string& path, bool append = false) : option_(std::move(option)) {
    if (path.empty()) return;
    file_ = open_lines(path, append);
    if (!file_)
      throw base::InvalidUsage(
          option_ + ": can't write '" + path +
          "': " + (errno == EWOULDBLOCK ? "another run writes it; name another file" : std::strerror(errno)));
  }
  /// Writes a text that ends with a newline, at once. Throws SystemError.
  void write(std::string_view text) {
    if (!file_) return;
    std::fflush(stdout);  // it may be the same file
    if (!write_all(file_.get(), text)) throw base::SystemError(option_ + ": writing failed; is the disk full?");
  }

 private:
  const std::string option_;
  base::UniqueFd file_;
};

constexpr std::string_view kHeader =
    "step,loss,tokens_per_second,grad_norm,learning_rate,loss_scale,skipped_steps,live_bytes,peak_bytes,mfu\r\n";

template <class T>
std::string field(const std::optional<T>& value) {
  return value ? fmt::format("{}", *value) : "";
}

/// The step of a record; nothing if the line isn't one.
std::optional<std::int64_t> step_of(std::string_view line) {
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), step);
  if (error != std::errc() || end == line.data() + line.size() || *end != ',') return std::nullopt;
  return step;
}

/// What remains of a log if `first_step` steps count. The last line may be incomplete, since a run may die at any time.
std::string kept_records(const std::string& path, std::string_view text, std::int64_t first_step) {
  if (!text.empty() && !text.starts_with(kHeader))
    throw base::InvalidUsage("--log-csv '" + path +
                             "' does not begin with the header of this log, so a resumed run can't continue it; name "
                             "another file, or remove this one");
  std::string kept(kHeader);
  std::int64_t last = 0;
  for (std::size_t begin = kHeader.size(), number = 2; begin < text.size(); ++number) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string_view::npos) break;
    const std::string_view line = text.substr(begin, end + 1 - begin);
    const auto step = step_of(line);
    if (!step || *step <= last)
      throw base::InvalidUsage(fmt::format(
          "--log-csv '{}': line {} is not the record of a step after {}, so a resumed run can't continue the file; "
          "name another file, or remove this one",
          path, number, last));
    last = *step;
    if (last > first_step) break;
    kept += line;
    begin = end + 1;
  }
  return kept;
}

/// The text of a log that the run continues; nothing if it starts a new one.
std::optional<std::string> text_to_continue(const std::string& path, std::int64_t first_step) {
  std::error_code error;
  if (path.empty() || first_step == 0 || !std::filesystem::is_regular_file(path, error)) return std::nullopt;
  const base::FileText read = base::read_regular(path);
  if (!read.problem.empty()) throw base::InvalidUsage("--log-csv: can't read '" + path + "': " + read.problem);
  return read.text;
}

LineFile open_log(const std::string& path, std::int64_t first_step) {
  const auto text = text_to_continue(path, first_step);
  if (!text) {
    LineFile file("--log-csv", path);
    file.write(kHeader);
    return file;
  }
  if (const std::string kept = kept_records(path, *text, first_step); kept != *text) write_file(path, kept);
  return {"--log-csv", path, /*append=*/true};
}

/// Throws InvalidUsage if a run that resumes after `first_step` steps can't continue the file: another program, or
/// another version, has written it.
void check_csv_log(const std::string& path, std::int64_t first_step) {
  if (const auto text = text_to_continue(path, first_step)) kept_records(path, *text, first_step);
}

/// A record of --log-csv: a table of the steps of a training, which spreadsheets and pandas read. RFC 4180: a header,
/// then a record for each step, written when the step is done. A run that resumes continues its file; the records of
/// steps that it will do again are dropped.
void write_record(LineFile& file, const StepReport& step) {
  const auto skipped = step.loss_scale ? std::optional(step.skipped_steps) : std::nullopt;
  file.write(fmt::format("{},{},{},{},{},{},{},{},{},{}\r\n", step.step, step.loss, step.tokens_per_second,
                         step.grad_norm, step.learning_rate, field(step.loss_scale), field(skipped), step.live_bytes,
                         step.peak_bytes, field(step.mfu)));
}

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
  LineFile csv = open_log(first ? options.log_csv : "", plan.first_step);
  RankProgress progress(plan);
  const auto on_step = [&](const StepReport& step) {
    progress.hide();
    print_step(step, json);
    write_record(csv, step);
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
  if (!options.trace.empty()) write_file(options.trace, chrome_trace(outcome.last_step));
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
      warn_ineffective_options(options, {options.strategy});
      std::vector<std::string> notes = options.notes;
      notes.insert(notes.end(), {plan.model.note, nothing_left_note(plan), schedule_note(plan), divergence_note(plan),
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
