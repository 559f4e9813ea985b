#include "tools/launcher.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tools/process.h"
#include "tools/rank_output.h"
#include "tools/signals.h"

namespace tessera::tools {
namespace {

using Clock = std::chrono::steady_clock;

std::string random_hex(std::size_t bytes) {
  std::vector<unsigned char> random(bytes);
  if (::getrandom(random.data(), bytes, 0) != static_cast<ssize_t>(bytes))
    throw base::system_error("launcher: getrandom");
  std::string text;
  for (const unsigned char byte : random) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

struct Rank {
  pid_t pid = -1;
  bool running = false;
  bool told_to_stop = false;  ///< by us: its end is no cause
  int status = 0;             ///< of waitpid
  std::optional<RankOutput> output;
};

bool failed(const Rank& rank) { return !rank.running && rank.status != 0 && !rank.told_to_stop; }

class Launcher {
 public:
  explicit Launcher(const LaunchPlan& plan);
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  int run();

 private:
  void start(int child, const std::string& token);
  bool by_prefix() const { return !plan_.prefix.empty(); }
  std::vector<std::string> command() const;
  std::vector<std::pair<std::string, std::string>> variables(int rank, const std::string& token) const;
  std::vector<int> cores_of(int rank) const;
  void pump(std::chrono::milliseconds longest);
  void read_rest();
  void reap();
  void on_interrupt(int signal);
  void signal_running(int signal);
  void escalate();
  void sweep();
  bool any_running() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.running; });
  }
  int report();
  std::string cause_text(Rank& rank, int number);

  const LaunchPlan& plan_;
  SignalPipe signals_;
  const std::string run_id_;
  Guardian guardian_;
  std::vector<Rank> ranks_;
  int first_failed_ = -1;
  int interrupted_by_ = 0;
  Clock::time_point failed_at_{};
  int stage_ = 0;  ///< of the escalation: 0 none, 1 grace, 2 SIGTERM sent, 3 SIGKILL sent
};

std::string make_run_id() {
  return std::to_string(::getpid()) + "-" +
         std::to_string(std::chrono::system_clock::now().time_since_epoch().count()) + "-" + random_hex(4);
}

Launcher::Launcher(const LaunchPlan& plan)
    : plan_(plan),
      run_id_(make_run_id()),
      guardian_("TESSERA_RUN_ID=" + run_id_),
      ranks_(plan.prefix.empty() ? static_cast<std::size_t>(plan.ranks) : 1) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // what a dead rank leaves behind becomes our child, see sweep()
}

Launcher::~Launcher() {
  stage_ = 3;
  signal_running(SIGKILL);
  while (any_running()) {
    reap();
    if (any_running()) ::poll(nullptr, 0, 1);
  }
  sweep();
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
}

std::vector<int> Launcher::cores_of(int rank) const {
  if (!plan_.bind_to_cores || by_prefix()) return {};
  const std::vector<int> cores = allowed_cores();
  const auto share = static_cast<std::ptrdiff_t>(cores.size() / static_cast<std::size_t>(plan_.ranks));
  if (share == 0) return {cores[static_cast<std::size_t>(rank) % cores.size()]};
  return {cores.begin() + rank * share, cores.begin() + (rank + 1) * share};
}

std::vector<std::string> Launcher::command() const {
  std::vector<std::string> all;
  for (std::string part : plan_.prefix) {
    constexpr std::string_view kRanks = "{ranks}";
    if (const std::size_t at = part.find(kRanks); at != std::string::npos)
      part.replace(at, kRanks.size(), std::to_string(plan_.ranks));
    all.push_back(std::move(part));
  }
  all.insert(all.end(), plan_.command.begin(), plan_.command.end());
  return all;
}

