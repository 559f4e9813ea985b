#include "tools/launch/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "tessera/base/deadline.h"
#include "tessera/base/device/module_loader.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/parse.h"
#include "tessera/comm/bootstrap/hmac.h"
#include "tessera/comm/launch.h"
#include "tools/cli/machine.h"
#include "tools/launch/host_connection.h"
#include "tools/launch/process.h"
#include "tools/launch/rank_output.h"
#include "tools/launch/rank_watch.h"
#include "tools/launch/ranks.h"
#include "tools/launch/run_outcome.h"

namespace tessera::tools {
namespace {

/// Not through a link that lies there. What failed is on the terminal, too, so a failure has no consequence.
void write_cause(const std::string& path, const std::string& cause) {
  const base::OpenedFile file = base::open_regular(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
  const std::string line = cause + "\n";
  if (file.fd) [[maybe_unused]]
    const ssize_t written = ::write(file.fd.get(), line.data(), line.size());
}

std::string make_run_id() {
  return std::to_string(::getpid()) + "-" +
         std::to_string(std::chrono::system_clock::now().time_since_epoch().count()) + "-" +
         comm::to_hex(comm::random_digest()).substr(0, 8);
}

constexpr std::chrono::milliseconds kForOutput{2000};
constexpr std::chrono::milliseconds kForErrors{1000};
constexpr std::chrono::milliseconds kForLostRank{200};
constexpr std::string_view kTimeout = "TESSERA_TIMEOUT";

/// The state of one run.
class Launcher {
 public:
  explicit Launcher(const LaunchSpec& plan)
      : plan_(plan),
        run_id_(plan.host ? plan.host->run_id : make_run_id()),
        guardian_("TESSERA_RUN_ID=" + run_id_),
        output_(STDOUT_FILENO),
        errors_(STDERR_FILENO),
        ranks_(plan.prefix.empty() ? static_cast<std::size_t>(plan.ranks) : 1) {
    if (by_prefix()) end_.watch = &watch_.emplace(plan.ranks, plan.own_program);
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // what a dead rank leaves becomes this process's child: kill_children()
  }

  ~Launcher() {
    stage_ = Stage::killing;
    signal_running(SIGKILL);
    while (any_running()) {
      reap();
      if (any_running()) ::poll(nullptr, 0, 1);
    }
    kill_children(guardian_.pid());
    ::prctl(PR_SET_CHILD_SUBREAPER, 0);
  }

  int run() {
    remove_leftovers();  // also of runs whose launcher died
    std::error_code ignored;
    if (!plan_.failure_file.empty()) std::filesystem::remove(plan_.failure_file, ignored);
    const std::string token = plan_.host ? plan_.host->token : comm::to_hex(comm::random_digest());
    const auto deadline = base::deadline_after(base::parse_duration(comm_setting(kTimeout), kTimeout));
    for (std::size_t child = 0; child < ranks_.size(); ++child) start(static_cast<int>(child), token);
    while (any_running()) {
      pump(std::chrono::milliseconds(stage_ == Stage::running ? 500 : 50));
      reap();
      require_start(deadline);
      if (stage_ != Stage::running) escalate();
    }
    await_lost_rank();
    kill_children(guardian_.pid());  // before the pipes are drained: processes left running hold them open
    remove_leftovers();              // and the directory that a prefix program used
    read_rest();
    return report();
  }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Stage { running, grace, terminating, killing };

  void start(int child, const std::string& token) {
    LaunchedProcess& rank = ranks_[static_cast<std::size_t>(child)];
    rank.output.emplace(plan_, child, output_, errors_);

    ProcessSpec process{.command = command(), .environment = base::environment_with(variables(child, token))};
    if (by_prefix())
      for (const std::string& name : comm::rank_variables())  // of a launcher around this tool
        std::erase_if(process.environment, [&](const std::string& entry) { return entry.starts_with(name + "="); });
    process.output = rank.output->child_output();
    process.errors = rank.output->child_errors();
    process.cores = cores_of(child);
    process.reads_input = child == 0 && !plan_.host;
    rank.pid = start_process(process);
    rank.running = true;
    rank.output->detach();
  }

  bool by_prefix() const { return !plan_.prefix.empty(); }

  std::vector<std::string> command() const {
    std::vector<std::string> all;
    for (std::string part : plan_.prefix) {
      constexpr std::string_view kRanks = "{ranks}";
      if (const std::size_t at = part.find(kRanks); at != std::string::npos)
        part.replace(at, kRanks.size(), std::to_string(plan_.ranks));
      all.push_back(std::move(part));
    }
    if (by_prefix()) all.push_back(base::module_directory() + "/rank-start");
    all.insert(all.end(), plan_.command.begin(), plan_.command.end());
    return all;
  }

  /// Under a prefix, the prefix program sets the ranks' numbers, so no variable set here may contradict it. The reaper
  /// finds the ranks by the run id.
  std::vector<std::pair<std::string, std::string>> variables(int rank, const std::string& token) const {
    std::vector<std::pair<std::string, std::string>> all = plan_.environment;
    all.insert(all.end(), {{"TESSERA_RUN_ID", run_id_},
                           {"TESSERA_LAUNCHER", by_prefix() ? "" : "tessera"},
                           {"TESSERA_TOKEN", token},
                           {std::string(launch_socket_variable()), watch_ ? watch_->name() : ""}});
    if (!by_prefix())
      all.insert(all.end(), {{"TESSERA_RANK", std::to_string(plan_.global_rank(rank))},
                             {"TESSERA_WORLD_SIZE", std::to_string(plan_.host ? plan_.host->world_size : plan_.ranks)},
                             {"TESSERA_LOCAL_RANK", std::to_string(rank)},
                             {"TESSERA_LOCAL_WORLD_SIZE", std::to_string(plan_.ranks)}});
    return all;
  }

  std::vector<int> cores_of(int rank) const {
    if (!plan_.bind_to_cores || by_prefix()) return {};
    const std::vector<int> cores = allowed_cores();
    const auto share = static_cast<std::ptrdiff_t>(cores.size() / static_cast<std::size_t>(plan_.ranks));
    if (share == 0) return {cores[static_cast<std::size_t>(rank) % cores.size()]};
    return {cores.begin() + rank * share, cores.begin() + (rank + 1) * share};
  }

  void pump(std::chrono::milliseconds longest) {
    std::vector<pollfd> waiting = {{signals_.descriptor(), POLLIN, 0},
                                   {watch_ ? watch_->descriptor() : -1, POLLIN, 0},
                                   {output_.waiting(), POLLOUT, 0},
                                   {errors_.waiting(), POLLOUT, 0},
                                   {plan_.host ? plan_.host->control->descriptor() : -1, POLLIN, 0}};
    const std::size_t others = waiting.size();
    for (const LaunchedProcess& rank : ranks_) {
      waiting.push_back({rank.output->output(), POLLIN, 0});
      waiting.push_back({rank.output->errors(), POLLIN, 0});
    }
    ::poll(waiting.data(), waiting.size(), static_cast<int>(longest.count()));
    output_.flush();
    errors_.flush();
    if (watch_ && any_running()) watch_->poll_events();  // before output that refers to it
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (waiting[others + 2 * i].revents != 0) ranks_[i].output->read_output();
      if (waiting[others + 1 + 2 * i].revents != 0) ranks_[i].output->read_errors();
    }
    if (by_prefix()) {
      const bool error = ranks_.front().output->has_error();
      end_.error_came_first |= error && !watch_->lost();
      if (error || watch_->lost()) begin_grace();
    }
    if (const int signal = signals_.next_signal(); signal != 0) on_interrupt(signal);
    on_control();
  }

  /// Reads until all writers have closed; the deadline is for a process that escaped. Readers of this process's output
  /// may take their time.
  void read_rest() {
    const auto all_read = [&] {
      return std::ranges::all_of(ranks_, [](const LaunchedProcess& rank) { return rank.output->ended(); });
    };
    auto deadline = Clock::now() + std::chrono::seconds(1);
    while (!all_read() && Clock::now() < deadline) {
      const bool blocked = output_.full() || errors_.full();
      pump(std::chrono::milliseconds(50));
      if (blocked && stage_ == Stage::running) deadline = Clock::now() + std::chrono::seconds(1);
    }
  }

  /// False: a reader has not consumed all output within `patience` after the run failed or was interrupted.
  bool write_rest(std::chrono::milliseconds patience) {
    auto deadline = Clock::now() + patience;
    while (!output_.empty() || !errors_.empty()) {
      const bool ends_well = stage_ == Stage::running;
      pump(std::chrono::milliseconds(50));
      if (ends_well) deadline = Clock::now() + patience;
      if (Clock::now() >= deadline) return false;
    }
    return true;
  }

  /// Reaps ranks that ended. Among those reaped together, a rank killed by a signal is the cause rather than one that
  /// exited; a rank that failed because of another rank is the cause only if there is no better one.
  void reap() {
    const auto weight = [](const LaunchedProcess& rank) {
      if (WIFSIGNALED(rank.status)) return 2;
      return WEXITSTATUS(rank.status) == kOtherRankFailed ? 0 : 1;
    };
    int best = -1;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      LaunchedProcess& rank = ranks_[i];
      if (!rank.running || ::waitpid(rank.pid, &rank.status, WNOHANG) != rank.pid) continue;
      rank.running = false;
      if (!rank.failed()) continue;
      if (best < 0 || weight(rank) > weight(ranks_[static_cast<std::size_t>(best)])) best = static_cast<int>(i);
    }
    if (best < 0) return;
    const bool first = end_.first_failed < 0;
    const bool better = !first && weight(ranks_[static_cast<std::size_t>(end_.first_failed)]) == 0 &&
                        weight(ranks_[static_cast<std::size_t>(best)]) > 0;
    if (first || better) end_.first_failed = best;
    if (plan_.host && (first || better))
      output_.write("c failed " + std::to_string(weight(ranks_[static_cast<std::size_t>(best)])) + " " +
                    std::to_string(plan_.global_rank(best)) + "\n");
    begin_grace();
  }

