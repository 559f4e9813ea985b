#include "tools/plan/process_groups.h"

#include <algorithm>

namespace tessera::tools {

using comm::sim::RankSet;

ProcessGroups::ProcessGroups(const StepGraph& step, int ranks) : ranks_(ranks) {
  int next = 1;
  for (const StepNode& node : step) {
    if (!node.operation) continue;
    const RankSet& members = node.operation->members;
    if (!index_.emplace(std::pair(members.stride, members.ranks), shapes_.size()).second) continue;
    const bool everyone = members.ranks == ranks;
    shapes_.push_back({members.stride, members.ranks, everyone ? 0 : next});
    if (!everyone) next += ranks / members.ranks;
  }
}

ProcessGroups::Group ProcessGroups::group_of(const Shape& shape, int rank) const {
  const int block = shape.stride * shape.ranks;  // neighbors, divided into `stride` groups
  const int place = rank % shape.stride;
  return {shape.first_id + rank / block * shape.stride + place,
          {rank / block * block + place, shape.stride, shape.ranks}};
}

ProcessGroups::Group ProcessGroups::of(const comm::sim::SimulatedOp& operation, int rank) const {
  return group_of(shapes_.at(index_.at({operation.members.stride, operation.members.ranks})), rank);
}

std::vector<ProcessGroups::Group> ProcessGroups::of_rank(int rank) const {
  std::vector<Group> groups;
  for (const Shape& shape : shapes_) groups.push_back(group_of(shape, rank));
  return groups;
}

std::vector<ProcessGroups::Group> ProcessGroups::all() const {
  std::map<int, Group> groups;
  for (int rank = 0; rank < ranks_; ++rank)
    for (const Group& group : of_rank(rank)) groups.emplace(group.id, group);
  std::vector<Group> sorted;
  for (const auto& [id, group] : groups) sorted.push_back(group);
  return sorted;
}

std::vector<int> ranks_in(const RankSet& members) {
  std::vector<int> ranks(static_cast<std::size_t>(members.ranks));
  for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = members.first + static_cast<int>(i) * members.stride;
  return ranks;
}

}  // namespace tessera::tools
