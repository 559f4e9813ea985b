#include "backends/mpi/library.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/base/process.h"
#include "tessera/base/thread.h"
#include "tessera/comm/core/progress.h"

namespace tessera::comm::mpi {
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
