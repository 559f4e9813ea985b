#include "tessera/comm/host/schedule_cache.h"

#include "tessera/base/error.h"
#include "tessera/comm/core/argument_checker.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/host/host_runtime.h"

namespace tessera::comm::host {
namespace {

constexpr std::size_t kMaxSchedules = 256;  ///< kept for repeated calls

std::vector<std::size_t> starts_of(std::span<const std::size_t> counts) {
  std::vector<std::size_t> starts;
  if (counts.empty()) return starts;
  starts.push_back(0);
  for (const std::size_t count : counts) starts.push_back(starts.back() + count);
  return starts;
}

}  // namespace

std::size_t ScheduleCache::SpecHash::operator()(const CollectiveSpec& spec) const noexcept {
  std::size_t hash = 0xcbf29ce484222325U;
  const auto mix = [&](std::size_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 29;
  };
  mix(static_cast<std::size_t>(spec.kind));
  mix(static_cast<std::size_t>(spec.dtype) * 8 + static_cast<std::size_t>(spec.reduce));
  mix(spec.count * 2 + (spec.in_place ? 1 : 0));
  mix(static_cast<std::size_t>(spec.root));
  for (const auto* starts : {&spec.in_starts, &spec.out_starts})
    for (const std::size_t start : *starts) mix(start);
  return hash;
}

CollectiveSpec ScheduleCache::spec_of(const OpDesc& call) const {
  CollectiveSpec spec;
  spec.kind = call.kind;
  spec.dtype = call.out.dtype;
  spec.reduce = call.op.kind;
  spec.ranks = ranks_;
  spec.rank = rank_;
  spec.root = call.root;
  spec.in_place = overlap(call);
  spec.ordered = runtime_.options().deterministic;
  spec.in_starts = starts_of(call.in_counts);
  spec.out_starts = starts_of(call.out_counts);
  spec.count = larger_count(call, ranks_);
  return spec;
}

/// Why a schedule must run it instead of the library, or "". The same on all ranks.
std::string ScheduleCache::native_refusal(const CollectiveSpec& spec) const {
  const std::string request = std::string(name_of(spec.kind)) + "=" + std::string(kNativeAlgorithm);
  if (native_ != Native::available)
    return request + " needs a communicator of all ranks in the order of the world; use direct";
  if (!spec.in_starts.empty() || !spec.out_starts.empty()) return request + " needs parts of equal length; use direct";
  return {};
}

/// The algorithm if TESSERA_ALGO names none.
std::string_view ScheduleCache::algorithm_for(const CollectiveSpec& spec) const {
  if (native_ == Native::available && runtime_.transport().native()->prefers(spec) && native_refusal(spec).empty())
    return kNativeAlgorithm;
  return default_algorithm(spec);
}

/// Throws if the library can't run what should be native.
bool ScheduleCache::runs_native(const CollectiveSpec& spec, std::string_view algorithm) const {
  if (algorithm != kNativeAlgorithm || ranks_ == 1) return false;
  if (native_ == Native::exhausted)
    throw Unsupported(std::string(name_of(spec.kind)) + "=" + std::string(algorithm) + ": the library of " +
                      runtime_.capabilities().backend +
                      " had no communicator left for this one; free some before the split, or use direct");
  if (const std::string why = native_refusal(spec); !why.empty()) throw InvalidUsage(why);
  return true;
}

std::shared_ptr<const Schedule> ScheduleCache::find(const OpDesc& call) {
  CollectiveSpec spec = spec_of(call);
  const auto found = schedules_.find(spec);
  if (found != schedules_.end()) return found->second;
  std::string_view name = runtime_.algorithms().choose(call.kind, spec.count * size_of(spec.dtype));
  const bool chosen = !name.empty();
  if (!chosen) name = algorithm_for(spec);
  const bool native = runs_native(spec, name);
  if (name == kNativeAlgorithm && !native) name = default_algorithm(spec);
  auto schedule = std::make_shared<const Schedule>(native ? build_native_schedule(spec) : build_schedule(spec, name));
  if (const auto& logger = runtime_.options().communicator.logger; logger != nullptr)
    logger->write(LogLevel::info, runtime_.capabilities().backend + ": " + signature(call, ranks_) + " in " +
                                      std::to_string(ranks_) + " ranks: " + std::string(name) +
                                      (chosen ? " (TESSERA_ALGO)" : ""));
  if (schedules_.size() >= kMaxSchedules) schedules_.clear();
  schedules_.emplace(std::move(spec), schedule);
  return schedule;
}

std::shared_ptr<const Schedule> ScheduleCache::make_default(const OpDesc& call) const {
  const CollectiveSpec spec = spec_of(call);
  return std::make_shared<const Schedule>(build_schedule(spec, default_algorithm(spec)));
}

std::shared_ptr<const Schedule> ScheduleCache::make_native(const OpDesc& call) const {
  return std::make_shared<const Schedule>(build_native_schedule(spec_of(call)));
}

}  // namespace tessera::comm::host
