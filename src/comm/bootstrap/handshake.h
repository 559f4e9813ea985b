// The handshake by which two ranks prove to each other that they belong to one start of one run.
//
// Rank 0 sends a challenge, and the other rank at once a first hello: its identity and an HMAC, which proves that it
// knows the key. It may repeat that of another rank; but a flood of peers that can't send one delays no rank that does,
// however long its answers take. To the challenge it replies with a second hello, whose HMAC covers both. Rank 0's
// answer is authenticated in the same way; rank 0 then waits for one byte of any value, by which the other rank
// confirms that it accepts the answer. No message reveals the key. All later frames are sealed by a key unique to the
// connection.
//
// With TLS rank 0 first sends a challenge without a session; the other rank answers with a TLS session, in which the
// handshake follows. A rank that has another TLS setting answers without one, so that rank 0 can name the difference.
// A Unix socket needs no TLS: its bytes don't leave the kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/comm/bootstrap/hmac.h"
#include "tessera/comm/bootstrap/protocol.h"
#include "tessera/comm/bootstrap/socket.h"

namespace tessera::comm {

/// This rank's identity as sent to other ranks.
struct RankIdentity {
  int rank = 0;
  int size = 1;
  std::string run;  ///< "" without a name that all hosts know
  std::uint64_t restart = 0;
  std::uint32_t generation = 0;
  Digest key{};
  std::shared_ptr<const TlsContext> tls = nullptr;  ///< null: without TLS
};

/// Whether a first hello proves that its sender, or a rank whose hello it repeats, knows the key.
bool knows_key(const RankIdentity& self, const protocol::Hello& hello);

/// By which the ends of a TLS session know each other, if not by certificates.
Digest tls_secret(const Digest& key);

/// Rank 0's decision on a connecting rank. `taken`: another process has already joined as that rank. `proven`: it knows
/// the key.
struct HandshakeVerdict {
  protocol::HandshakeReply reply;
  bool proven = false;
  bool fatal = false;  ///< it belongs to this very start, and the world can't be created: all ranks receive the text
};
HandshakeVerdict judge(const RankIdentity& self, const protocol::Challenge& challenge, const protocol::Hello& hello,
                       bool taken, bool complete);

/// The result of the connecting side's attempt. If it was not admitted, it tries again: the port may belong to another
/// program, rank 0 may be overloaded or about to stop listening, or a bit may have been flipped.
struct Attempt {
  bool admitted = false;  ///< then the connection is sealed
  bool unproven = false;  ///< the peer answered, but proved neither in the handshake nor by TLS that it knows the key
  std::string why;        ///< if not admitted
  Digest session{};       ///< rank 0's
};
/// Runs the handshake after `connection` was made to `place`. `instance` identifies this process. Throws InvalidUsage
/// if rank 0 refuses this rank permanently, which rank 0 must authenticate.
Attempt client_handshake(Connection& connection, const RankIdentity& self, const Digest& instance,
                         const std::string& place, Deadline deadline);

/// The seal of a connection's frames after this handshake. `first`: for rank 0's end.
Seal seal_of(const Digest& key, const protocol::Challenge& challenge, const protocol::Hello& hello, bool first);

/// A secret shared by the ranks of this start: derived, never sent.
Digest world_token(const RankIdentity& self, const Digest& session);

}  // namespace tessera::comm
