#include "backends/mpi/library.h"

#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/comm/launch.h"
#include "tessera/comm/progress.h"

namespace tessera::mpi {
namespace {

#if defined(OPEN_MPI)
constexpr const char* kName = "Open MPI";
constexpr const char* kOther = "MPICH";
#define TESSERA_SRUN_MPI "pmix"
#elif defined(MPICH_VERSION)
constexpr const char* kName = "MPICH";
constexpr const char* kOther = "Open MPI";
#define TESSERA_SRUN_MPI "pmi2"
#else
#error "this MPI is neither Open MPI nor MPICH"
#endif

struct Process {
  std::mutex mutex;
  bool ours = false;  ///< we have started MPI, so we end it
  int open = 0;       ///< communicators
  bool doubtful = false;
  std::string failure;  ///< the first
};

Process& process() {
  static Process the;
  return the;
}

void check(int code, const char* what) {
  if (code != MPI_SUCCESS) throw BackendError("mpi: " + std::string(what) + ": " + text_of(code));
}

bool flag_of(int (*ask)(int*)) {
  int flag = 0;
  ask(&flag);
  return flag != 0;
}

/// The MPI whose launcher has started this process; "" if none.
std::string launchers_mpi() {
  if (read_foreign_env("OMPI_COMM_WORLD_SIZE") || read_foreign_env("PMIX_RANK")) return "Open MPI";
  if (read_foreign_env("PMI_SIZE") || read_foreign_env("PMI_RANK")) return "MPICH";
  return "";
}

std::string loaded_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string all(text, static_cast<std::size_t>(length));
  return all.substr(0, all.find_first_of(",\n"));
}

/// Ending MPI waits for all ranks. After a failure some may be stuck: then the launcher has to end them.
void end_at_exit() {
  constexpr auto kPatience = std::chrono::seconds(3);
  Process& the = process();
  if (!the.ours || the.open != 0 || !the.failure.empty() || flag_of(MPI_Finalized)) return;
  MPI_Request request = MPI_REQUEST_NULL;
  int all_here = 0;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &request) != MPI_SUCCESS) return;
  for (const auto until = Clock::now() + kPatience; all_here == 0; ::usleep(100)) {
    if (MPI_Test(&request, &all_here, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
    if (all_here == 0 && the.doubtful && Clock::now() >= until) return;
  }
  MPI_Finalize();
}

const char* level_name(int level) {
  if (level == MPI_THREAD_SINGLE) return "MPI_THREAD_SINGLE";
  if (level == MPI_THREAD_FUNNELED) return "MPI_THREAD_FUNNELED";
  return "MPI_THREAD_SERIALIZED";
}

/// With the process's mutex held.
void start_mpi() {
  int level = MPI_THREAD_SINGLE;
  if (flag_of(MPI_Finalized)) throw InvalidUsage("mpi: MPI has been finalized in this process, and starts only once");
  if (!flag_of(MPI_Initialized)) {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level), "MPI_Init_thread");
    process().ours = true;
    std::atexit(end_at_exit);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (level < MPI_THREAD_SERIALIZED)
      throw BackendError("mpi: " + loaded_library() + " offers " + level_name(level) +
                         ", needed is MPI_THREAD_SERIALIZED");
    return;
  }
  MPI_Query_thread(&level);
  // The program calls MPI when it likes, and so does our progress thread.
  if (!process().ours && level < MPI_THREAD_MULTIPLE)
    throw InvalidUsage(std::string("mpi: the program started MPI with ") + level_name(level) +
                       ": call MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave it to this library");
}

/// "" or why MPI can't connect these ranks.
std::string problem_with(const Bootstrap& bootstrap) {
  const std::string launcher = resolve_launch().launcher;
  const std::string ranks = std::to_string(bootstrap.size());
  if (!flag_of(MPI_Initialized) && launchers_mpi().empty())
    return "mpi: these " + ranks + " ranks were started by '" + launcher + "', of which " + kName +
           " knows nothing: start them with mpirun -n " + ranks +
           ", or with srun --mpi=" + (launchers_mpi() == "MPICH" ? "pmi2" : "pmix (Open MPI) or --mpi=pmi2 (MPICH)");
  start_mpi();
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != bootstrap.size())
    return "mpi: the world of " + loaded_library() + " has " + std::to_string(size) + " ranks, this one has " + ranks +
           " (started by '" + launcher + "'): is that launcher of another MPI?";
  return "";
}

/// With the process's mutex held.
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
         " can't make another communicator; too many are in use, here or in the program: free some (" + text_of(code) +
         ")";
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
    return "made for " + std::string(kName) + ", but the program has " + loaded;
  if (launchers_mpi() == kOther)
    return std::string("made for ") + kName + ", but this process was started by a launcher of " + kOther;
  return "";
}

Ranks open_ranks(Bootstrap& bootstrap, std::chrono::milliseconds timeout) {
  if (bootstrap.size() == 1) return {};
  if (bootstrap.in_process())
    throw InvalidUsage("mpi: its ranks are processes, these " + std::to_string(bootstrap.size()) +
                       " are threads of one");
  Process& the = process();
  const std::lock_guard lock(the.mutex);
  if (!the.failure.empty())
    throw BackendError("mpi: no new communicator in this process, since an earlier one failed: " + the.failure);
  // Whoever can't go on says so to all, so that nobody waits for it.
  std::string word;
  try {
    word = problem_with(bootstrap);
  } catch (const Error& error) {
    word = error.what();
  }
  Ranks ranks;
  int own = -1;
  if (word.empty()) MPI_Comm_rank(MPI_COMM_WORLD, &own);
  for (const std::string& said : bootstrap.exchange(word.empty() ? "rank " + std::to_string(own) : word)) {
    if (!said.starts_with("rank ")) throw InvalidUsage(said);
    ranks.mpi_rank.push_back(std::atoi(said.c_str() + 5));
  }
  ranks.comm = duplicate_world(timeout);
  int* largest = nullptr;
  int found = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &found);
  ranks.largest_tag = found != 0 ? *largest : 32767;  // the least that the standard allows
  ++the.open;
  return ranks;
}

void close_ranks(Ranks& ranks, bool doubtful, const std::string& failed) {
  Process& the = process();
  const std::lock_guard lock(the.mutex);
  the.doubtful |= doubtful;
  if (!failed.empty() && the.failure.empty()) the.failure = failed;
  if (!failed.empty() || ranks.comm == MPI_COMM_NULL) return;
  // What is freed is used again, with what still lies in it: only where all messages have met their receives.
  if (!doubtful && !flag_of(MPI_Finalized)) MPI_Comm_free(&ranks.comm);
  ranks.comm = MPI_COMM_NULL;
  --the.open;
}

}  // namespace tessera::mpi
