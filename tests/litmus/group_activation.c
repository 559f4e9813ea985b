// A thread submits an operation while another one polls: either it gets the lock and polls itself, or the thread that
// has the lock sees the group in its last poll before it sleeps, or it sees that this thread sleeps and rings.
//
// mirrors src/comm/core/polled_group.cpp: engine_.active_groups().activate(*this);
// mirrors src/comm/core/polled_group.cpp: engine_.wake_waiters();  // the thread that holds the lock may have polled before the submission
// mirrors src/comm/core/progress.h: } while (!activated_.compare_exchange_weak(first, &group));
// mirrors src/comm/core/progress.cpp: if (activated_.load() == nullptr) return;
// mirrors src/comm/core/progress.cpp: const std::unique_lock lock(mutex_, std::try_to_lock);
//
// Controls: 1 the group is pushed with release order; 2 the list is loaded relaxed; 3 nothing rings.
#include "litmus.h"

static atomic_uint rings, waiters;
static atomic_int lock, activated;
static int operation;  // written before the activation
static int begun;      // guarded by the lock
static Sleep poller = SLEEP_INIT;

static bool try_lock(void) { return exchange(&lock, 1, ACQUIRE) == 0; }
static void unlock(void) { store(&lock, 0, RELEASE); }

/// Under the lock.
static bool poll(void) {
  if (load(&activated, ORDER(2, SEQ_CST, RELAXED)) == 0) return false;
  if (exchange(&activated, 0, ORDER(2, SEQ_CST, ACQUIRE)) == 0) return false;
  begun = operation;
  return true;
}

static void* submit(void* none) {
  operation = 1;
  int none_before = 0;
  atomic_compare_exchange_strong_explicit(&activated, &none_before, 1, ORDER(1, SEQ_CST, RELEASE), RELAXED);
  if (try_lock()) {
    poll();
    unlock();
  }
  if (CONTROL == 3 || load(&waiters, SEQ_CST) == 0) return none;
  add(&rings, 1, SEQ_CST);
  futex_wake(&poller);
  return none;
}

static void* wait_for_event(void* none) {
  add(&waiters, 1, SEQ_CST);
  const unsigned seen = load(&rings, SEQ_CST);
  while (exchange(&lock, 1, ACQUIRE) != 0) {
  }
  const bool moved = poll();
  unlock();
  if (!moved) futex_wait(&poller, &rings, seen);
  return none;
}

int main(void) {
  RUN(submit, wait_for_event);
  assert(begun == 1 || !poller.asleep);
  return 0;
}
