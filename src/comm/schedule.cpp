#include "tessera/comm/schedule.h"

#include <array>

#include "tessera/base/error.h"
#include "tessera/comm/algorithms/algorithms.h"
#include "tessera/comm/core/op_traits.h"

namespace tessera::comm {
namespace {

/// The order in which an algorithm reduces.
enum class Order {
  whole,  ///< all sources at once, by the tree; or no reduction at all
  tree,   ///< two operands at a time, along the tree: 16-bit sums are rounded at every step
  other,
};

struct Algorithm {
  OpKind kind;
  std::string_view name;
  Order order;
  bool unequal;  ///< supports parts of different lengths
  void (*write)(ScheduleBuilder&);
};

constexpr std::array kAlgorithms = {
    Algorithm{OpKind::all_reduce, "direct", Order::whole, false, schedules::direct_all_reduce},
    Algorithm{OpKind::all_reduce, "symmetric", Order::whole, false, schedules::symmetric_all_reduce},
    Algorithm{OpKind::all_reduce, "recursive_doubling", Order::tree, false, schedules::recursive_doubling_all_reduce},
    Algorithm{OpKind::all_reduce, "rabenseifner", Order::tree, false, schedules::rabenseifner_all_reduce},
    Algorithm{OpKind::all_reduce, "tree", Order::tree, false, schedules::tree_all_reduce},
    Algorithm{OpKind::all_reduce, "ring", Order::other, false, schedules::ring_all_reduce},
    Algorithm{OpKind::reduce_scatter, "direct", Order::whole, true, schedules::direct_reduce_scatter},
    Algorithm{OpKind::reduce_scatter, "recursive_halving", Order::tree, false,
              schedules::recursive_halving_reduce_scatter},
    Algorithm{OpKind::reduce_scatter, "ring", Order::other, true, schedules::ring_reduce_scatter},
    Algorithm{OpKind::all_gather, "direct", Order::whole, true, schedules::direct_all_gather},
    Algorithm{OpKind::all_gather, "recursive_doubling", Order::whole, true, schedules::recursive_doubling_all_gather},
    Algorithm{OpKind::all_gather, "bruck", Order::whole, true, schedules::bruck_all_gather},
    Algorithm{OpKind::all_gather, "ring", Order::whole, true, schedules::ring_all_gather},
    Algorithm{OpKind::broadcast, "direct", Order::whole, false, schedules::direct_broadcast},
    Algorithm{OpKind::broadcast, "binomial", Order::whole, false, schedules::binomial_broadcast},
    Algorithm{OpKind::broadcast, "pipelined", Order::whole, false, schedules::pipelined_broadcast},
    Algorithm{OpKind::reduce, "direct", Order::whole, false, schedules::direct_reduce},
    Algorithm{OpKind::reduce, "binomial", Order::tree, false, schedules::binomial_reduce},
    Algorithm{OpKind::gather, "direct", Order::whole, true, schedules::direct_gather},
    Algorithm{OpKind::gather, "binomial", Order::whole, true, schedules::binomial_gather},
    Algorithm{OpKind::scatter, "direct", Order::whole, true, schedules::direct_scatter},
    Algorithm{OpKind::scatter, "binomial", Order::whole, true, schedules::binomial_scatter},
    Algorithm{OpKind::all_to_all, "direct", Order::whole, true, schedules::direct_all_to_all},
    Algorithm{OpKind::all_to_all, "pairwise", Order::whole, true, schedules::pairwise_all_to_all},
    Algorithm{OpKind::all_to_all, "bruck", Order::whole, false, schedules::bruck_all_to_all},
    Algorithm{OpKind::barrier, "dissemination", Order::whole, false, schedules::dissemination_barrier},
};

const Algorithm* find(OpKind kind, std::string_view name) {
  for (const Algorithm& algorithm : kAlgorithms)
    if (algorithm.kind == kind && algorithm.name == name) return &algorithm;
  return nullptr;
}

bool unequal(const CollectiveSpec& spec) { return !spec.in_starts.empty() || !spec.out_starts.empty(); }

/// Whether adding two operands at a time along the tree gives the same bits as adding all at once. 16-bit values are
/// then rounded after every addition, which is harmless if there is only one addition or nothing to round.
bool steps_are_exact(const CollectiveSpec& spec) {
  using Kind = ReduceOp::Kind;
  if (size_of(spec.dtype) != 2) return true;
  if (spec.reduce == Kind::min || spec.reduce == Kind::max) return true;
  return spec.ranks == 2 && spec.reduce != Kind::premul_sum;
}

/// One rank: no messages.
void write_alone(ScheduleBuilder& builder) {
  using Kind = ReduceOp::Kind;
  const CollectiveSpec& spec = builder.spec();
  if (spec.kind == OpKind::barrier) return;
  if (spec.kind == OpKind::all_to_all) {  // whose lengths the specification of a _v form has by part only
    builder.copy(builder.in(part_of(spec, spec.in_starts, 0)), builder.out(part_of(spec, spec.out_starts, 0)));
    return;
  }
  const BufferRegion in = builder.in(everything(spec));
  const BufferRegion out = builder.out(everything(spec));
  if (reduces(spec.kind) && spec.reduce == Kind::premul_sum) {
    StepId ready = kNoStep;
    const BufferRegion factor = builder.own_factor(ready);
    builder.reduce(ReducePhase::whole, {&in, 1}, out, {ready}, factor);
  } else if (reduces(spec.kind) && spec.reduce == Kind::avg) {
    builder.reduce(ReducePhase::whole, {&in, 1}, out);
  } else {
    builder.copy(in, out, {}, spec.in_place);
  }
}

}  // namespace

std::vector<std::string> known_algorithms(bool ordered_only) {
  std::vector<std::string> names;
  for (const Algorithm& algorithm : kAlgorithms)
    if (!ordered_only || algorithm.order != Order::other)
      names.push_back(std::string(name_of(algorithm.kind)).append("=").append(algorithm.name));
  return names;
}

std::string refusal(const CollectiveSpec& spec, std::string_view name) {
  const std::string request = std::string(name_of(spec.kind)).append("=").append(name);
  const Algorithm* algorithm = find(spec.kind, name);
  if (algorithm == nullptr) {
    std::string known;
    for (const Algorithm& other : kAlgorithms)
      if (other.kind == spec.kind) known += std::string(" ").append(other.name);
    return request + ": no such algorithm; known:" + known;
  }
  if (unequal(spec) && !algorithm->unequal) return request + " needs parts of equal length; use direct";
  if (!spec.ordered || !reduces(spec.kind) || spec.ranks == 1) return "";
  if (!is_floating(spec.dtype)) return "";  // integers wrap: any order gives the same bits
  if (algorithm->order == Order::other)
    return request + " does not reduce along the tree, as deterministic mode requires; use direct";
  if (algorithm->order == Order::tree && !steps_are_exact(spec))
    return request + " rounds " + std::string(name_of(spec.dtype)) +
           " at every hop, but deterministic mode rounds once at the end; use direct";
  return "";
}

Schedule build_schedule(const CollectiveSpec& spec, std::string_view name) {
  if (const std::string why = refusal(spec, name); !why.empty()) throw InvalidUsage(why);
  const Algorithm& algorithm = *find(spec.kind, name);
  ScheduleBuilder builder(spec, algorithm.name);
  if (spec.ranks == 1) {
    write_alone(builder);
  } else {
    algorithm.write(builder);
  }
  return std::move(builder).finish();
}

}  // namespace tessera::comm
