// A rank writes an entry of its flight recorder while `tessera report --postmortem` reads the file: an entry whose
// number is the same before and after it was read is whole.
//
// mirrors src/comm/flight_recorder/recorder.cpp: atomic(entry.number).store(0, std::memory_order_relaxed);
// mirrors src/comm/flight_recorder/recorder.cpp: std::atomic_thread_fence(std::memory_order_release);
// mirrors src/comm/flight_recorder/recorder.cpp: atomic(entry.number).store(number, std::memory_order_release);
// mirrors tools/report/flight_log.cpp: std::atomic_thread_fence(std::memory_order_acquire);
// mirrors tools/report/flight_log.cpp: const bool whole = entry.number == before[i] && entry.number == after[i];
//
// Controls: 1 a release store of 0 instead of the fence; 2 the number is stored relaxed; 3 it is not read before; 4 it is
// not read after; 5 no fence before the entry; 6 none after it.
#include "litmus.h"

static atomic_int number = 1;
static atomic_int bytes = 1, label = 1;  // the kernel's loads race with the rank's stores

static void* issue(void* none) {
  for (int call = 2; call <= 3; ++call) {
    store(&number, 0, CONTROL == 1 ? RELEASE : RELAXED);
    if (CONTROL != 1) fence(RELEASE);
    store(&bytes, call, RELAXED);
    store(&label, call, RELAXED);
    store(&number, call, ORDER(2, RELEASE, RELAXED));
  }
  return none;
}

static void* report(void* none) {
  const int before = load(&number, RELAXED);
  if (CONTROL != 5) fence(ACQUIRE);
  const int entry = load(&number, RELAXED);
  const int read_bytes = load(&bytes, RELAXED);
  const int read_label = load(&label, RELAXED);
  if (CONTROL != 6) fence(ACQUIRE);
  const int after = load(&number, RELAXED);
  if (entry != 0 && (entry == before || CONTROL == 3) && (entry == after || CONTROL == 4))
    assert(read_bytes == entry && read_label == entry);
  return none;
}

int main(void) {
  RUN(issue, report);
  return 0;
}
