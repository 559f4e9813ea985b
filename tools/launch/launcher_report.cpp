// The outcome of a run: the last line names the cause.
#include <sys/wait.h>

#include <cstdio>

#include "tessera/base/error.h"
#include "tools/launch/launcher_run.h"

namespace tessera::tools {
namespace {

std::string killed_by(int signal) {
  return "was killed by signal " + std::to_string(signal) + " (" + signal_name(signal) + ")";
}

constexpr std::chrono::milliseconds kForOutput{2000};
constexpr std::chrono::milliseconds kForErrors{1000};

}  // namespace

std::string Launcher::cause_text(Rank& rank, int number) {
  const std::string who = by_prefix() ? plan_.prefix.front() : "rank " + std::to_string(number);
  if (WIFSIGNALED(rank.status)) return who + " " + killed_by(WTERMSIG(rank.status));
  const int code = WEXITSTATUS(rank.status);
  if (const auto error = rank.output->take_error()) return code == 2 || by_prefix() ? *error : who + ": " + *error;
  const std::string text = who + " ended with code " + std::to_string(code);
  return rank.output->last_error_line().empty() ? text : text + ": " + rank.output->last_error_line();
}

/// The program that starts the ranks knows little of them, so the ranks' reports and output have priority.
Launcher::Verdict Launcher::verdict_under_prefix() {
  Rank& starter = ranks_.front();
  const bool starter_failed = first_failed_ >= 0;
  if (!starter.running && starter.status == 0 && !starter.told_to_stop && !starter.output->has_error()) return {};
  if (starter_failed && WIFSIGNALED(starter.status)) return {1, cause_text(starter, 0)};
  auto lost = watch_->lost();
  if (lost)
    if (const auto named = watch_->named_in(starter.output->others())) lost = named;
  // Whether this process sees a foreign program's exit code before its starter reaps it is chance; the starter's own
  // message is not.
  const bool killed = lost && lost->status && WIFSIGNALED(*lost->status);
  const bool starter_explains =
      !plan_.own_program && !killed && starter_failed && !starter.output->last_error_line().empty();
  if (lost && !error_came_first_ && !starter_explains) {
    const std::string who = "rank " + std::to_string(lost->rank);
    if (killed) return {1, who + " " + killed_by(WTERMSIG(*lost->status))};
    if (!lost->status || !starter.output->has_error()) {
      std::string how = lost->status ? " ended with code " + std::to_string(WEXITSTATUS(*lost->status))
                                     : " died without an error message";
      if (starter_failed)
        how += "; " + plan_.prefix.front() + " ended with code " + std::to_string(WEXITSTATUS(starter.status));
      return {1, who + how};
    }
  }
  if (starter.output->has_error()) {
    const bool wrong_usage = starter_failed && WEXITSTATUS(starter.status) == 2;
    return {wrong_usage ? 2 : 1, *starter.output->take_error()};
  }
  if (!starter_failed) return {};
  if (watch_->all_done()) {
    errors_.write("tessera: warning: " + cause_text(starter, 0) + ", although all ranks have ended well\n");
    return {};
  }
  return {WEXITSTATUS(starter.status) == 2 ? 2 : 1, cause_text(starter, 0)};
}

Launcher::Verdict Launcher::verdict() {
  if (interrupted_by_ != 0)
    return {1, std::string("stopped by signal ") + std::to_string(interrupted_by_) + " (" +
                   signal_name(interrupted_by_) + ")"};
  if (by_prefix()) return verdict_under_prefix();
  if (first_failed_ < 0) return {};
  Rank& first = ranks_[static_cast<std::size_t>(first_failed_)];
  return {WIFEXITED(first.status) && WEXITSTATUS(first.status) == 2 ? 2 : 1, cause_text(first, first_failed_)};
}

/// Prints the held errors, then the first cause.
int Launcher::report() {
  std::fflush(stdout);
  const bool all_written = write_rest(kForOutput);
  auto [code, cause] = verdict();
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    RankOutput& output = *ranks_[i].output;
    const std::string others = output.take_others();
    if (code != 2) errors_.write(others);  // wrong usage is reported in one line
    const auto error = output.take_error();
    if (code == 0 && !output.log_problem().empty()) {
      code = 1;
      cause = output.log_problem();
    }
    if (!error || code == 2) continue;  // wrong usage: every rank reports the same error, and one line suffices
    if (cause.ends_with(*error)) continue;
    errors_.write("tessera: " + (by_prefix() ? "" : "rank " + std::to_string(i) + ": ") + *error + "\n");
  }
  if (code == 0 && (output_.error() != 0 || !all_written)) {
    code = 1;
    cause = base::system_error("can't write standard output", output_.error()).what();
  }
  if (code != 0) errors_.write("tessera: " + cause + "\n");
  write_rest(kForErrors);
  return code;
}

}  // namespace tessera::tools
