#include "tests/comm/schedule_world.h"

#include <map>
#include <stdexcept>
#include <tuple>

namespace tessera::comm_test {
namespace {

Slice part(const CollectiveSpec& spec, const std::vector<std::size_t>& starts, int rank) {
  if (starts.empty()) return slice_of(spec.count, spec.ranks, rank);
  const auto r = static_cast<std::size_t>(rank);
  return {starts[r], starts[r + 1] - starts[r]};
}

bool in_place_possible(const CollectiveSpec& spec) {
  switch (spec.kind) {
    case OpKind::all_to_all:
    case OpKind::barrier:
      return false;
    case OpKind::broadcast:
    case OpKind::reduce:
    case OpKind::gather:
    case OpKind::scatter:
      return spec.rank == spec.root;
    default:
      return true;
  }
}

std::vector<CollectiveSpec> for_all_ranks(const CollectiveSpec& spec, std::uint32_t in_place_ranks) {
  std::vector<CollectiveSpec> all(static_cast<std::size_t>(spec.ranks), spec);
  for (int rank = 0; rank < spec.ranks; ++rank) {
    CollectiveSpec& own = all[static_cast<std::size_t>(rank)];
    own.rank = rank;
    own.in_place = ((in_place_ranks >> rank) & 1) != 0 && in_place_possible(own);
  }
  return all;
}

}  // namespace

ScheduleWorld::ScheduleWorld(const CollectiveSpec& spec, std::string_view algorithm, std::uint32_t in_place_ranks)
    : ScheduleWorld(for_all_ranks(spec, in_place_ranks), algorithm) {}

ScheduleWorld::ScheduleWorld(std::vector<CollectiveSpec> all, std::string_view algorithm) : specs(std::move(all)) {
  for (const CollectiveSpec& spec : specs) schedules.push_back(build_schedule(spec, algorithm));
}

std::size_t ScheduleWorld::in_count(int rank) const {
  const CollectiveSpec& spec = specs[static_cast<std::size_t>(rank)];
  switch (spec.kind) {
    case OpKind::all_gather:
    case OpKind::gather:
      return part(spec, spec.out_starts, rank).count;
    case OpKind::broadcast:
    case OpKind::scatter:
      return rank == spec.root ? spec.count : 0;
    case OpKind::all_to_all:
      return spec.in_starts.empty() ? spec.count : spec.in_starts.back();
    default:
      return spec.count;
  }
}

std::size_t ScheduleWorld::out_count(int rank) const {
  const CollectiveSpec& spec = specs[static_cast<std::size_t>(rank)];
  switch (spec.kind) {
    case OpKind::reduce_scatter:
    case OpKind::scatter:
      return part(spec, spec.in_starts, rank).count;
    case OpKind::reduce:
    case OpKind::gather:
      return rank == spec.root ? spec.count : 0;
    case OpKind::all_to_all:
      return spec.out_starts.empty() ? spec.count : spec.out_starts.back();
    default:
      return spec.count;
  }
}

Spot ScheduleWorld::spot(int rank, BufferId place) const {
  const CollectiveSpec& spec = specs[static_cast<std::size_t>(rank)];
  const std::size_t size = size_of(spec.dtype);
  if (place == BufferId::scratch) return {2, 0};
  if (place == BufferId::factor) return {3, 0};
  const bool gathers = spec.kind == OpKind::all_gather || spec.kind == OpKind::gather;
  const bool scatters = spec.kind == OpKind::reduce_scatter || spec.kind == OpKind::scatter;
  if (place == BufferId::in)
    return spec.in_place && gathers ? Spot{1, part(spec, spec.out_starts, rank).offset * size} : Spot{0, 0};
  if (!spec.in_place || gathers) return {1, 0};
  return scatters ? Spot{0, part(spec, spec.in_starts, rank).offset * size} : Spot{0, 0};
}

std::size_t ScheduleWorld::buffer_bytes(int rank, int buffer) const {
  const CollectiveSpec& spec = specs[static_cast<std::size_t>(rank)];
  const std::size_t size = size_of(spec.dtype);
  if (buffer == 2) return schedules[static_cast<std::size_t>(rank)].scratch_bytes;
  if (buffer == 3) return sizeof(double);
  const bool used = spot(rank, buffer == 0 ? BufferId::in : BufferId::out).buffer == buffer;
  if (!used) return 0;
  return (buffer == 0 ? in_count(rank) : out_count(rank)) * size;
}

std::uint64_t ScheduleWorld::bytes_sent(int rank) const {
  std::uint64_t sum = 0;
  for (const ScheduleStep& step : schedules[static_cast<std::size_t>(rank)].steps)
    if (step.kind == ScheduleStep::Kind::send) sum += step.from.bytes;
  return sum;
}

std::vector<MessagePair> messages_of(const ScheduleWorld& world) {
  std::map<std::tuple<int, int, std::uint32_t>, MessagePair> pairs;
  const auto fail = [](int from, int to, std::uint32_t number, const char* what) {
    throw std::runtime_error("message " + std::to_string(number) + " from rank " + std::to_string(from) + " to " +
                             std::to_string(to) + " " + what);
  };
  for (int rank = 0; rank < static_cast<int>(world.schedules.size()); ++rank) {
    const auto& steps = world.schedules[static_cast<std::size_t>(rank)].steps;
    for (std::uint32_t i = 0; i < steps.size(); ++i)
      if (steps[i].kind == ScheduleStep::Kind::send &&
          !pairs.try_emplace({rank, steps[i].peer, steps[i].number}, MessagePair{rank, i, steps[i].peer, UINT32_MAX})
               .second)
        fail(rank, steps[i].peer, steps[i].number, "is sent twice");
  }
  for (int rank = 0; rank < static_cast<int>(world.schedules.size()); ++rank) {
    const auto& steps = world.schedules[static_cast<std::size_t>(rank)].steps;
    for (std::uint32_t i = 0; i < steps.size(); ++i) {
      if (steps[i].kind != ScheduleStep::Kind::receive) continue;
      const auto found = pairs.find({steps[i].peer, rank, steps[i].number});
      if (found == pairs.end()) fail(steps[i].peer, rank, steps[i].number, "is never sent");
      if (found->second.receive != UINT32_MAX) fail(steps[i].peer, rank, steps[i].number, "is received twice");
      found->second.receive = i;
    }
  }
  std::vector<MessagePair> all;
  for (const auto& [key, pair] : pairs) {
    if (pair.receive == UINT32_MAX) fail(pair.from, pair.to, std::get<2>(key), "is never received");
    all.push_back(pair);
  }
  return all;
}

void drop_dependency(Schedule& schedule, std::size_t which) {
  std::size_t seen = 0;
  for (ScheduleStep& step : schedule.steps) {
    if (which >= seen + step.dependents) {
      seen += step.dependents;
      continue;
    }
    // The last dependent replaces the dropped one.
    const auto first = schedule.dependents.begin() + step.first_dependent;
    std::swap(first[static_cast<std::ptrdiff_t>(which - seen)], first[step.dependents - 1]);
    --schedule.steps[first[step.dependents - 1]].waits_for;
    --step.dependents;
    return;
  }
}

}  // namespace tessera::comm_test
