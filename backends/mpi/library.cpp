#include "backends/mpi/library.h"

#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/base/process.h"
#include "tessera/base/thread.h"
#include "tessera/comm/core/progress.h"
#include "tessera/comm/launch.h"

namespace tessera::comm::mpi {
namespace {

#if defined(OPEN_MPI)
constexpr const char* kName = "Open MPI";
constexpr const char* kOther = "MPICH";
#elif defined(MPICH_VERSION)
constexpr const char* kName = "MPICH";
constexpr const char* kOther = "Open MPI";
#else
#error "this MPI is neither Open MPI nor MPICH"
#endif

struct Process {
  std::mutex mutex;
  bool ours = false;                        ///< this library has started MPI, so it finalizes it
  std::vector<TransportEvents*> open = {};  ///< worlds whose communicators are open
  bool doubtful = false;
  std::string failure;  ///< the first
  std::chrono::milliseconds timeout{0};
  std::shared_ptr<Logger> logger;
};

Process& process() {
  static Process the;
  return the;
}

bool flag_of(int (*query)(int*)) {
  int flag = 0;
  query(&flag);
  return flag != 0;
}

/// The MPI whose launcher has started this process; "" if none. PMIX_RANK comes last: a step of Slurm passes it on to
/// the ranks of an mpirun inside it.
std::string launchers_mpi() {
  if (read_foreign_env("OMPI_COMM_WORLD_SIZE")) return "Open MPI";
  for (const char* const of_mpich : {"MV2_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK"})
    if (read_foreign_env(of_mpich)) return "MPICH";
  return read_foreign_env("PMIX_RANK") ? "Open MPI" : "";
}

std::string loaded_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string all(text, static_cast<std::size_t>(length));
  return all.substr(0, all.find_first_of(",\n"));
}

/// Communicators of static objects, and those that were never destroyed, are still open when the program ends.
void leave_worlds() {
  std::vector<TransportEvents*> open;
  {
    const std::lock_guard lock(process().mutex);
    open = process().open;
  }
  for (TransportEvents* const world : open) world->process_exits();
}

ExitPlan exit_plan(int code) {
  if (code == 0) leave_worlds();
  const Process& the = process();
  return {.wanted = the.ours && the.open.empty() && the.failure.empty() && !flag_of(MPI_Finalized),
          .doubtful = the.doubtful,
          .patience = the.timeout,
          .logger = the.logger};
}

const char* level_name(int level) {
  if (level == MPI_THREAD_SINGLE) return "MPI_THREAD_SINGLE";
  if (level == MPI_THREAD_FUNNELED) return "MPI_THREAD_FUNNELED";
  return "MPI_THREAD_SERIALIZED";
}

/// Requires the process's mutex. Leaves some of the time for the ranks to report which of them did not answer.
void start_mpi() {
  int level = MPI_THREAD_SINGLE;
  if (!flag_of(MPI_Initialized)) {
    level = start_library(process().timeout * 3 / 4, exit_plan);
    process().ours = true;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (level < MPI_THREAD_SERIALIZED)
      throw BackendError("mpi: " + loaded_library() + " provides " + level_name(level) +
                         ", needs MPI_THREAD_SERIALIZED");
    return;
  }
  MPI_Query_thread(&level);
  // The program calls MPI at any time, and so does the progress thread.
  if (!process().ours && level < MPI_THREAD_MULTIPLE)
    throw InvalidUsage(std::string("mpi: the program started MPI with ") + level_name(level) +
                       "; call MPI_Init_thread with MPI_THREAD_MULTIPLE, or let this library initialize MPI");
}

/// Returns "" or why this process can't start MPI. Checked first, so that no rank waits inside MPI for one that can't.
std::string problem_before_start(const Bootstrap& bootstrap) {
  if (!process().failure.empty())
    return "mpi: no new communicator in this process, since an earlier one failed: " + process().failure;
  if (flag_of(MPI_Finalized)) return "mpi: MPI has been finalized in this process and can't be initialized again";
  if (flag_of(MPI_Initialized) || !launchers_mpi().empty()) return "";
  const std::string ranks = std::to_string(bootstrap.size());
  return "mpi: these " + ranks + " ranks were started by '" + resolve_launch().launcher +
         "', which is not a launcher of " + kName + "; start them with mpirun -n " + ranks +
         ", or with srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)";
}

/// Returns "" or why the started MPI doesn't connect these ranks.
std::string problem_after_start(const Bootstrap& bootstrap) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size == bootstrap.size()) return "";
  return "mpi: the world of " + loaded_library() + " has " + std::to_string(size) + " ranks, this one has " +
         std::to_string(bootstrap.size()) + " (started by '" + resolve_launch().launcher +
         "'); use the launcher of the same MPI";
}

