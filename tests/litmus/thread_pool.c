// The compute threads of a rank: the caller describes a run, increments the generation, works with the others, and
// waits until the last helper is done. Two runs of two tiles.
//
// mirrors src/nn/thread_pool.cpp: generation_.fetch_add(1, std::memory_order_release);
// mirrors src/nn/thread_pool.cpp: const Number now = value.load(std::memory_order_acquire);
// mirrors src/nn/thread_pool.cpp: if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
// mirrors src/nn/thread_pool.cpp: for (std::size_t busy = busy_.load(std::memory_order_acquire); busy != 0;)
// mirrors src/nn/thread_pool.cpp: const std::size_t tile = next_.fetch_add(1, std::memory_order_relaxed);
//
// Controls: 1 the generation is incremented relaxed; 2 it is loaded relaxed; 3 a helper's end is relaxed; 4 the
// caller's load of it is; 5 the caller does not wait for a helper that got no tile.
#include "litmus.h"

#define HELPERS 2
#define TILES 2
#define RUNS 2

static int task;
static int results[TILES];
static atomic_int next, busy, generation, done;

static void work(void) {
  for (;;) {
    const int tile = add(&next, 1, RELAXED);
    if (tile >= TILES) return;
    results[tile] = task;
    add(&done, 1, RELEASE);
  }
}

static void* help(void* none) {
  for (int seen = 0; seen < RUNS; ++seen) {
    while (load(&generation, ORDER(2, ACQUIRE, RELAXED)) == seen) {
    }
    work();
    sub(&busy, 1, ORDER(3, ACQ_REL, RELAXED));
  }
  return none;
}

static void* call(void* none) {
  for (int run = 1; run <= RUNS; ++run) {
    task = run;
    store(&next, 0, RELAXED);
    store(&busy, HELPERS, RELAXED);
    add(&generation, 1, ORDER(1, RELEASE, RELAXED));
    work();
    if (CONTROL == 5)
      while (load(&done, ACQUIRE) < TILES * run) {
      }
    else
      while (load(&busy, ORDER(4, ACQUIRE, RELAXED)) != 0) {
      }
    for (int tile = 0; tile < TILES; ++tile) assert(results[tile] == run);
  }
  return none;
}

int main(void) {
  RUN(call, help, help);
  return 0;
}
