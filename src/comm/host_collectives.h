// Collectives on small host data, such as losses and times, over a backend of any memory.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/base/memory_pool.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// True if the work is done. Throws its error. Never blocks.
TESSERA_API bool finished(Work& work);

/// Collectives on host memory over any communicator. For one thread. Every call is collective and blocks unless
/// documented otherwise; errors are the communicator's.
class TESSERA_API HostCollectives {
 public:
  /// A collective from `in` to `out` with these options (and its own label).
  using Exchange = std::function<Work(ConstView in, View out, OpOptions options)>;

  /// Both must outlive this object. `device` is the communicator's device; its memory is used if the communicator
  /// doesn't support host memory.
  HostCollectives(Communicator& communicator, base::DeviceRuntime& device)
      : communicator_(communicator), device_(device) {}
  /// Waits until the device no longer uses the memory of collectives that were not waited for; they end at their
  /// deadlines at the latest.
  ~HostCollectives();
  HostCollectives(const HostCollectives&) = delete;
  HostCollectives& operator=(const HostCollectives&) = delete;

  Communicator& communicator() { return communicator_; }  ///< the communicator given to the constructor
  int rank() const { return communicator_.rank(); }       ///< the communicator's
  int size() const { return communicator_.size(); }       ///< the communicator's

  /// Runs the collective. `in` and `out` are host memory; `run` may receive copies of them in device memory.
  void exchange(ConstView in, View out, const Exchange& run);
  bool supports_host_memory() const;  ///< otherwise exchange() uses device memory
  /// The same, always with copies in device memory.
  void exchange_through_device(ConstView in, View out, const Exchange& run);

  /// A collective that was started and that is polled instead of waited for. It may be destroyed before it is done, but
  /// must not outlive its HostCollectives.
  class TESSERA_API AsyncCollective;
  /// The same as exchange(), without blocking: `in` and `out` must stay valid until it is done.
  std::unique_ptr<AsyncCollective> begin(ConstView in, View out, const Exchange& run);
  /// The same as begin(), always with copies in device memory.
  std::unique_ptr<AsyncCollective> begin_through_device(ConstView in, View out, const Exchange& run);

  /// Reduces in place.
  template <class T>
  void all_reduce(T* values, std::size_t count, ReduceOp op, std::string_view label) {
    const View view = view_of(values, count);
    exchange(view, view, [&](ConstView in, View out, OpOptions options) {
      options.label = label;
      return communicator_.all_reduce(in, out, op, options);
    });
  }
  /// Gathers an equal number of values from each rank, by rank.
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
  /// A pinned and a device buffer, used by one exchange at a time.
  struct StagingBuffer {
    base::Buffer pinned, device;
    bool used = false;
  };
  StagingBuffer& room_for(std::size_t bytes);

  Communicator& communicator_;
  base::DeviceRuntime& device_;
  std::unique_ptr<base::Stream> stream_;               // created at the first use of device memory, as are rooms_
  std::vector<std::unique_ptr<StagingBuffer>> rooms_;  // kept, since allocating device memory synchronizes the device
};

/// See HostCollectives::begin(). Used by the thread of its HostCollectives.
class HostCollectives::AsyncCollective {
 public:
  ~AsyncCollective();
  AsyncCollective(const AsyncCollective&) = delete;
  AsyncCollective& operator=(const AsyncCollective&) = delete;
  /// True once `out` holds the result. Throws the collective's error. Never blocks.
  bool done();

 private:
  friend class HostCollectives;
  AsyncCollective() = default;
  void wait();
  void finish();  // copies the result to the caller's host memory
  bool done_ = false;
  Work work_;  // work in host memory
  StagingBuffer* room_ = nullptr;
  View out_;
  std::size_t offset_ = 0;  // offset of `out` in the staging buffer
  base::Event arrived_;     // the result is in the staging buffer
};

/// A text of each rank, cut after 255 bytes. Collective.
TESSERA_API std::vector<std::string> texts_of_ranks(HostCollectives& world, const std::string& mine);

/// Throws the same Mismatch on all ranks if a setting differs between them: it begins with `owner`, and names the
/// setting, its values and their ranks. All ranks pass the same names. Collective.
TESSERA_API void require_alike(HostCollectives& world, const std::vector<SharedSetting>& settings,
                               std::string_view owner);

}  // namespace tessera::comm