void require_none(const std::vector<std::string>& problems) {
  for (const std::string& problem : problems)
    if (!problem.empty()) throw InvalidUsage(problem);
}

constexpr std::string_view kPlace = "rank ";

/// Starts MPI. Returns this process's rank in MPI, or what failed, so that no rank waits for one that can't continue.
std::string place_in_mpi(const Bootstrap& bootstrap) {
  try {
    start_mpi();
    require_none({problem_after_start(bootstrap)});
  } catch (const Error& error) {
    return std::string(error.kind()) + ": " + error.what();
  }
  int own = -1;
  MPI_Comm_rank(MPI_COMM_WORLD, &own);
  return std::string(kPlace) + std::to_string(own);
}

[[noreturn]] void rethrow(const std::string& said) {
  const std::size_t colon = said.find(": ");
  const std::string kind = said.substr(0, colon);
  const std::string text = said.substr(std::min(said.size(), colon + 2));
  if (kind == "Timeout") throw Timeout(text);
  if (kind == "BackendError") throw BackendError(text);
  throw InvalidUsage(text);
}

/// Requires the process's mutex.
MPI_Comm duplicate_world(std::chrono::milliseconds timeout) {
  const auto until = Clock::now() + timeout;
  const ErrorsReturned here;
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  int code = MPI_Comm_idup(MPI_COMM_WORLD, &comm, &request);
  for (int done = 0; code == MPI_SUCCESS && done == 0; ::sched_yield()) {
    code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (code == MPI_SUCCESS && done == 0 && Clock::now() >= until)
      throw Timeout("mpi: MPI_Comm_idup did not finish within the timeout");
  }
  if (code != MPI_SUCCESS) {
    const std::string why = no_more_communicators(code);
    if (!kSurvivesExhaustion) process().failure = why;
    throw BackendError("mpi: " + why);
  }
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  return comm;
}

}  // namespace

std::string text_of(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  std::string line;
  for (const char c : std::string_view(text, static_cast<std::size_t>(length)))
    line += c != '\n' ? std::string(1, c) : line.ends_with(':') ? " " : "; ";
  return line;
}

std::string no_more_communicators(int code) {
  return std::string(kName) +
         " can't create another communicator: this library or the program has too many in use; free some (" +
         text_of(code) + ")";
}

ErrorsReturned::ErrorsReturned() noexcept {
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &of_world_);
  MPI_Comm_get_errhandler(MPI_COMM_SELF, &of_self_);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
}

ErrorsReturned::~ErrorsReturned() {
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, of_world_);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, of_self_);
  MPI_Errhandler_free(&of_world_);
  MPI_Errhandler_free(&of_self_);
}

std::string wrong_library() {
  const std::string loaded = loaded_library();
  if (loaded.find(kName) == std::string::npos)
    return "built for " + std::string(kName) + ", but the program has " + loaded;
  if (launchers_mpi() == kOther)
    return std::string("built for ") + kName + ", but this process was started by a launcher of " + kOther;
  return "";
}

void log_end_to(std::shared_ptr<Logger> logger) {
  Process& the = process();
  const std::lock_guard lock(the.mutex);
  the.logger = std::move(logger);
}

Ranks open_ranks(Bootstrap& bootstrap, TransportEvents& world, std::chrono::milliseconds timeout) {
  if (bootstrap.size() == 1) return {};
  if (bootstrap.in_process())
    throw InvalidUsage("mpi: its ranks must be processes, but these " + std::to_string(bootstrap.size()) +
                       " are threads of one; use another backend");
  Process& the = process();
  const std::lock_guard lock(the.mutex);
  if (!the.failure.empty())
    throw BackendError("mpi: no new communicator in this process, since an earlier one failed: " + the.failure);
  the.timeout = timeout;
  require_none(bootstrap.all_gather(problem_before_start(bootstrap)));
  Ranks ranks;
  for (const std::string& said : bootstrap.all_gather(place_in_mpi(bootstrap))) {
    if (!said.starts_with(kPlace)) rethrow(said);
    ranks.mpi_rank.push_back(std::atoi(said.c_str() + kPlace.size()));
  }
  ranks.comm = duplicate_world(timeout);
  int* largest = nullptr;
  int found = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &found);
  ranks.largest_tag = found != 0 ? *largest : 32767;  // the minimum that the standard guarantees
  ranks.world = &world;
  the.open.push_back(&world);
  return ranks;
}

