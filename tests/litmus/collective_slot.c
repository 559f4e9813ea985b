// The announcements of collectives: a broadcast of a small payload, after which the root does not wait for its readers.
// Operation s uses slot s % 2 of each rank, and is announced once every rank has announced s - 1.
//
// mirrors backends/shm/collective_buffers.cpp: slot.sequence.store(op.sequence);
// mirrors backends/shm/collective_buffers.cpp: members_.of(op.arrived).slot(op.sequence).sequence.load() >= op.sequence
// mirrors backends/shm/collective_buffers.cpp: if (k != members_.rank() && last(k) + 1 < op.sequence) return false;
// mirrors backends/shm/collective_buffers.cpp: std::max(block.slot(0).sequence.load(), block.slot(1).sequence.load())
//
// Controls: 1 the root's announcement is relaxed; 2 a reader's load of it is; 3 a reader's announcement, which returns
// the slot, is; 4 the root's load of that is; 5 the root does not wait for room.
#include "litmus.h"

#define OPERATIONS 3

typedef struct {
  atomic_int sequence;
  int payload;
} Slot;
static Slot root[2];
static Slot reader[2][2];

static int last(const Slot* slots) {
  const int a = load(&slots[0].sequence, ORDER(4, SEQ_CST, RELAXED));
  const int b = load(&slots[1].sequence, ORDER(4, SEQ_CST, RELAXED));
  return a > b ? a : b;
}

static void* run_root(void* none) {
  for (int s = 1; s <= OPERATIONS; ++s) {
    for (int k = 0; k < 2 && CONTROL != 5; ++k)
      while (last(reader[k]) + 1 < s) {
      }
    root[s % 2].payload = s;
    store(&root[s % 2].sequence, s, ORDER(1, SEQ_CST, RELAXED));
  }
  return none;
}

static void read_all(Slot* own) {
  for (int s = 1; s <= OPERATIONS; ++s) {
    store(&own[s % 2].sequence, s, ORDER(3, SEQ_CST, RELAXED));
    while (load(&root[s % 2].sequence, ORDER(2, SEQ_CST, RELAXED)) < s) {
    }
    assert(root[s % 2].payload == s);
  }
}
static void* run_reader_0(void* none) {
  read_all(reader[0]);
  return none;
}
static void* run_reader_1(void* none) {
  read_all(reader[1]);
  return none;
}

int main(void) {
  RUN(run_root, run_reader_0, run_reader_1);
  return 0;
}
