// What ranks can do with each other before a communicator exists: find each other, and exchange small things.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/base/file.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// What ranks hear from each other once they run: from the bootstrap's own thread, one call at a time, possibly before
/// open_channel() has returned.
struct ControlEvents {
  /// Once for each rank that dies. Not for one that left in good order (whose bootstrap was destroyed).
  std::function<void(int rank)> lost;
  std::function<void(int from, std::string_view message)> message;  ///< what `from` told on this channel
  /// What came from this rank over the network is not what it sent: nothing of it was told here, and nothing more will
  /// be; the other way still works. Without this it counts as lost.
  std::function<void(int rank)> damaged = nullptr;
};

/// A channel between all ranks beside their operations, served by a thread of its own: it works while the ranks compute
/// or hang. Destroying it ends the events (it waits for one that is running, unless it is destroyed from there). Must
/// go before its bootstrap.
class TESSERA_API ControlChannel {
 public:
  virtual ~ControlChannel();
  /// To rank `to`, or to all others where it is kAll. Any thread; returns at once. In order per sender and receiver;
  /// lost where the way (it may lead over rank 0) is dead, or where megabytes wait for a receiver that doesn't read.
  /// What is beyond kLongestMessage bytes is cut off.
  virtual void tell(int to, std::string_view message) noexcept = 0;
  static constexpr int kAll = -1;
  static constexpr std::size_t kLongestMessage = 65'000;
};

/// Connects the ranks of a world while it is set up, and carries its control channels afterwards. The exchanges are
/// collective and wait, at longest until the deadline given to whoever made the bootstrap; they throw Timeout (naming
/// the ranks that are missing), PeerLost and SystemError.
class TESSERA_API Bootstrap {
 public:
  using Token = std::array<std::uint8_t, 32>;

  virtual ~Bootstrap();
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  /// Ranks are threads of this process: shared objects travel as pointers.
  virtual bool in_process() const noexcept = 0;

  /// What every rank gave, in rank order.
  virtual std::vector<std::string> all_gather(std::string_view blob) = 0;
  /// In-process only: the object of every rank, in rank order.
  virtual std::vector<std::shared_ptr<void>> all_gather_objects(std::shared_ptr<void> object);
  /// Processes of one host only (else Unsupported): a duplicate of every rank's descriptor, in rank order.
  virtual std::vector<UniqueFd> all_gather_fds(int fd);

  /// Opens the channel `name` (at most 16 letters). Collective, after the exchanges: every rank opens the same names in
  /// the same order, and all wait for all. Ranks that are threads don't die alone; processes do. Once rank 0 has left
  /// in good order, ranks on other hosts are not missed any more.
  virtual std::unique_ptr<ControlChannel> open_channel(std::string_view name, ControlEvents events) = 0;

  /// Which host each rank runs on: equal names are one host (boot id and network namespace, or TESSERA_HOST_ID). A
  /// claim, to be proved by sharing memory.
  virtual const std::vector<std::string>& hosts() const noexcept = 0;
  /// What the ranks of this world know and nobody else does.
  virtual const Token& token() const noexcept = 0;
  /// The numeric address by which this rank reaches rank 0's host; a loopback address where all are on one host.
  virtual std::string local_address() const = 0;
};

/// For what works on one host only: throws InvalidUsage "WHAT needs all ranks on one host: ..." that names two ranks
/// which say that they are not. All ranks throw the same.
TESSERA_API void require_one_host(const Bootstrap& bootstrap, std::string_view what, std::string_view advice = "");

}  // namespace tessera::comm
