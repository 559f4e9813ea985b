// A flag spares a poll the lock of a list: submitted operations, control messages, deferred calls.
//
// mirrors src/comm/core/progress.cpp: any_deferred_.store(false);
// mirrors src/comm/core/progress.cpp: any_deferred_.store(true);
// mirrors src/comm/core/polled_group.cpp: any_submitted_.store(false);
// mirrors src/comm/core/polled_group.cpp: any_submitted_.store(true);
// mirrors src/comm/host/host_runtime.cpp: any_received_.store(false);
// mirrors src/comm/host/host_runtime.cpp: any_received_.store(true);
//
// The first of these stores the flag outside the lock, as here.
//
// Controls: 1 the flag is cleared after the list is taken; 2 the list is taken without the lock.
#include "litmus.h"

static atomic_int any;
static int list;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void* defer(void* none) {
  for (int i = 0; i < 2; ++i) {
    pthread_mutex_lock(&mutex);
    ++list;
    pthread_mutex_unlock(&mutex);
    store(&any, 1, SEQ_CST);
  }
  return none;
}

static int take(void) {
  if (load(&any, SEQ_CST) == 0) return 0;
  if (CONTROL != 1) store(&any, 0, SEQ_CST);
  if (CONTROL != 2) pthread_mutex_lock(&mutex);
  const int taken = list;
  list = 0;
  if (CONTROL != 2) pthread_mutex_unlock(&mutex);
  if (CONTROL == 1) store(&any, 0, SEQ_CST);
  return taken;
}

static int taken;
static void* run_deferred(void* none) {
  taken = take();
  return none;
}

int main(void) {
  RUN(defer, run_deferred);
  taken += take();
  assert(taken == 2);
  return 0;
}