void close_ranks(Ranks& ranks, bool doubtful, const std::string& failed) {
  Process& the = process();
  const std::lock_guard lock(the.mutex);
  the.doubtful |= doubtful;
  if (!failed.empty() && the.failure.empty()) the.failure = failed;
  if (!failed.empty() || ranks.comm == MPI_COMM_NULL) return;
  // MPI reuses a freed communicator with any messages left in it: it is freed only if all messages were received.
  if (!doubtful && !flag_of(MPI_Finalized)) MPI_Comm_free(&ranks.comm);
  ranks.comm = MPI_COMM_NULL;
  std::erase(the.open, ranks.world);
}

namespace {

using std::chrono::milliseconds;
constexpr milliseconds kDoubtful{1000};    // for ranks that may be stuck: then the launcher has to end them
constexpr milliseconds kMaxEnding{30000};  // all ranks have reached their end by then

/// Runs `work` in a thread of its own. False: it has not returned within `patience`, and the thread is left running.
bool ends_within(milliseconds patience, std::function<void()> work) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto shared = std::make_shared<Shared>();
  std::thread worker = base::start_thread([shared, work = std::move(work)] {
    work();
    const std::lock_guard lock(shared->mutex);
    shared->done = true;
    shared->changed.notify_all();
  });
  bool done = false;
  {
    std::unique_lock lock(shared->mutex);
    done = shared->changed.wait_for(lock, patience, [&] { return shared->done; });
  }
  if (done)
    worker.join();
  else
    worker.detach();
  return done;
}

struct AtExit {
  std::function<ExitPlan(int)> make_plan;
  const std::uint32_t made_in = base::count_forks();
};

AtExit& at_exit() {
  static AtExit the;
  return the;
}

/// A thread of this process is inside MPI, so no memory that it may access is released.
void leave_at_once(int code, void* /*unused*/) {
  if (at_exit().made_in != base::forks_so_far()) return;
  std::fflush(nullptr);
  ::_exit(code);
}

void say(const ExitPlan& plan, const std::string& text) {
  if (plan.logger != nullptr) plan.logger->write(LogLevel::warn, text);
}

/// Finalizing MPI waits for all ranks without a deadline, so it starts only when all of them have arrived.
bool all_ranks_are_here(const ExitPlan& plan) {
  const milliseconds patience = plan.doubtful ? std::min(kDoubtful, plan.patience) : plan.patience;
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &request) != MPI_SUCCESS) return false;
  for (const auto until = Clock::now() + patience;; ::usleep(100)) {
    int here = 0;
    if (MPI_Test(&request, &here, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    if (here != 0) return true;
    if (Clock::now() < until) continue;
    if (!plan.doubtful)
      say(plan, "mpi: not all ranks finished within " + format_duration(patience) +
                    " of this one; it exits without MPI_Finalize");
    return false;
  }
}

void end_library(int code, void* /*unused*/) {
  if (at_exit().made_in != base::forks_so_far()) return;  // MPI is the parent's
  const ExitPlan plan = at_exit().make_plan(code);
  if (!plan.wanted || !all_ranks_are_here(plan)) return;
  const milliseconds patience = std::min(plan.patience, kMaxEnding);
  if (ends_within(patience, [] { MPI_Finalize(); })) return;
  say(plan, "mpi: MPI_Finalize waits for other ranks and has not returned within " + format_duration(patience) +
                ", although all have finished; this one exits without it");
  leave_at_once(code, nullptr);
}

}  // namespace

int start_library(milliseconds patience, std::function<ExitPlan(int)> plan) {
  struct Result {
    int code = MPI_SUCCESS;
    int level = MPI_THREAD_SINGLE;
  };
  at_exit().make_plan = std::move(plan);
  const auto result = std::make_shared<Result>();
  const bool done = ends_within(
      patience, [result] { result->code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &result->level); });
  if (!done) {
    ::on_exit(leave_at_once, nullptr);
    throw Timeout("mpi: MPI_Init_thread waits for other ranks and has not returned within " +
                  format_duration(patience));
  }
  if (result->code != MPI_SUCCESS) throw BackendError("mpi: MPI_Init_thread: " + text_of(result->code));
  ::on_exit(end_library, nullptr);
  return result->level;
}

}  // namespace tessera::comm::mpi
