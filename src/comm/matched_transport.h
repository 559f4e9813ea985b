// A Transport over a Wire. Short messages travel in notes and are copied once on either side. Long ones are announced
// by the sender and asked for by the receiver, whichever comes first; only when both have happened do they move,
// straight between the two buffers. So nothing long is ever under way that nobody waits for, every size is known to the
// other side before memory is written, and a message that is given up is one that has not begun, or one that its peer
// completes.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/transport.h"
#include "tessera/comm/wire.h"

namespace tessera::comm {

class TESSERA_API MatchedTransport final : public Transport, private WireEvents {
 public:
  using WireFactory = std::function<std::unique_ptr<Wire>(WireEvents& events)>;
  MatchedTransport(int rank, TransportEvents& events, const WireFactory& make_wire);
  ~MatchedTransport() override;

  void send(Message& message) noexcept override;
  void receive(Message& message) noexcept override;
  void cancel(Message& message) noexcept override;
  bool poll(bool thorough) noexcept override;
  Sleeper& sleeper() noexcept override;
  void close(bool failed) noexcept override;

 private:
  struct Tables;
  struct Arrived;
  struct Sink;

  void note_arrived(const NoteHeader& header, std::span<const std::byte> payload) noexcept override;
  void bulk_done(Message& message) noexcept override;
  void bulk_failed(Message& message, const std::string& why) noexcept override;
  void peer_lost(int peer, const std::string& why) noexcept override;
  void wire_failed(const std::string& why) noexcept override;

  void send_note(NoteHeader::Kind kind, const Message& message, std::uint64_t slot) noexcept;
  void send_content(Message& message) noexcept;
  void start_bulk_send(Message& message, const NoteHeader& ask) noexcept;
  void match(Message& receive, const NoteHeader& header, std::span<const std::byte> payload) noexcept;
  bool end_bulk(Message& message) noexcept;
  void finish(Message& message, std::size_t bytes) noexcept;
  void deliver(Message& message, std::size_t bytes) noexcept;
  bool tell_what_ended() noexcept;

  const int rank_;
  TransportEvents& events_;
  std::unique_ptr<Tables> tables_;
  std::unique_ptr<Wire> wire_;
  std::uint64_t next_slot_ = 0;
  std::vector<std::pair<int, std::string>> lost_;  ///< told by the next poll(), as `failure_`
  std::string failure_;
  bool cancelling_ = false;
  bool gave_up_ = false;  ///< some message, at some time
  bool dead_ = false;
};

}  // namespace tessera::comm
