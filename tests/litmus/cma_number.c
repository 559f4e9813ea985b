// A receiver copies a message from the sender's process and then reads the number of the send; the sender sets the
// number to 0 before the owner of the memory may write there again. The kernel's loads are those of the thread that
// calls it.
//
// mirrors src/comm/transport/cma.cpp: send.number.store(0);
// mirrors src/comm/transport/cma.cpp: std::atomic_thread_fence(std::memory_order_release);
// mirrors src/comm/transport/cma.cpp: std::atomic_thread_fence(std::memory_order_acquire);
// mirrors src/comm/transport/cma.cpp: if (alive && number != receive.address.number) {
//
// Controls: 1 no fence at the sender; 2 none at the receiver; 3 the memory is written before the number.
#include "litmus.h"

static atomic_int number = 7;
static atomic_int data[2] = {1, 1};  // the kernel's loads race with the owner's stores

static void* cancel(void* none) {
  if (CONTROL == 3) store(&data[0], 2, RELAXED);
  store(&number, 0, SEQ_CST);
  if (CONTROL != 1) fence(RELEASE);
  store(&data[0], 2, RELAXED);
  store(&data[1], 2, RELAXED);
  return none;
}

static void* receive(void* none) {
  const int first = load(&data[0], RELAXED);
  const int second = load(&data[1], RELAXED);
  if (CONTROL != 2) fence(ACQUIRE);
  if (load(&number, RELAXED) == 7) assert(first == 1 && second == 1);
  return none;
}

int main(void) {
  RUN(cancel, receive);
  return 0;
}
