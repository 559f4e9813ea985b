#include "backends/nccl/symmetric_votes.h"

#include <utility>

namespace tessera::comm::nccl {

std::uint64_t SymmetricVotes::next_step() {
  const std::lock_guard lock(mutex_);
  return ++step_;
}

void SymmetricVotes::submit(std::size_t member, std::uint64_t step, Vote vote) {
  const std::lock_guard lock(mutex_);
  steps_[step][member] = std::move(vote);
}

std::optional<std::size_t> SymmetricVotes::absent(std::uint64_t step, std::size_t members) const {
  const std::lock_guard lock(mutex_);
  const auto found = steps_.find(step);
  for (std::size_t k = 0; k < members; ++k)
    if (found == steps_.end() || !found->second.contains(k)) return k;
  return std::nullopt;
}

std::vector<SymmetricVotes::Vote> SymmetricVotes::extract(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  std::vector<Vote> votes;
  auto node = steps_.extract(step);
  for (auto& [member, vote] : node.mapped()) votes.push_back(std::move(vote));
  return votes;
}

}  // namespace tessera::comm::nccl
