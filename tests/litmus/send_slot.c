// Messages between two ranks through tiles: the slot of the sender, its rounds, and the rounds that the receiver
// returns as credit. One tile instead of two, so that two rounds reuse it.
//
// mirrors backends/shm/point_to_point.cpp: slot.sent.store(encode(channel.messages, op.stages_in ? 0 : kAllRounds));
// mirrors backends/shm/point_to_point.cpp: members_.own().sends(peer).sent.store(encode(channel.messages, channel.rounds));
// mirrors backends/shm/point_to_point.cpp: if (channel.rounds >= taken + kMessageTiles) return false;
// mirrors backends/shm/point_to_point.cpp: if (channel.messages > 0 && rounds_of(received, channel.messages) != kAllRounds)
// mirrors backends/shm/point_to_point.cpp: const std::uint64_t sent = slot.sent.load();
// mirrors backends/shm/point_to_point.cpp: members_.own().received(peer).store(encode(message, all ? kAllRounds : channel.rounds));
//
// Controls: 1 `sent` is stored relaxed; 2 loaded relaxed; 3 `received` is stored relaxed; 4 loaded relaxed; 5 the sender
// does not wait for a free tile; 6 it begins a message before the previous one has been received.
#include "litmus.h"

#define MESSAGES 2
#define ROUNDS 2
#define TILES 1
#define ALL 15

static int encode(int message, int rounds) { return message << 4 | rounds; }
static int rounds_of(int flag, int message) {
  const int at = flag >> 4;
  return at < message ? 0 : (at > message ? ALL : flag & ALL);
}

static atomic_int sent, received;
static int bytes;
static int tile[TILES];

static void* run_sender(void* none) {
  for (int m = 1; m <= MESSAGES; ++m) {
    while (m > 1 && CONTROL != 6 && rounds_of(load(&received, ORDER(4, SEQ_CST, RELAXED)), m - 1) != ALL) {
    }
    bytes = m;
    store(&sent, encode(m, 0), ORDER(1, SEQ_CST, RELAXED));
    for (int r = 0; r < ROUNDS; ++r) {
      while (CONTROL != 5 && r >= rounds_of(load(&received, ORDER(4, SEQ_CST, RELAXED)), m) + TILES) {
      }
      tile[r % TILES] = 10 * m + r;
      store(&sent, encode(m, r + 1), ORDER(1, SEQ_CST, RELAXED));
    }
  }
  return none;
}

static void* run_receiver(void* none) {
  for (int m = 1; m <= MESSAGES; ++m) {
    while (load(&sent, ORDER(2, SEQ_CST, RELAXED)) >> 4 < m) {
    }
    assert(bytes == m);
    for (int r = 0; r < ROUNDS; ++r) {
      while (rounds_of(load(&sent, ORDER(2, SEQ_CST, RELAXED)), m) <= r) {
      }
      assert(tile[r % TILES] == 10 * m + r);
      store(&received, encode(m, r + 1 == ROUNDS ? ALL : r + 1), ORDER(3, SEQ_CST, RELAXED));
    }
  }
  return none;
}

int main(void) {
  RUN(run_sender, run_receiver);
  return 0;
}
