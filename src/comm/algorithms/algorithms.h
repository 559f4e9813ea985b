// The algorithms. Each builds one rank's steps of its builder's operation, for more than one rank.
#pragma once

#include "tessera/comm/algorithms/schedule_builder.h"

namespace tessera::comm::schedules {

// direct.cpp: every rank exchanges with all others at once; each sum is one step, so it is rounded once.
void symmetric_all_reduce(ScheduleBuilder& builder);
void direct_all_reduce(ScheduleBuilder& builder);
void direct_reduce_scatter(ScheduleBuilder& builder);
void direct_reduce(ScheduleBuilder& builder);

// exchange.cpp: collectives without reductions; data moves straight from source to destination.
void direct_all_gather(ScheduleBuilder& builder);
void direct_broadcast(ScheduleBuilder& builder);
void direct_gather(ScheduleBuilder& builder);
void direct_scatter(ScheduleBuilder& builder);
void direct_all_to_all(ScheduleBuilder& builder);
void pairwise_all_to_all(ScheduleBuilder& builder);
void dissemination_barrier(ScheduleBuilder& builder);

// ring.cpp: each rank receives only from its predecessor and sends only to its successor.
void ring_all_reduce(ScheduleBuilder& builder);
void ring_reduce_scatter(ScheduleBuilder& builder);
void ring_all_gather(ScheduleBuilder& builder);
void pipelined_broadcast(ScheduleBuilder& builder);

// tree.cpp: along the tree of slices.h.
void tree_all_reduce(ScheduleBuilder& builder);
void binomial_reduce(ScheduleBuilder& builder);
void binomial_broadcast(ScheduleBuilder& builder);
void binomial_gather(ScheduleBuilder& builder);
void binomial_scatter(ScheduleBuilder& builder);

// doubling.cpp, halving.cpp: partners at distance 1, 2, 4, ...
void recursive_doubling_all_reduce(ScheduleBuilder& builder);
void recursive_doubling_all_gather(ScheduleBuilder& builder);
void rabenseifner_all_reduce(ScheduleBuilder& builder);
void recursive_halving_reduce_scatter(ScheduleBuilder& builder);

// bruck.cpp: any number n of ranks in about log2(n) rounds.
void bruck_all_gather(ScheduleBuilder& builder);
void bruck_all_to_all(ScheduleBuilder& builder);

}  // namespace tessera::comm::schedules
