// Communication before a communicator exists: the ranks find each other and exchange small blobs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/base/file.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// Callbacks of a control channel. The bootstrap's own thread calls them, one at a time, possibly before open_channel()
/// has returned.
struct ControlEvents {
  /// Called once for each rank that dies, but not for a rank that closes normally (destroys its bootstrap).
  std::function<void(int rank)> lost;
  /// Called for each message from `from` on this channel.
  std::function<void(int from, std::string_view message)> message;
  /// Called when data received from this rank is corrupt. None of it is delivered, and nothing from this rank will be
  /// any more; the opposite direction still works. If null, the rank counts as lost.
  std::function<void(int rank)> damaged = nullptr;
};

/// A message channel between all ranks, independent of their operations. A thread of its own serves it, so it works
/// while the ranks compute or hang. Destroying it ends the callbacks: the destructor waits for a running one, unless
/// that callback runs the destructor. Destroy it before its bootstrap.
class TESSERA_API ControlChannel {
 public:
  virtual ~ControlChannel();
  /// Sends to rank `to`, or to all others for kAll. Any thread may call it; returns at once. Messages arrive in order
  /// per sender and receiver. A message is lost if the route (through other ranks) is broken, or if megabytes are
  /// queued for a receiver that doesn't read. Bytes beyond kMaxMessage are truncated.
  virtual void send(int to, std::string_view message) noexcept = 0;
  static constexpr int kAll = -1;                     ///< receiver of send(): all other ranks
  static constexpr std::size_t kMaxMessage = 65'000;  ///< longest message, in bytes
};

/// Connects the ranks of a world during setup and provides its control channels afterwards. The exchanges are
/// collective and block, at most until the deadline given at construction; they throw Timeout (naming the missing
/// ranks), PeerLost and SystemError.
class TESSERA_API Bootstrap {
 public:
  using Token = std::array<std::uint8_t, 32>;  ///< 32 secret bytes, which authenticate connections between the ranks
  /// Uses duplicates of the descriptors of a rank.
  using UseDescriptors = std::function<void(int rank, std::span<UniqueFd> theirs)>;
  static constexpr std::size_t kMaxDescriptors = 8;  ///< of one rank, for all_gather_fds()

  virtual ~Bootstrap();
  virtual int rank() const noexcept = 0;  ///< rank of this process or thread in the world, from 0
  virtual int size() const noexcept = 0;  ///< number of ranks in the world

  /// True if the ranks are threads of this process, which exchange shared objects as pointers.
  virtual bool in_process() const noexcept = 0;

  /// Returns the blob of every rank, in rank order.
  virtual std::vector<std::string> all_gather(std::string_view blob) = 0;
  /// Returns the object of every rank, in rank order; in-process only.
  virtual std::vector<std::shared_ptr<void>> all_gather_objects(std::shared_ptr<void> object);
  /// Passes descriptors, at most kMaxDescriptors of each rank, between processes on one host; throws Unsupported
  /// otherwise. Calls `use` for each rank, in rank order, with duplicates of that rank's, which are closed afterwards
  /// unless it moves them. Only those of a few ranks are open at once. All ranks throw an Error that `use` throws.
  virtual void all_gather_fds(std::span<const int> fds, const UseDescriptors& use);

  /// Opens the channel `name` (at most 16 letters). Collective and blocking, after the exchanges: every rank opens the
  /// same names in the same order. Ranks that are processes can be reported lost; ranks that are threads don't die
  /// alone. Once rank 0 has closed normally, the loss of ranks on other hosts is no longer detected. In a large world
  /// the channels form a tree, and a rank that has closed normally separates the ranks that it connected: neither
  /// messages nor losses pass between them any more.
  virtual std::unique_ptr<ControlChannel> open_channel(std::string_view name, ControlEvents events) = 0;

  /// The other ranks that forward a message of a channel from this rank to `to`, in order.
  virtual std::vector<int> route(int to) const;

  /// The host name of each rank: equal names mean one host (boot id and network namespace, or TESSERA_HOST_ID). A
  /// claim, which sharing memory must verify.
  virtual const std::vector<std::string>& hosts() const noexcept = 0;
  /// A secret of this world's ranks.
  virtual const Token& token() const noexcept = 0;
  /// The numeric address by which this rank reaches rank 0's host; a loopback address if all ranks are on one host.
  virtual std::string local_address() const = 0;
};

/// A setting that all ranks of a world must have alike. Its owner passes its effective value, so that a default and the
/// same value written out are equal.
struct SharedSetting {
  std::string name;   ///< name of its variable: "TESSERA_ALGO"
  std::string value;  ///< value in the spelling of the variable; "": unset
};

/// Returns what `make` returns on each rank, in rank order. If it throws an Error on a rank, all ranks throw it, with
/// that rank's number before its text unless they all had the same. Collective.
TESSERA_API std::vector<std::string> exchange(Bootstrap& bootstrap, const std::function<std::string()>& make);

/// Throws the same InvalidUsage on all ranks if a setting differs: it names the setting, its values and their ranks, as
/// `global_ranks` if that isn't empty. Errors of `own` are those of exchange(). Collective.
TESSERA_API void require_alike(Bootstrap& bootstrap, const std::function<std::vector<SharedSetting>()>& own,
                               std::span<const int> global_ranks = {});

/// "A on rank 0; B on ranks 1, 3-6": the ranks of each value, as `global_ranks` if that isn't empty. Of long values
/// only a part where they differ.
TESSERA_API std::string by_value(std::span<const std::string> values, std::span<const int> global_ranks = {});

/// Restricts code to one host: throws InvalidUsage "WHAT needs all ranks on one host: ..." that names two ranks with
/// different host names. All ranks throw the same error.
TESSERA_API void require_one_host(const Bootstrap& bootstrap, std::string_view what, std::string_view advice = "");

}  // namespace tessera::comm
