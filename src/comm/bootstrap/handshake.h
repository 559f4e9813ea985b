// How two ranks prove to each other that they belong to one start of one run.
//
// Rank 0 sends a challenge; the other says who it is, and proves by an HMAC over both that it knows the key; rank 0
// answers, proved the same way, and waits for one byte, whatever its value: the other has believed it. Nothing that is
// sent reveals the key. From then on all frames are sealed by a key that only this connection has: it is authenticated,
// not encrypted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/comm/bootstrap/hmac.h"
#include "tessera/comm/bootstrap/protocol.h"
#include "tessera/comm/bootstrap/seal.h"
#include "tessera/comm/bootstrap/socket.h"

namespace tessera::comm {

/// Who this rank is, as the others know it.
struct RankIdentity {
  int rank = 0;
  int size = 1;
  std::string run;  ///< "" where it has no name that all hosts know
  std::uint64_t restart = 0;
  std::uint32_t generation = 0;
  Digest key{};
};

/// Rank 0's judgement of who knocks. `taken`: that rank is already here, as another process. `proven`: it knows the
/// key.
struct HandshakeVerdict {
  protocol::HandshakeReply answer;
  bool proven = false;
  bool fatal = false;  ///< it belongs to this very start, and the world can't come to be: the text is for all
};
HandshakeVerdict judge(const RankIdentity& self, const protocol::Challenge& challenge, const protocol::Hello& hello,
                       bool taken, bool complete);

/// How an attempt of the other side ended. Where it was not admitted, it tries again: it was a stranger's port, an
/// overrun rank 0, one that will give way, or a bit was flipped.
struct Attempt {
  bool admitted = false;  ///< then the connection is sealed
  bool unproven = false;  ///< refused by somebody who does not prove that he knows the key
  std::string why;        ///< where it was not admitted
  Digest session{};       ///< rank 0's
};
/// After `connection` was made to `place`. `instance`: of this process. Throws InvalidUsage where rank 0 refuses this
/// rank for good, which it has to prove.
Attempt client_handshake(Connection& connection, const RankIdentity& self, const Digest& instance,
                         const std::string& place, Deadline deadline);

/// By which the frames of a connection are sealed after this handshake. `first`: for rank 0's end.
Seal seal_of(const Digest& key, const protocol::Challenge& challenge, const protocol::Hello& hello, bool first);

/// What the ranks of this start know and nobody else: derived, never sent.
Digest world_token(const RankIdentity& self, const Digest& session);

}  // namespace tessera::comm
