// An operation completes in the thread that polls, and its last handle goes in another one: the result is visible with
// the state, and the memory of the operation is reused only after both threads are done with it.
//
// mirrors src/comm/core/polled_group.cpp: op.state.store(state);
// mirrors src/comm/core/polled_group.cpp: op.release();
// mirrors src/comm/core/polled_group.cpp: return state.load() == succeeded || has_failed();
// mirrors src/comm/work.h: if (handles_.fetch_sub(1, std::memory_order_acq_rel) == 1) recycle();
// mirrors src/comm/core/group_core.h: op.next = std::exchange(free_, &op);
//
// Controls: 1 the state is stored relaxed; 2 it is loaded relaxed; 3 handles are removed with acquire order only; 4 with
// release order only; 5 an operation is recycled without the lock.
#include "litmus.h"

static atomic_int state;
static atomic_int handles = 2;
static int result;
static int batch = 7;  // a plain member, which the polling thread reads after it has set the state
static bool is_free;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void release(void) {
  if (sub(&handles, 1, CONTROL == 3 ? ACQUIRE : CONTROL == 4 ? RELEASE : ACQ_REL) != 1) return;
  if (CONTROL != 5) pthread_mutex_lock(&mutex);
  is_free = true;
  if (CONTROL != 5) pthread_mutex_unlock(&mutex);
}

static void* complete(void* none) {
  result = 42;
  store(&state, 1, ORDER(1, SEQ_CST, RELAXED));
  assert(batch == 7);
  release();
  return none;
}

static void* wait_and_reuse(void* none) {
  while (load(&state, ORDER(2, SEQ_CST, RELAXED)) == 0) {
  }
  assert(result == 42);
  release();
  pthread_mutex_lock(&mutex);
  const bool reuse = is_free;
  is_free = false;
  pthread_mutex_unlock(&mutex);
  if (!reuse) return none;
  batch = 8;
  result = 0;
  store(&state, 0, RELAXED);
  return none;
}

int main(void) {
  RUN(complete, wait_and_reuse);
  return 0;
}