/// Under a prefix the ranks learn their place from it, and nothing that is set here may say otherwise. The run id is
/// how the guardian knows them.
std::vector<std::pair<std::string, std::string>> Launcher::variables(int rank, const std::string& token) const {
  std::vector<std::pair<std::string, std::string>> all = plan_.environment;
  const auto place = [&](const std::string& text) { return by_prefix() ? "" : text; };
  all.insert(all.end(), {{"TESSERA_RANK", place(std::to_string(rank))},
                         {"TESSERA_WORLD_SIZE", place(std::to_string(plan_.ranks))},
                         {"TESSERA_LOCAL_RANK", place(std::to_string(rank))},
                         {"TESSERA_LOCAL_WORLD_SIZE", place(std::to_string(plan_.ranks))},
                         {"TESSERA_RUN_ID", run_id_},
                         {"TESSERA_LAUNCHER", place("tessera")},
                         {"TESSERA_TOKEN", token}});
  return all;
}

void Launcher::start(int child, const std::string& token) {
  Rank& rank = ranks_[static_cast<std::size_t>(child)];
  RankOutputPlan output{.rank = by_prefix() ? -1 : child,
                        .tag = plan_.tag && !by_prefix(),
                        .hold_errors = plan_.own_program,
                        .hold_first = by_prefix(),
                        .on_output = plan_.on_output};
  output.capture = plan_.tag || plan_.on_output || plan_.log_dir;  // else a terminal stays a terminal for the rank
  if (plan_.log_dir)
    output.log_file = *plan_.log_dir / (by_prefix() ? "ranks.log" : "rank-" + std::to_string(child) + ".log");
  rank.output.emplace(std::move(output));

  ProcessPlan process{.command = command(), .environment = base::environment_with(variables(child, token))};
  process.output = rank.output->child_output();
  process.errors = rank.output->child_errors();
  process.cores = cores_of(child);
  process.reads_input = child == 0;
  rank.pid = start_process(process);
  rank.running = true;
  rank.output->detach();
}

void Launcher::pump(std::chrono::milliseconds longest) {
  std::vector<pollfd> waiting = {{signals_.descriptor(), POLLIN, 0}};
  for (const Rank& rank : ranks_) {
    waiting.push_back({rank.output->output(), POLLIN, 0});
    waiting.push_back({rank.output->errors(), POLLIN, 0});
  }
  ::poll(waiting.data(), waiting.size(), static_cast<int>(longest.count()));
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (waiting[1 + 2 * i].revents != 0) ranks_[i].output->read_output();
    if (waiting[2 + 2 * i].revents != 0) ranks_[i].output->read_errors();
  }
  if (const int signal = signals_.take(); signal != 0) on_interrupt(signal);
}

/// Once all writers are gone; the deadline is for one that escaped.
void Launcher::read_rest() {
  const auto deadline = Clock::now() + std::chrono::seconds(1);
  for (Rank& rank : ranks_) {
    while (rank.output->output() >= 0 && rank.output->read_output() && Clock::now() < deadline) {
    }
    while (rank.output->errors() >= 0 && rank.output->read_errors() && Clock::now() < deadline) {
    }
  }
}

/// Collects ranks that ended. Of those seen in one go, one killed by a signal is the cause rather than one that ended
/// by itself, and what another rank's failure made of a rank is a cause only where nothing better comes.
void Launcher::reap() {
  const auto weight = [](const Rank& rank) {
    if (WIFSIGNALED(rank.status)) return 2;
    return WEXITSTATUS(rank.status) == kOtherRankFailed ? 0 : 1;
  };
  int best = -1;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    if (!rank.running || ::waitpid(rank.pid, &rank.status, WNOHANG) != rank.pid) continue;
    rank.running = false;
    if (!failed(rank)) continue;
    if (best < 0 || weight(rank) > weight(ranks_[static_cast<std::size_t>(best)])) best = static_cast<int>(i);
  }
  if (best < 0) return;
  const bool first = first_failed_ < 0;
  const bool better = !first && weight(ranks_[static_cast<std::size_t>(first_failed_)]) == 0 &&
                      weight(ranks_[static_cast<std::size_t>(best)]) > 0;
  if (first || better) first_failed_ = best;
  if (stage_ == 0) {
    stage_ = 1;
    failed_at_ = Clock::now();
  }
}

