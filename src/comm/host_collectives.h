// Small things of the host that ranks tell each other, such as losses and times, whatever memory the backend moves.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/base/memory_pool.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// True when it is finished; throws what went wrong. Never waits.
TESSERA_API bool finished(Work& work);

/// Collectives on the host's memory over any communicator. Used by one thread. Every call is collective, and waits
/// unless it says otherwise; errors are the communicator's.
class TESSERA_API HostCollectives {
 public:
  /// A collective from `in` to `out`, with these options (and a label of its own).
  using Exchange = std::function<Work(ConstView in, View out, OpOptions options)>;

  /// Both outlive it. `device` is the communicator's; its memory is used where the communicator takes nothing else.
  HostCollectives(Communicator& communicator, base::DeviceRuntime& device)
      : communicator_(communicator), device_(device) {}

  Communicator& communicator() { return communicator_; }
  int rank() const { return communicator_.rank(); }
  int size() const { return communicator_.size(); }

  /// Runs it. `in` and `out` are the host's; what `run` is given may be copies of theirs in the device.
  void exchange(ConstView in, View out, const Exchange& run);
  bool takes_host_memory() const;  ///< else exchange() goes through the device
  /// The same, always on copies in the device.
  void exchange_through_device(ConstView in, View out, const Exchange& run);

  /// One that was begun and that nobody waits for. Of the exchange's own; it may be dropped before it is done, but not
  /// outlive it.
  class TESSERA_API AsyncCollective;
  /// As exchange(), without waiting: `in` and `out` stay valid until it is done.
  std::unique_ptr<AsyncCollective> begin(ConstView in, View out, const Exchange& run);
  std::unique_ptr<AsyncCollective> begin_through_device(ConstView in, View out, const Exchange& run);

  /// In place.
  template <class T>
  void all_reduce(T* values, std::size_t count, ReduceOp op, std::string_view label) {
    const View view = view_of(values, count);
    exchange(view, view, [&](ConstView in, View out, OpOptions options) {
      options.label = label;
      return communicator_.all_reduce(in, out, op, options);
    });
  }
  /// Everybody's numbers, as many from each, by rank.
  template <class T>
  std::vector<std::vector<T>> gather_all(const std::vector<T>& mine) {
    std::vector<T> all(mine.size() * static_cast<std::size_t>(size()));
    exchange(view_of(mine.data(), mine.size()), view_of(all.data(), all.size()),
             [&](ConstView in, View out, OpOptions options) { return communicator_.all_gather(in, out, options); });
    std::vector<std::vector<T>> by_rank;
    for (int r = 0; r < size(); ++r) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(mine.size()) * r;
      by_rank.emplace_back(first, first + static_cast<std::ptrdiff_t>(mine.size()));
    }
    return by_rank;
  }

 private:
  /// In the host's memory and in the device's, for one exchange at a time.
  struct StagingBuffer {
    base::Buffer pinned, device;
    bool used = false;
  };
  StagingBuffer& room_for(std::size_t bytes);

  Communicator& communicator_;
  base::DeviceRuntime& device_;
  std::unique_ptr<base::Stream> stream_;               // made at the first detour, as the rooms
  std::vector<std::unique_ptr<StagingBuffer>> rooms_;  // kept: making device memory stops the device
};

class HostCollectives::AsyncCollective {
 public:
  ~AsyncCollective();
  AsyncCollective(const AsyncCollective&) = delete;
  AsyncCollective& operator=(const AsyncCollective&) = delete;
  /// Whether `out` is there; it stays so. Throws what went wrong. Never waits.
  bool done();

 private:
  friend class HostCollectives;
  AsyncCollective() = default;
  void wait();
  void finish();  // what came, to the host's own memory
  bool done_ = false;
  Work work_;  // of the host's memory
  StagingBuffer* room_ = nullptr;
  View out_;
  std::size_t offset_ = 0;  // of `out` in the room
  base::Event arrived_;     // in the room
};

}  // namespace tessera::comm
