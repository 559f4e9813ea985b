// The message library under TagMatchingTransport, which makes a Transport of it: active messages to a peer, and bulk
// transfers that both ranks have agreed on. Every function runs under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/transport.h"

namespace tessera::comm {

/// The header of every active message. All ranks of a world have the same architecture.
struct AmHeader {
  /// The type of an active message, which gives `slot` and the payload their meaning.
  enum class Kind : std::uint32_t {
    eager,           ///< eager message; its payload follows
    rts,             ///< RTS: a large message of `bytes` waits for its CTS
    cts,             ///< CTS: the receive of `bytes` has started; send them as bulk number `slot`
    cts_cancel,      ///< cancels the CTS of that slot, since its receive was cancelled
    cts_cancel_ack,  ///< reply to it unless the bulk transfer had started: the slot receives nothing
    cma_address,     ///< location of that slot's data, from CmaLink; a CmaAddress follows
    fin              ///< FIN, the reply to a CMA address: the data was read
  };
  Kind kind = Kind::eager;  ///< selects the meaning of the other fields
  std::int32_t from = 0;    ///< rank
  MessageTag tag;           ///< tag of the message that this active message belongs to
  std::uint32_t world = 0;  ///< number of the world; messages of an earlier world are dropped
  std::uint64_t bytes = 0;  ///< bytes of the message
  std::uint64_t slot = 0;   ///< number of the bulk transfer; 0 for eager and rts
};
static_assert(sizeof(AmHeader) == 40);

/// Callbacks of a link. Active messages arrive from within poll() and cancel_bulk(), all others from any function of
/// Link.
class TESSERA_API LinkEvents {
 public:
  /// An active message arrived. `payload` is valid during the call.
  virtual void on_am(const AmHeader& header, std::span<const std::byte> payload) noexcept = 0;
  /// The memory is no longer in use, and all bytes have moved.
  virtual void bulk_done(Message& message) noexcept = 0;
  /// The bulk transfer failed; the link no longer refers to the message.
  virtual void bulk_failed(Message& message, const std::string& why) noexcept = 0;
  /// Nothing more can be exchanged with `peer`.
  virtual void peer_lost(int peer, const std::string& why) noexcept = 0;
  /// The link can no longer be used.
  virtual void link_failed(const std::string& why) noexcept = 0;

 protected:
  ~LinkEvents() = default;
};

/// The number of a world, carried by its active messages.
TESSERA_API std::uint32_t world_number(const Bootstrap& bootstrap);

/// The interface of a message library to all ranks of a world. Used under the engine's lock.
class TESSERA_API Link {
 public:
  /// Whether a cancelled bulk transfer had moved.
  enum class CancelResult {
    not_started,  ///< nothing had moved; a peer may still send to the slot
    completed,    ///< it has moved completely
    unsafe        ///< the link may access its memory as long as the link lives
  };

  /// How a link ends.
  enum class CloseMode {
    graceful,      ///< no message was cancelled
    after_cancel,  ///< messages were cancelled, but everything else that was sent arrives
    abortive       ///< waits for nothing
  };

  virtual ~Link();
  /// The largest payload of an eager message in bytes. The same on all ranks.
  virtual std::size_t longest_payload() const noexcept = 0;
  /// Whether the link has memory for another eager message.
  virtual bool can_send_eager() const noexcept = 0;
  /// Copies header and payload and sends them; they arrive exactly once. Active messages may overtake bulk and each
  /// other.
  virtual void send_am(int peer, const AmHeader& header, std::span<const std::byte> payload) noexcept = 0;
  /// Moves Message::data to or from Message::peer. A send matches a receive by (sender, receiver, slot); their sizes
  /// are equal. The link may use Message::handle.
  virtual void send_bulk(Message& message, std::uint64_t slot) noexcept = 0;
  /// The counterpart of send_bulk(): writes Message::data.
  virtual void receive_bulk(Message& message, std::uint64_t slot) noexcept = 0;
  /// Ends an incomplete bulk transfer within about a second. bulk_done() is then not called for it, but may be called
  /// for others.
  virtual CancelResult cancel_bulk(Message& message) noexcept = 0;
  /// The same as Pollable::poll(); calls the LinkEvents.
  virtual bool poll(bool with_health_check) noexcept = 0;
  /// The same as Transport::waiter(). Valid while the link lives.
  virtual ProgressWaiter& waiter() noexcept = 0;
  /// Native collectives, which poll() progresses. Null if there are none.
  virtual NativeCollectives* native() noexcept { return nullptr; }
  /// Sends what is queued, within a bounded time, and releases everything. The last call.
  virtual void close(CloseMode how) noexcept = 0;
};

}  // namespace tessera::comm
