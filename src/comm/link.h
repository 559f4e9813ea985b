// What a library of messages must be able to do so that TagMatchingTransport makes a Transport of it: short notes to a
// peer, and bulk between two ranks that have agreed on it. Everything runs under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/transport.h"

namespace tessera::comm {

/// What every note begins with. All ranks of a world have one architecture.
struct AmHeader {
  enum class Kind : std::uint32_t {
    content,   ///< a short message itself; its bytes follow
    announce,  ///< a long message of `bytes` waits to be asked for
    ask,       ///< send it as bulk number `slot`: its receive of `bytes` has started
    withdraw,   ///< the ask with that slot: its receive is given up
    withdrawn,  ///< the answer, unless bulk had begun by then: nothing will come for that slot
    offer,      ///< of CmaLink: where the bulk with that slot lies; an Offer follows
    taken       ///< the answer: it was read
  };
  Kind kind = Kind::content;
  std::int32_t from = 0;  ///< rank
  MessageTag tag;
  std::uint32_t world = 0;  ///< a number of that world's own: what is left of an earlier one is thrown away
  std::uint64_t bytes = 0;  ///< of the message
  std::uint64_t slot = 0;
};
static_assert(sizeof(AmHeader) == 40);

/// Who is told what the wire brings: notes from within poll() and cancel_bulk(), the rest from any of Wire's functions.
class TESSERA_API LinkEvents {
 public:
  virtual void note_arrived(const AmHeader& header, std::span<const std::byte> payload) noexcept = 0;
  /// Its memory is free, and all bytes have moved.
  virtual void bulk_done(Message& message) noexcept = 0;
  /// Bulk ended with an error; the wire has forgotten the message.
  virtual void bulk_failed(Message& message, const std::string& why) noexcept = 0;
  virtual void peer_lost(int peer, const std::string& why) noexcept = 0;
  virtual void link_failed(const std::string& why) noexcept = 0;

 protected:
  ~LinkEvents() = default;
};

/// The number of a world that its notes carry.
TESSERA_API std::uint32_t world_number(const Bootstrap& bootstrap);

class TESSERA_API Link {
 public:
  enum class CancelResult {
    before,  ///< nothing of it had moved; a peer may still send to the slot
    after,   ///< it has moved, to its end
    never    ///< the wire can't promise to leave its memory alone as long as the wire lives
  };

  enum class CloseMode {
    orderly,
    with_failures,  ///< messages were given up, but what else was sent arrives
    broken          ///< nothing is waited for
  };

  virtual ~Link();
  /// Messages up to this many bytes are content of a note. The same on all ranks.
  virtual std::size_t longest_payload() const noexcept = 0;
  /// Whether another content note fits into the wire's memory.
  virtual bool can_send_eager() const noexcept = 0;
  /// Header and payload are copied, sent, and arrive once. Notes may overtake bulk, and each other.
  virtual void send_note(int peer, const AmHeader& header, std::span<const std::byte> payload) noexcept = 0;
  /// Message::data to or from Message::peer; the two are joined by (sender, receiver, slot), and have equal sizes. The
  /// wire may use Message::handle.
  virtual void send_bulk(Message& message, std::uint64_t slot) noexcept = 0;
  virtual void receive_bulk(Message& message, std::uint64_t slot) noexcept = 0;
  /// Ends a bulk that is not done, within a second or so; bulk_done() is then not called for it, but perhaps for
  /// others.
  virtual CancelResult cancel_bulk(Message& message) noexcept = 0;
  virtual bool poll(bool with_health_check) noexcept = 0;
  virtual ProgressWaiter& waiter() noexcept = 0;
  /// Whole collectives; polled by poll(). Null where there are none.
  virtual NativeCollectives* native() noexcept { return nullptr; }
  /// Sends what is left, bounded in time, and lets go of everything. The last call.
  virtual void close(CloseMode how) noexcept = 0;
};

}  // namespace tessera::comm
