// One-sided operations: memory of each rank that the others read and write without its help.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// A part of each rank's host memory, of any size, to which the others put and from which they get while the rank does
/// something else: its progress thread serves them. A rank learns by signals what has arrived. Every backend whose
/// messages have tags carries windows, by messages of a communicator of their own.
///
/// put() and get() are not ordered among each other. A signal arrives after all that its sender has put to the same
/// rank before. What a rank puts twice to the same place, or reads and writes itself meanwhile, is undefined until a
/// signal tells.
///
/// Errors: as those of a Communicator. A fatal one fails this window on all ranks, and not the communicator that it was
/// made from. One thread at a time calls.
class TESSERA_API Window {
 public:
  /// Whether windows of this communicator exist: its backend's messages have tags.
  static bool supported(const Communicator& world) { return world.capabilities().message_tags; }

  /// Collective and blocking. The others access `memory`, which outlives the window; a count of 0 is allowed. The
  /// window has the communicator's timeout. Throws Unsupported, InvalidUsage for memory of a device, and what split()
  /// throws.
  Window(Communicator& world, View memory);
  /// As close(), without its errors. If an exception ends it, or close() has failed, it doesn't wait for the others and
  /// fails the window on the other ranks.
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  int rank() const noexcept { return channel_->rank(); }                                   ///< the communicator's
  int size() const noexcept { return channel_->size(); }                                   ///< the communicator's
  std::size_t bytes(int peer) const { return sizes_.at(static_cast<std::size_t>(peer)); }  ///< of a rank's part

  /// Writes `data` at `offset` bytes of the part of `peer`, which may be this rank. Done when `data` may be reused.
  Work put(ConstView data, int peer, std::size_t offset, OpOptions options = {});
  /// Reads `data` from `offset` bytes of the part of `peer`. Done when `data` has arrived.
  Work get(View data, int peer, std::size_t offset, OpOptions options = {});
  /// Tells `peer` that what was put there before has arrived.
  Work signal(int peer, OpOptions options = {});
  /// Waits for `count` signals of `peer`, and takes them. Throws Timeout that says how many have come, after which the
  /// window stays usable.
  void wait_signal(int peer, std::uint64_t count = 1, OpOptions options = {});
  /// Signals of `peer` that have come and were not taken yet.
  std::uint64_t signals(int peer) const;

  /// Collective and blocking: afterwards all that was put has arrived, and no call is allowed. Own gets must be done.
  void close();

  /// Bytes that this window has sent.
  TrafficStats traffic() const { return channel_->traffic(); }

 private:
  struct Message;
  struct Peer;

  void check(std::string_view call, int peer, std::size_t offset, std::size_t bytes) const;
  Work send(const Message& message, int peer, const P2POp* beside, const OpOptions& options);
  std::byte* at(std::uint64_t offset) const { return static_cast<std::byte*>(memory_.data) + offset; }
  Peer& peer_of(int rank) const { return *peers_.at(static_cast<std::size_t>(rank)); }
  // Under mutex_:
  void serve(int rank) noexcept;
  void take_message(int rank);
  void finish_arrivals(Peer& from) noexcept;
  void fail(std::exception_ptr error) noexcept;

  const View memory_;
  const int exceptions_ = std::uncaught_exceptions();
  std::vector<std::size_t> sizes_;
  /// Guards what follows and the channel's calls. A callback of an operation that has just ended runs in the call that
  /// adds it, so the mutex is recursive.
  mutable std::recursive_mutex mutex_;
  std::condition_variable_any changed_;
  std::list<Message> sent_;       ///< on their way, or unused
  std::vector<Message*> unused_;  ///< of sent_
  std::exception_ptr failure_;
  bool open_ = true;
  bool tried_to_close_ = false;
  std::unique_ptr<Communicator> channel_;
  std::vector<std::unique_ptr<Peer>> peers_;
};

}  // namespace tessera::comm
