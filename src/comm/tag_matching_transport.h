// A Transport over a Link. A short message uses the eager protocol: active messages carry it, with one copy on each
// side. A long message uses a rendezvous protocol: the data moves directly between the two buffers once the sender's
// RTS and the receiver's CTS, in either order, were sent. So no long message is in flight without a receive, and each
// side knows the size before memory is written. Both sides poll, so a cancelled message either has not started or ends
// soon; a cancelled receive that had sent its CTS is replaced by a drain buffer until the sender replies.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/link.h"
#include "tessera/comm/transport.h"

namespace tessera::comm {

/// A transport over any link; see the top of this file. Owns its link.
class TESSERA_API TagMatchingTransport final : public Transport, private LinkEvents {
 public:
  /// Called once, by the constructor; `events` outlives the link.
  using LinkFactory = std::function<std::unique_ptr<Link>(LinkEvents& events)>;
  /// `events` outlives the transport. Throws what `make_link` throws.
  TagMatchingTransport(const Bootstrap& bootstrap, TransportEvents& events, const LinkFactory& make_link);
  ~TagMatchingTransport() override;

  void send(Message& message) noexcept override;  ///< posts the send; eager messages may complete in the call
  /// Posts the receive; it may complete in the call if the message is here.
  void receive(Message& message) noexcept override;
  bool arrived(int peer, const MessageTag& tag) noexcept override;
  bool knows_arrivals() const noexcept override { return true; }
  void cancel(Message& message) noexcept override;
  void discard_communicator(std::uint32_t communicator) noexcept override;
  bool poll(bool with_health_check) noexcept override;
  bool needs_polls() const noexcept override;
  ProgressWaiter& waiter() noexcept override;
  NativeCollectives* native() noexcept override;
  void close(bool failed) noexcept override;

 private:
  struct MatchQueues;
  struct UnexpectedMessage;
  struct DrainBuffer;

  void on_am(const AmHeader& header, std::span<const std::byte> payload) noexcept override;
  void bulk_done(Message& message) noexcept override;
  void bulk_failed(Message& message, const std::string& why) noexcept override;
  void peer_lost(int peer, const std::string& why) noexcept override;
  void link_failed(const std::string& why) noexcept override;

  AmHeader header_of(AmHeader::Kind kind, const Message& message, std::uint64_t slot) const noexcept;
  void send_am(AmHeader::Kind kind, const Message& message, std::uint64_t slot) noexcept;
  void send_eager(Message& message) noexcept;
  void start_bulk_send(Message& message, const AmHeader& cts) noexcept;
  void match(Message& receive, const AmHeader& header, std::span<const std::byte> payload) noexcept;
  bool end_bulk(Message& message, bool may_come) noexcept;
  void post_drain(const Message& instead_of, std::uint64_t slot) noexcept;
  void on_cts_cancel(const AmHeader& header) noexcept;
  void close_drain(int peer, std::uint64_t slot) noexcept;
  void finish(Message& message, std::size_t bytes) noexcept;
  void deliver(Message& message, std::size_t bytes) noexcept;
  bool awaits_replies() const noexcept;
  bool deliver_deferred() noexcept;

  const int rank_;
  const std::uint32_t world_;
  TransportEvents& events_;
  std::unique_ptr<MatchQueues> queues_;
  std::unique_ptr<Link> link_;
  std::uint64_t next_slot_ = 0;
  Clock::time_point drains_until_;                 ///< deadline of the replies to cancelled CTS messages
  std::vector<std::pair<int, std::string>> lost_;  ///< reported by the next poll(), as is `failure_`
  std::string failure_;
  bool cancelling_ = false;
  bool cancelled_any_ = false;  ///< whether any message was ever cancelled
  bool dead_ = false;
};

}  // namespace tessera::comm