void Launcher::signal_running(int signal) {
  for (Rank& rank : ranks_) {
    if (!rank.running) continue;
    rank.told_to_stop = true;
    ::kill(rank.pid, signal);
    ::kill(rank.pid, SIGCONT);
  }
}

void Launcher::on_interrupt(int signal) {
  if (interrupted_by_ != 0) {  // asked twice: at once
    stage_ = 3;
    return signal_running(SIGKILL);
  }
  interrupted_by_ = signal;
  signal_running(signal);
  if (stage_ >= 2) return;
  stage_ = 1;
  failed_at_ = Clock::now() - plan_.grace + std::chrono::seconds(1);
}

void Launcher::escalate() {
  const auto since = Clock::now() - failed_at_;
  if (stage_ == 1 && since >= plan_.grace) {
    stage_ = 2;
    signal_running(SIGTERM);
  } else if (stage_ == 2 && since >= plan_.grace + plan_.kill_after) {
    stage_ = 3;
    signal_running(SIGKILL);
  }
}

/// Ends what the ranks started and left running. As a subreaper we are their parent now.
void Launcher::sweep() {
  const std::string path = "/proc/self/task/" + std::to_string(::getpid()) + "/children";
  for (int round = 0; round < 100; ++round) {
    std::ifstream children(path);
    bool left = false;
    for (pid_t pid = 0; children >> pid;) {
      if (pid == guardian_.pid()) continue;
      left = true;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    if (!left) return;
  }
}

std::string Launcher::cause_text(Rank& rank, int number) {
  const std::string who = by_prefix() ? plan_.prefix.front() : "rank " + std::to_string(number);
  if (WIFSIGNALED(rank.status)) {
    const int signal = WTERMSIG(rank.status);
    return who + " was killed by signal " + std::to_string(signal) + " (" + signal_name(signal) + ")";
  }
  const int code = WEXITSTATUS(rank.status);
  if (const auto error = rank.output->take_error()) return code == 2 || by_prefix() ? *error : who + ": " + *error;
  const std::string text = who + " ended with code " + std::to_string(code);
  return rank.output->last_error_line().empty() ? text : text + ": " + rank.output->last_error_line();
}

/// Prints the errors that were held, and the first cause after them.
int Launcher::report() {
  std::string cause;
  int code = 0;
  if (interrupted_by_ != 0) {
    cause =
        std::string("stopped by signal ") + std::to_string(interrupted_by_) + " (" + signal_name(interrupted_by_) + ")";
    code = 1;
  } else if (first_failed_ >= 0) {
    Rank& first = ranks_[static_cast<std::size_t>(first_failed_)];
    cause = cause_text(first, first_failed_);
    code = WIFEXITED(first.status) && WEXITSTATUS(first.status) == 2 ? 2 : 1;
  }
  std::fflush(stdout);
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const std::string others = ranks_[i].output->take_others();
    if (code != 2) std::fwrite(others.data(), 1, others.size(), stderr);  // wrong usage is one line
    const auto error = ranks_[i].output->take_error();
    if (!error || code == 2) continue;  // wrong usage: every rank says the same, and once is enough
    if (cause.ends_with(*error)) continue;
    std::fprintf(stderr, "tessera: rank %zu: %s\n", i, error->c_str());
  }
  if (code != 0) std::fprintf(stderr, "tessera: %s\n", cause.c_str());
  return code;
}

int Launcher::run() {
  const std::string token = random_hex(32);
  for (std::size_t child = 0; child < ranks_.size(); ++child) start(static_cast<int>(child), token);
  while (any_running()) {
    pump(std::chrono::milliseconds(stage_ == 0 ? 500 : 50));
    reap();
    if (stage_ != 0) escalate();
  }
  sweep();  // before the pipes are read to their end: what was left running holds them open
  read_rest();
  return report();
}

}  // namespace

int launch(const LaunchPlan& plan) {
  std::fflush(nullptr);
  return Launcher(plan).run();
}

}  // namespace tessera::tools
