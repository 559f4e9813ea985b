// Messages about operations that the ranks of a world exchange over a control channel. By them a rank queries the
// progress of the others, and informs them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm {

struct ControlMessage {
  enum class Kind : char {
    failure = 'F',         ///< number: its FailureKind; text: the cause
    progress_query = 'Q',  ///< number: the query's
    progress_reply = 'A',  ///< number: the query's; value: the last operation called
    op_signature = 'C',    ///< checked mode; number: the operation's; value: its fingerprint; text: its signature
    group_key = 'G',       ///< text: what the members of a new communicator need of its first one
    symmetric = 'S',       ///< number: of the step; value: the bytes; text: why it can't, or what has failed, or ""
    departure = 'L',       ///< value: the last operation called; text: the first failure, if any
    peer_lost = 'X',       ///< never sent: reported by the channel itself
    damaged = 'D',         ///< likewise
  };
  Kind kind = Kind::departure;
  int from = 0;  ///< world rank; set by the receiver
  std::uint64_t communicator = 0;
  std::uint64_t number = 0;
  std::uint64_t value = 0;
  std::string text;
};

/// Truncates texts of more than 4096 bytes.
TESSERA_API std::string format_message(const ControlMessage& message);
/// Empty if the text is not such a message.
TESSERA_API std::optional<ControlMessage> parse_message(std::string_view text);

/// Answers the queries of other ranks by itself, on the control thread: a rank that computes or waits is not silent.
/// Thread-safe.
class TESSERA_API ControlPeerMonitor {
 public:
  /// The number of the last collective called on a communicator.
  using LastCall = std::shared_ptr<const std::atomic<std::uint64_t>>;

  explicit ControlPeerMonitor(Bootstrap& bootstrap);
  /// Collective: opens the channel `name`. `on_message` receives all but queries, also lost and damaged ranks, on the
  /// control thread, perhaps before this returns.
  void open(std::string_view name, std::function<void(ControlMessage)> on_message);
  /// After return, `on_message` does not run any more, and nothing is sent.
  void close() noexcept;

  /// Queries about `communicator` are answered from `called`.
  void add(std::uint64_t communicator, LastCall called);
  void remove(std::uint64_t communicator);

  /// Sends to a rank of the world, or to all others for ControlChannel::kAll.
  void send(int rank, const ControlMessage& message) noexcept;
  /// Sends to these ranks except this one.
  void send(std::span<const int> ranks, const ControlMessage& message) noexcept;
  /// The last collective that each of these ranks has called on `communicator`, by rank of the world; none for a rank
  /// that does not reply in time. Queries those that forward for them too. Does not wait for a rank that has left or
  /// died, nor again for one that has been silent since an earlier query: operations of several communicators reach
  /// their deadline together.
  std::vector<std::optional<std::uint64_t>> query_progress(std::uint64_t communicator,
                                                           std::span<const int> ranks) noexcept;
  /// The first rank that forwards messages to `rank` and is not among these replies; -1: all are. Then it is unknown
  /// whether `rank` would reply.
  int silent_forwarder(int rank, std::span<const std::optional<std::uint64_t>> replies) const;
  /// Queries all ranks. False: one has neither left nor died, but does not reply in time.
  bool all_respond() noexcept;
  /// Sends a query without a question; returns its number, for replied_to_probe().
  std::uint64_t send_probe(int rank) noexcept;
  bool replied_to_probe(int rank, std::uint64_t probe) const noexcept;

 private:
  enum class Peer : std::uint8_t { responds, silent, gone };

  void on_query(const ControlMessage& query) noexcept;
  void on_reply(const ControlMessage& reply) noexcept;
  void on_gone(int rank) noexcept;

  Bootstrap& bootstrap_;
  std::unique_ptr<ControlChannel> channel_;
  std::atomic<ControlChannel*> open_channel_{nullptr};  ///< the same, for threads that send
  std::mutex query_mutex_;                              ///< one query at a time
  mutable std::mutex mutex_;                            ///< guards what follows; no lock is acquired while it is held
  std::condition_variable replied_;
  std::map<std::uint64_t, LastCall> called_;  ///< by communicator
  std::uint64_t query_ = 0;
  std::vector<std::optional<std::uint64_t>> replies_;  ///< by rank of the world
  std::vector<Peer> peers_;                            ///< likewise
  std::vector<std::uint64_t> probe_replies_;           ///< likewise: the last probe to which each has replied
  std::atomic<std::uint64_t> probes_{0};
};

}  // namespace tessera::comm
