// Two threads of a rank sleep until a socket is ready, and a third one wakes them. One eventfd serves both: it is
// drained only while no thread sleeps. A wake-up between a thread's last poll and arm() is drained, too: the thread sees
// by the doorbell that it has been rung.
//
// mirrors backends/tcp/transport.cpp: t_seen = wakes_.load();
// mirrors backends/tcp/transport.cpp: if (sleeping_.load() != 0) return true;
// mirrors backends/tcp/transport.cpp: if (wakes_.load() == t_seen) return true;
// mirrors backends/tcp/transport.cpp: sleeping_.fetch_add(1);
// mirrors backends/tcp/transport.cpp: wakes_.fetch_add(1);
// mirrors src/comm/core/progress.cpp: if (bell_.waiters.load() == 0) return;
// mirrors src/comm/core/progress.cpp: bell_.rings.fetch_add(1);  // before: a thread that is about to arm the waiter
// mirrors src/comm/core/progress.cpp: if (!moved && !needless() && bell_.rings.load() == seen) {
//
// Controls: 1 `sleeping_` is loaded relaxed; 2 it is incremented relaxed; 3 the eventfd is drained while a thread sleeps;
// 4 a wake-up during the drain is ignored; 5 `waiters` is loaded with acquire order; 6 `rings` is not compared; 7 the
// waiter is woken before the doorbell is rung.
#include "litmus.h"

static atomic_int flag, waiters, rings, wakes, sleeping;
static pthread_mutex_t engine = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t kernel = PTHREAD_MUTEX_INITIALIZER;
static bool readable;   // the eventfd
static bool asleep[2];  // in ppoll()

static void signal_eventfd(void) {
  pthread_mutex_lock(&kernel);
  readable = true;
  asleep[0] = asleep[1] = false;
  pthread_mutex_unlock(&kernel);
}

/// Under the engine's lock. True: the thread may sleep.
static bool arm(int seen) {
  if (CONTROL != 3 && load(&sleeping, ORDER(1, SEQ_CST, RELAXED)) != 0) return true;
  pthread_mutex_lock(&kernel);
  readable = false;
  pthread_mutex_unlock(&kernel);
  if (CONTROL == 4 || load(&wakes, SEQ_CST) == seen) return true;
  signal_eventfd();
  return false;
}

static void sleep_until_woken(int thread) {
  add(&waiters, 1, SEQ_CST);
  const int rung = load(&rings, SEQ_CST);
  pthread_mutex_lock(&engine);
  const bool moved = load(&flag, SEQ_CST) != 0;
  const int seen = moved ? 0 : load(&wakes, SEQ_CST);
  const bool sleeps = !moved && arm(seen);
  pthread_mutex_unlock(&engine);
  if (!sleeps || (CONTROL != 6 && load(&rings, SEQ_CST) != rung)) return;
  add(&sleeping, 1, ORDER(2, SEQ_CST, RELAXED));
  bool stays = false;
  if (load(&wakes, SEQ_CST) == seen) {
    pthread_mutex_lock(&kernel);
    stays = asleep[thread] = !readable;
    pthread_mutex_unlock(&kernel);
  }
  if (!stays) sub(&sleeping, 1, SEQ_CST);
}
static void* sleep_0(void* none) {
  sleep_until_woken(0);
  return none;
}
static void* sleep_1(void* none) {
  sleep_until_woken(1);
  return none;
}

static void* wake(void* none) {
  store(&flag, 1, SEQ_CST);
  if (load(&waiters, ORDER(5, SEQ_CST, ACQUIRE)) == 0) return none;
  if (CONTROL != 7) add(&rings, 1, SEQ_CST);
  add(&wakes, 1, SEQ_CST);
  signal_eventfd();
  if (CONTROL == 7) add(&rings, 1, SEQ_CST);
  return none;
}

int main(void) {
  RUN(sleep_0, sleep_1, wake);
  assert(!asleep[0] && !asleep[1]);
  return 0;
}