  /// Starts the grace period, once: the others can detect the failure themselves.
  void begin_grace() {
    if (stage_ != Stage::running) return;
    stage_ = Stage::grace;
    failed_at_ = Clock::now();
  }

  /// Ends a prefix program that waits for something else and starts no rank. Ranks that have started have a deadline of
  /// their own.
  void require_start(Clock::time_point deadline) {
    if (!watch_ || stage_ != Stage::running || Clock::now() < deadline || watch_->any_started()) return;
    end_.never_started = plan_.prefix.front() + " has started none of the " + std::to_string(plan_.ranks) +
                         " ranks within " + comm_setting(kTimeout) + " (" + std::string(kTimeout) + ")";
    begin_grace();
    failed_at_ -= plan_.grace;  // there is no rank to wait for
  }

  void on_interrupt(int signal) {
    if (end_.interrupted_by != 0) {  // second signal: kills at once
      stage_ = Stage::killing;
      return signal_running(SIGKILL);
    }
    end_.interrupted_by = signal;
    signal_running(signal);
    if (stage_ >= Stage::terminating) return;
    stage_ = Stage::grace;
    failed_at_ = Clock::now() - plan_.grace + std::chrono::seconds(1);
  }

  /// What the launcher of ranks on several hosts says.
  void on_control() {
    if (!plan_.host) return;
    for (int said = 0; (said = plan_.host->control->next()) != 0;)
      said == HostControl::kFail ? begin_grace() : on_interrupt(said);
  }

