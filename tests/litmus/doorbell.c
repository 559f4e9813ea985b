// A rank publishes a flag and rings; a peer publishes that it sleeps, polls once more and sleeps.
//
// mirrors src/comm/core/progress.cpp: if (bell.waiters.load() == 0) return;
// mirrors src/comm/core/progress.cpp: bell.rings.fetch_add(1);
// mirrors src/comm/core/progress.cpp: bell_.waiters.fetch_add(1);
// mirrors src/comm/core/progress.cpp: const std::uint32_t seen = bell_.rings.load();
// mirrors src/comm/core/progress.cpp: futex_wait(bell_.rings, seen, time);
//
// Controls: 1 the flag is stored with release order; 2 `waiters` is loaded with acquire order; 3 it is incremented with
// acquire and release order; 4 the flag is loaded with acquire order; 5 `rings` is read after the poll.
#include "litmus.h"

static atomic_uint rings, waiters;
static atomic_int flag;
static Sleep peer = SLEEP_INIT;

static void* publish(void* none) {
  store(&flag, 1, ORDER(1, SEQ_CST, RELEASE));
  if (load(&waiters, ORDER(2, SEQ_CST, ACQUIRE)) == 0) return none;
  add(&rings, 1, SEQ_CST);
  futex_wake(&peer);
  return none;
}

static void* wait_for_event(void* none) {
  add(&waiters, 1, ORDER(3, SEQ_CST, ACQ_REL));
  unsigned seen = load(&rings, SEQ_CST);
  const bool moved = load(&flag, ORDER(4, SEQ_CST, ACQUIRE)) != 0;
  if (CONTROL == 5) seen = load(&rings, SEQ_CST);
  if (!moved) futex_wait(&peer, &rings, seen);
  return none;
}

int main(void) {
  RUN(publish, wait_for_event);
  assert(!peer.asleep);
  return 0;
}
