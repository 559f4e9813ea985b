// Selects and caches the schedules of a communicator's calls.
#include <functional>

#include "tessera/base/error.h"
#include "tessera/comm/core/format.h"
#include "tessera/comm/host/host_group.h"

namespace tessera::comm::host {
namespace {

constexpr std::size_t kMostSchedules = 256;  ///< kept for repeated calls

std::vector<std::size_t> starts_of(std::span<const std::size_t> counts) {
  std::vector<std::size_t> starts;
  if (counts.empty()) return starts;
  starts.push_back(0);
  for (const std::size_t count : counts) starts.push_back(starts.back() + count);
  return starts;
}

bool in_place(const OpDesc& call) {
  const auto* in = static_cast<const std::byte*>(call.in.data);
  const auto* out = static_cast<const std::byte*>(call.out.data);
  if (call.in.bytes() == 0 || call.out.bytes() == 0) return false;
  const std::less<> before;  // orders unrelated pointers too
  return before(in, out + call.out.bytes()) && before(out, in + call.in.bytes());
}

}  // namespace

std::size_t HostGroup::ProblemHash::operator()(const CollectiveSpec& problem) const noexcept {
  std::size_t hash = 0xcbf29ce484222325U;
  const auto mix = [&](std::size_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 29;
  };
  mix(static_cast<std::size_t>(problem.kind));
  mix(static_cast<std::size_t>(problem.dtype) * 8 + static_cast<std::size_t>(problem.reduce));
  mix(problem.count * 2 + (problem.in_place ? 1 : 0));
  mix(static_cast<std::size_t>(problem.root));
  for (const auto* starts : {&problem.in_starts, &problem.out_starts})
    for (const std::size_t start : *starts) mix(start);
  return hash;
}

CollectiveSpec HostGroup::problem_of(const OpDesc& call) const {
  CollectiveSpec problem;
  problem.kind = call.kind;
  problem.dtype = call.out.dtype;
  problem.reduce = call.op.kind;
  problem.ranks = size();
  problem.rank = rank_;
  problem.root = call.root;
  problem.in_place = in_place(call);
  problem.ordered = world_->options().deterministic;
  problem.in_starts = starts_of(call.in_counts);
  problem.out_starts = starts_of(call.out_counts);
  problem.count = larger_count(call, size());
  return problem;
}

/// Why a schedule must run it instead of the library, or "". The same on all ranks.
std::string HostGroup::native_refusal(const CollectiveSpec& problem) const {
  const std::string asked = std::string(name_of(problem.kind)) + "=" + std::string(kNativeAlgorithm);
  if (native_ == nullptr)
    return asked + " is for communicators of all ranks of the world, in its order; direct is for any";
  if (!problem.in_starts.empty() || !problem.out_starts.empty())
    return asked + " needs parts of equal length; direct takes any";
  return {};
}

/// The algorithm if TESSERA_ALGO names none.
std::string_view HostGroup::algorithm_for(const CollectiveSpec& problem) const {
  if (native_ != nullptr && world_->transport().native()->prefers(problem) && native_refusal(problem).empty())
    return kNativeAlgorithm;
  return default_algorithm(problem);
}

std::shared_ptr<const Schedule> HostGroup::schedule_for(const OpDesc& call) {
  CollectiveSpec problem = problem_of(call);
  const auto found = schedules_.find(problem);
  if (found != schedules_.end()) return found->second;
  std::string_view name = world_->algorithms().choose(call.kind, problem.count * size_of(problem.dtype));
  const bool chosen = !name.empty();
  if (!chosen) name = algorithm_for(problem);
  const bool native = name == kNativeAlgorithm && size() > 1;
  if (native && native_used_up_)
    throw Unsupported(std::string(name_of(call.kind)) + "=" + std::string(name) + ": the library of " +
                      world_->capabilities().backend +
                      " had no communicator left for this one: free some before the split, or take direct");
  if (native)
    if (const std::string why = native_refusal(problem); !why.empty()) throw InvalidUsage(why);
  if (size() == 1 && name == kNativeAlgorithm) name = default_algorithm(problem);
  auto schedule =
      std::make_shared<const Schedule>(native ? build_native_schedule(problem) : build_schedule(problem, name));
  if (options_.logger != nullptr)
    options_.logger->write(LogLevel::info, world_->capabilities().backend + ": " + signature(call, size()) + " in " +
                                               std::to_string(size()) + " ranks: " + std::string(name) +
                                               (chosen ? " (TESSERA_ALGO)" : ""));
  if (schedules_.size() >= kMostSchedules) schedules_.clear();
  schedules_.emplace(std::move(problem), schedule);
  return schedule;
}

}  // namespace tessera::comm::host