  void signal_running(int signal) {
    for (LaunchedProcess& rank : ranks_) {
      if (!rank.running) continue;
      rank.stopped_by_launcher = true;
      ::kill(rank.pid, signal);
      ::kill(rank.pid, SIGCONT);
    }
  }

  /// They can detect and report nothing.
  bool rest_is_stopped() const {
    if (watch_) return watch_->rest_is_stopped();
    return std::ranges::none_of(ranks_,
                                [](const LaunchedProcess& rank) { return rank.running && !is_stopped(rank.pid); });
  }

  void escalate() {
    const auto since = Clock::now() - failed_at_;
    if (stage_ == Stage::grace && (since >= plan_.grace || rest_is_stopped())) {
      stage_ = Stage::terminating;
      signal_running(SIGTERM);
    } else if (stage_ == Stage::terminating && since >= plan_.grace + plan_.kill_after) {
      stage_ = Stage::killing;
      signal_running(SIGKILL);
    }
  }

  /// A starter that aborts does not wait for its ranks: the one whose death made the others abort may still be ending,
  /// as it takes time to free its memory. Must precede kill_children(), which ends the ranks that are well.
  void await_lost_rank() {
    if (!watch_) return;
    const auto deadline = Clock::now() + kForLostRank;
    while (true) {
      watch_->poll_events();
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      if (watch_->lost() || !ranks_.front().failed() || ranks_.front().output->has_error() || left.count() <= 0) return;
      pollfd event{watch_->descriptor(), POLLIN, 0};
      ::poll(&event, 1, static_cast<int>(left.count()));
    }
  }

  bool any_running() const { return std::ranges::any_of(ranks_, &LaunchedProcess::running); }

  /// Prints the held errors, then the first cause.
  int report() {
    if (plan_.progress != nullptr) plan_.progress->hide();
    std::fflush(stdout);
    const bool all_written = write_rest(kForOutput);
    auto [code, cause, warning] = verdict_of(end_);
    errors_.write(warning);
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      RankOutput& output = *ranks_[i].output;
      const std::string others = output.release_others();
      if (code != 2) errors_.write(others);  // wrong usage is reported in one line
      const auto error = output.release_error();
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
    if (code == 1 && !plan_.failure_note.empty()) errors_.write("tessera: note: " + plan_.failure_note + "\n");
    if (code == 1 && !plan_.failure_file.empty()) write_cause(plan_.failure_file, cause);
    if (code != 0) errors_.write("tessera: " + cause + "\n");
    write_rest(kForErrors);
    return code;
  }

  const LaunchSpec& plan_;
  SignalPipe signals_;
  const std::string run_id_;
  OrphanReaper guardian_;
  Outlet output_;
  Outlet errors_;
  std::optional<RankWatch> watch_;  ///< under a prefix
  std::vector<LaunchedProcess> ranks_;
  RunEnd end_{.plan = plan_, .ranks = ranks_};
  Clock::time_point failed_at_{};
  Stage stage_ = Stage::running;
};

}  // namespace

int launch(const LaunchSpec& plan) {
  std::fflush(nullptr);
  return Launcher(plan).run();
}

}  // namespace tessera::tools
