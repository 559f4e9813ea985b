// The rounds of two collectives through the same tile: the owner waits for the reader within an operation, and at its
// end until all is read, since the flags of one operation count as no round of the next.
//
// mirrors backends/shm/tiled_collective.cpp: publish(members_.own().head().staged.value, op, op.staged == rounds ? kAllRounds : op.staged);
// mirrors backends/shm/tiled_collective.cpp: if (op.staged >= rounds || (op.stages_in && op.staged >= slowest_reader(op, false) + kTiles)) return false;
// mirrors backends/shm/tiled_collective.cpp: if (op.any_staged) publish(members_.own().head().phase_a.value, op, slowest);
// mirrors backends/shm/tiled_collective.cpp: publish(members_.own().head().phase_b.value, op, kAllRounds);
// mirrors backends/shm/tiled_collective.cpp: rounds_of(members_.of(op.arrived).head().phase_b.value.load(), op.sequence) == kAllRounds))
//
// Controls: 1 `staged` is stored relaxed; 2 loaded relaxed; 3 `phase_a` is stored relaxed; 4 loaded relaxed; 5 `phase_b`
// is stored relaxed; 6 loaded relaxed; 7 the owner does not wait for a free tile; 8 nor for its readers at the end.
#include "litmus.h"

#define OPERATIONS 2
#define ROUNDS 2
#define TILES 1
#define ALL 15

static int encode(int operation, int rounds) { return operation << 4 | rounds; }
static int rounds_of(int flag, int operation) {
  const int at = flag >> 4;
  return at < operation ? 0 : (at > operation ? ALL : flag & ALL);
}

static atomic_int staged, phase_a, phase_b;
static int tile[TILES];

static void* own(void* none) {
  for (int s = 1; s <= OPERATIONS; ++s) {
    for (int r = 0; r < ROUNDS; ++r) {
      while (CONTROL != 7 && r >= rounds_of(load(&phase_a, ORDER(4, SEQ_CST, RELAXED)), s) + TILES) {
      }
      tile[r % TILES] = 10 * s + r;
      store(&staged, encode(s, r + 1 == ROUNDS ? ALL : r + 1), ORDER(1, SEQ_CST, RELAXED));
    }
    while (CONTROL != 8 && rounds_of(load(&phase_b, ORDER(6, SEQ_CST, RELAXED)), s) != ALL) {
    }
  }
  return none;
}

static void* read_tiles(void* none) {
  for (int s = 1; s <= OPERATIONS; ++s) {
    for (int r = 0; r < ROUNDS; ++r) {
      while (rounds_of(load(&staged, ORDER(2, SEQ_CST, RELAXED)), s) <= r) {
      }
      assert(tile[r % TILES] == 10 * s + r);
      store(&phase_a, encode(s, r + 1 == ROUNDS ? ALL : r + 1), ORDER(3, SEQ_CST, RELAXED));
    }
    store(&phase_b, encode(s, ALL), ORDER(5, SEQ_CST, RELAXED));
  }
  return none;
}

int main(void) {
  RUN(own, read_tiles);
  return 0;
}
