// A poll drops a group that is idle while a thread begins an operation on it: the group stays listed, or is activated
// anew, and its link has one writer at a time.
//
// mirrors src/comm/core/progress.h: if (group.listed_.load() || group.listed_.exchange(true)) return;
// mirrors src/comm/core/progress.cpp: ActiveGroup* const next = group.next_;  // once it is not listed, another thread may write it
// mirrors src/comm/core/progress.cpp: group.listed_.store(false);
// mirrors src/comm/core/progress.cpp: if (group.any_in_flight() && !group.listed_.exchange(true)) {
//
// Controls: 1 `listed_` is cleared with release order; 2 the operation is counted relaxed; 3 the operations are loaded
// with acquire order; 4 `listed_` is loaded with acquire order; 5 the link is read after `listed_` is cleared.
#include "litmus.h"

static atomic_int in_flight, activated;
static atomic_int listed = 1;
static int next;
static int in_list = 1;

static void* begin_operation(void* none) {
  add(&in_flight, 1, ORDER(2, SEQ_CST, RELAXED));
  if (load(&listed, ORDER(4, SEQ_CST, ACQUIRE)) || exchange(&listed, 1, SEQ_CST)) return none;
  next = 1;
  store(&activated, 1, SEQ_CST);
  return none;
}

static void* update(void* none) {
  if (load(&in_flight, SEQ_CST) != 0) return none;
  int after = next;
  store(&listed, 0, ORDER(1, SEQ_CST, RELEASE));
  if (CONTROL == 5) after = next;
  if (!(load(&in_flight, ORDER(3, SEQ_CST, ACQUIRE)) != 0 && !exchange(&listed, 1, SEQ_CST))) in_list = after;
  return none;
}

int main(void) {
  RUN(begin_operation, update);
  assert(in_list + load(&activated, RELAXED) == 1);
  return 0;
}
