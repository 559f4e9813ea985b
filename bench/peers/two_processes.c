/* The bare time of two processes on two cores to exchange bytes through memory that both map: each copies its data to
 * its slot, sets a flag, waits for the peer's flag, copies the peer's data, and copies its own data beside it, as an
 * all_gather of 2 x BYTES does. Prints the median of all exchanges, and of the first copy alone.
 *
 *   cc -O2 -D_GNU_SOURCE two_processes.c -o two_processes && ./two_processes BYTES writable|read-only
 *
 * writable, read-only: how the peer, which only reads, maps a slot. */
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { kExchanges = 3000, kSlots = 2, kFlagBytes = 4096 };
static const double kPatience = 10e6; /* for a peer that has died */

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int ascending(const void* left, const void* right) {
  const double a = *(const double*)left, b = *(const double*)right;
  return (a > b) - (a < b);
}

static void wait_for(const _Atomic uint64_t* flag, uint64_t value) {
  for (uint64_t turns = 1; atomic_load_explicit(flag, memory_order_acquire) < value; ++turns) {
    static double since;
    if (turns == 1) since = now_us();
    if (turns % 1000000 == 0 && now_us() - since > kPatience) {
      fprintf(stderr, "two_processes: the other process does not answer\n");
      exit(1);
    }
  }
}

int main(int argc, char** argv) {
  const size_t bytes = argc == 3 ? strtoull(argv[1], NULL, 10) : 0;
  const int writable = argc == 3 && strcmp(argv[2], "writable") == 0;
  if (bytes == 0 || (!writable && strcmp(argv[2], "read-only") != 0)) {
    fprintf(stderr, "usage: %s BYTES writable|read-only\n", argv[0]);
    return 2;
  }
  char* const flags = mmap(NULL, 2 * kFlagBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int files[2];
  for (int r = 0; r < 2; ++r) {
    files[r] = memfd_create("two-processes", 0);
    if (flags == MAP_FAILED || files[r] < 0 || ftruncate(files[r], (off_t)(kSlots * bytes)) != 0) {
      perror("two_processes: shared memory");
      return 1;
    }
  }
  const pid_t child = fork();
  const int me = child == 0, other = 1 - me;
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(me, &core);
  sched_setaffinity(0, sizeof core, &core);
  char* const mine = mmap(NULL, kSlots * bytes, PROT_READ | PROT_WRITE, MAP_SHARED, files[me], 0);
  char* const theirs = mmap(NULL, kSlots * bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, files[other], 0);
  char* const in = malloc(bytes);
  char* const out = malloc(2 * bytes);
  double* const whole = malloc(kExchanges * sizeof(double));
  double* const first = malloc(kExchanges * sizeof(double));
  if (child < 0 || mine == MAP_FAILED || theirs == MAP_FAILED || !in || !out || !whole || !first) {
    perror("two_processes: memory");
    return 1;
  }
  memset(mine, 1, kSlots * bytes);
  memset(in, me, bytes);
  memset(out, 0, 2 * bytes);
  _Atomic uint64_t* const own_flag = (_Atomic uint64_t*)(flags + me * kFlagBytes);
  const _Atomic uint64_t* const their_flag = (_Atomic uint64_t*)(flags + other * kFlagBytes);
  uint64_t count = 0;
  for (int i = 0; i < kExchanges; ++i) {
    atomic_store(own_flag, ++count); /* both processes start together */
    wait_for(their_flag, count);
    const size_t slot = (size_t)(i % kSlots) * bytes;
    const double begin = now_us();
    memcpy(mine + slot, in, bytes);
    first[i] = now_us() - begin;
    atomic_store(own_flag, ++count);
    wait_for(their_flag, count);
    memcpy(out + (size_t)other * bytes, theirs + slot, bytes);
    memcpy(out + (size_t)me * bytes, in, bytes);
    whole[i] = now_us() - begin;
  }
  qsort(whole, kExchanges, sizeof(double), ascending);
  qsort(first, kExchanges, sizeof(double), ascending);
  if (me == 0) printf("%zu bytes, %s: %.2f us, of which the copy to the slot %.2f\n", bytes, argv[2], whole[kExchanges / 2], first[kExchanges / 2]);
  if (me == 0) wait(NULL);
  return 0;
}
