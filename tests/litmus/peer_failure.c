// A rank reads from a peer's memory that its caller owns. The peer fails meanwhile: a thread of it publishes the
// failure and ends the operation, and the caller writes into the memory. The reader looks for a failure after it has
// read.
//
// mirrors backends/shm/member_blocks.cpp: record.state.store(1);
// mirrors src/comm/core/polled_group.cpp: op.state.store(state);
// mirrors src/comm/core/polled_group.cpp: std::atomic_thread_fence(std::memory_order_release);
// mirrors backends/shm/shm_group.cpp: std::atomic_thread_fence(std::memory_order_acquire);  // what this rank has read was read before
// mirrors backends/shm/member_blocks.h: members_.of(k).head().failure.state.load() != 0
//
// Controls: 1 no fence in the caller's thread; 2 none at the reader; 3 the operation ends before the failure is
// published.
#include "litmus.h"

static atomic_int failure, state;
static atomic_int data = 1;  // the loads of a reader race with the caller's stores

static void* fail(void* none) {
  if (CONTROL == 3) store(&state, 2, SEQ_CST);
  store(&failure, 1, SEQ_CST);
  store(&state, 2, SEQ_CST);
  return none;
}

static void* reuse(void* none) {
  while (load(&state, SEQ_CST) != 2) {
  }
  if (CONTROL != 1) fence(RELEASE);
  store(&data, 2, RELAXED);
  return none;
}

static void* read_data(void* none) {
  const int value = load(&data, RELAXED);
  if (CONTROL != 2) fence(ACQUIRE);
  if (load(&failure, SEQ_CST) == 0) assert(value == 1);
  return none;
}

int main(void) {
  RUN(fail, reuse, read_data);
  return 0;
}
