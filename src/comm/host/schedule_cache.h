// Selects and caches the schedules of a communicator's calls.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "tessera/comm/communicator.h"
#include "tessera/comm/native_collectives.h"
#include "tessera/comm/schedule.h"

namespace tessera::comm::host {

class HostRuntime;

/// Used by the thread that calls the communicator.
class ScheduleCache {
 public:
  /// Whether the library below runs whole operations of this communicator.
  enum class Native {
    absent,  ///< it has none, or not for these ranks
    available,
    exhausted,  ///< it has no communicator left for these ranks
  };

  ScheduleCache(HostRuntime& runtime, int rank, int ranks) : runtime_(runtime), rank_(rank), ranks_(ranks) {}
  void set_native(Native native) noexcept { native_ = native; }

  /// The schedule of the algorithm that TESSERA_ALGO names, else of the default one. Throws InvalidUsage, Unsupported.
  std::shared_ptr<const Schedule> find(const OpDesc& call);
  /// The schedule of the default algorithm, regardless of TESSERA_ALGO; not kept.
  std::shared_ptr<const Schedule> make_default(const OpDesc& call) const;
  /// The schedule of an operation of the library; not kept.
  std::shared_ptr<const Schedule> make_native(const OpDesc& call) const;

 private:
  struct SpecHash {
    std::size_t operator()(const CollectiveSpec& spec) const noexcept;
  };
  CollectiveSpec spec_of(const OpDesc& call) const;
  std::string_view algorithm_for(const CollectiveSpec& spec) const;
  std::string native_refusal(const CollectiveSpec& spec) const;
  bool runs_native(const CollectiveSpec& spec, std::string_view algorithm) const;

  HostRuntime& runtime_;
  const int rank_;
  const int ranks_;
  Native native_ = Native::absent;
  std::unordered_map<CollectiveSpec, std::shared_ptr<const Schedule>, SpecHash> schedules_;
};

}  // namespace tessera::comm::host
