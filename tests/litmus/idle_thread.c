// The progress thread sleeps while no operation is in flight, or while another thread waits and thus polls. One thread
// begins an operation and leaves it in flight; another one returns from wait().
//
// mirrors src/comm/core/progress.h: outstanding_.fetch_add(1);
// mirrors src/comm/core/progress.cpp: if (waiters_.load() != 0 || bell_.idle.load() == 0) return;
// mirrors src/comm/core/progress.cpp: waiters_.fetch_sub(1);
// mirrors src/comm/core/progress.cpp: if (outstanding_.load() > 0) wake_progress_thread();
// mirrors src/comm/core/progress.cpp: (waiters_.load() != 0 || outstanding_.load() <= 0); };
// mirrors src/comm/core/progress.cpp: bell_.idle.store(sleeps ? kSleeps : kDozes);
// mirrors src/comm/core/progress.cpp: const std::uint32_t seen = bell_.attention.load();
//
// Controls: 1 the operation is counted relaxed; 2 `idle` is stored with release order; 3 `idle` is loaded with acquire
// order; 4 the operations are loaded with acquire order; 5 `waiters_` is decremented relaxed; 6 `attention` is read
// after the check.
#include "litmus.h"

static atomic_uint attention, idle;
static atomic_int outstanding;
static atomic_int waiters = 1;
static Sleep progress_thread = SLEEP_INIT;

static void wake_progress_thread(void) {
  if (load(&waiters, SEQ_CST) != 0 || load(&idle, ORDER(3, SEQ_CST, ACQUIRE)) == 0) return;
  add(&attention, 1, SEQ_CST);
  futex_wake(&progress_thread);
}

static void* issue(void* none) {
  add(&outstanding, 1, ORDER(1, SEQ_CST, RELAXED));
  wake_progress_thread();
  return none;
}

static void* leave_wait(void* none) {
  sub(&waiters, 1, ORDER(5, SEQ_CST, RELAXED));
  if (load(&outstanding, SEQ_CST) > 0) wake_progress_thread();
  return none;
}

static void* run(void* none) {
  store(&idle, 2, ORDER(2, SEQ_CST, RELEASE));
  unsigned seen = load(&attention, SEQ_CST);
  const bool sleeps = load(&waiters, SEQ_CST) != 0 || load(&outstanding, ORDER(4, SEQ_CST, ACQUIRE)) <= 0;
  if (CONTROL == 6) seen = load(&attention, SEQ_CST);
  if (sleeps) futex_wait(&progress_thread, &attention, seen);
  return none;
}

int main(void) {
  RUN(issue, leave_wait, run);
  assert(!progress_thread.asleep);
  return 0;
}
