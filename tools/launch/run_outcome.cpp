#include "tools/launch/run_outcome.h"

#include <sys/wait.h>

#include "tools/launch/process.h"

namespace tessera::tools {
namespace {

std::string killed_by(int signal) {
  return "was killed by signal " + std::to_string(signal) + " (" + signal_name(signal) + ")";
}

std::string cause_text(const LaunchSpec& plan, LaunchedProcess& rank, int number) {
  const std::string name =
      !plan.prefix.empty() ? plan.prefix.front() : "rank " + std::to_string(plan.global_rank(number));
  if (WIFSIGNALED(rank.status)) return name + " " + killed_by(WTERMSIG(rank.status));
  const int code = WEXITSTATUS(rank.status);
  if (const auto error = rank.output->release_error())
    return code == 2 || !plan.prefix.empty() ? *error : name + ": " + *error;
  const std::string text = name + " ended with code " + std::to_string(code);
  return rank.output->last_error_line().empty() ? text : text + ": " + rank.output->last_error_line();
}

/// The program that starts the ranks knows little of them, so the ranks' reports and output have priority.
Verdict verdict_under_prefix(const RunEnd& end) {
  LaunchedProcess& starter = end.ranks.front();
  const bool starter_failed = end.first_failed >= 0;
  if (!end.never_started.empty()) {
    const std::string& last = starter.output->last_error_line();
    return {1, end.never_started + (last.empty() ? "" : ": " + last)};
  }
  if (!starter.running && starter.status == 0 && !starter.stopped_by_launcher && !starter.output->has_error())
    return {};
  if (starter_failed && WIFSIGNALED(starter.status)) return {1, cause_text(end.plan, starter, 0)};
  auto lost = end.watch->lost();
  if (lost)
    if (const auto named = end.watch->named_in(starter.output->others())) lost = named;
  // Whether this process sees a foreign program's exit code before its starter reaps it is chance; the starter's own
  // message is not.
  const bool killed = lost && lost->status && WIFSIGNALED(*lost->status);
  const bool starter_explains =
      !end.plan.own_program && !killed && starter_failed && !starter.output->last_error_line().empty();
  const bool error_came_first = end.error_came_first || (end.watch->failed_first() && starter.output->has_error());
  if (lost && !error_came_first && !starter_explains) {
    const std::string name = "rank " + std::to_string(lost->rank);
    if (killed) return {1, name + " " + killed_by(WTERMSIG(*lost->status))};
    if (!lost->status || !starter.output->has_error()) {
      std::string how = lost->status ? " ended with code " + std::to_string(WEXITSTATUS(*lost->status))
                                     : " died without an error message";
      if (starter_failed)
        how += "; " + end.plan.prefix.front() + " ended with code " + std::to_string(WEXITSTATUS(starter.status));
      return {1, name + how};
    }
  }
  if (starter.output->has_error()) {
    const bool wrong_usage = starter_failed && WEXITSTATUS(starter.status) == 2;
    return {wrong_usage ? 2 : 1, *starter.output->release_error()};
  }
  if (!starter_failed) return {};
  if (end.watch->all_done()) {
    const std::string what = cause_text(end.plan, starter, 0);
    return {.warning = "tessera: warning: " + what + ", although all ranks have ended well\n"};
  }
  return {WEXITSTATUS(starter.status) == 2 ? 2 : 1, cause_text(end.plan, starter, 0)};
}

}  // namespace

Verdict verdict_of(const RunEnd& end) {
  if (end.interrupted_by != 0)
    return {1, std::string("stopped by signal ") + std::to_string(end.interrupted_by) + " (" +
                   signal_name(end.interrupted_by) + ")"};
  if (!end.plan.prefix.empty()) return verdict_under_prefix(end);
  if (end.first_failed < 0) return {};
  LaunchedProcess& first = end.ranks[static_cast<std::size_t>(end.first_failed)];
  return {WIFEXITED(first.status) && WEXITSTATUS(first.status) == 2 ? 2 : 1,
          cause_text(end.plan, first, end.first_failed)};
}

}  // namespace tessera::tools
