// How two ranks prove to each other that they belong to one start of one run.
//
// Rank 0 sends a challenge; the other says who it is, and proves by an HMAC over both that it knows the key; rank 0
// answers, proved the same way. Nothing that is sent reveals the key. Afterwards the connection is trusted: it is
// authenticated, not encrypted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/comm/control/proof.h"
#include "tessera/comm/control/socket.h"
#include "tessera/comm/control/wire.h"

namespace tessera::comm {

/// Who this rank is, as the others know it.
struct Identity {
  int rank = 0;
  int size = 1;
  std::string run;  ///< "" where it has no name that all hosts know
  std::uint64_t restart = 0;
  std::uint32_t generation = 0;
  Digest key{};
};

/// Rank 0's judgement of who knocks. `taken`: that rank is already here. `proven`: it knows the key.
struct Judgement {
  wire::Answer answer;
  bool proven = false;
  bool fatal = false;  ///< it belongs to this very start, and the world can't come to be: the text is for all
};
Judgement judge(const Identity& self, const wire::Challenge& challenge, const wire::Hello& hello, bool taken,
                bool complete);

/// The other side, after it has connected to `place`. Nothing: try again (a stranger's port, an overrun rank 0, or one
/// that will give way); `why` then says so. Throws InvalidUsage where rank 0 refuses this rank for good.
struct Admission {
  Digest session{};  ///< rank 0's
};
std::optional<Admission> ask_for_admission(Connection& connection, const Identity& self, const std::string& place,
                                           Deadline deadline, std::string& why);

/// What the ranks of this start know and nobody else: derived, never sent.
Digest world_token(const Identity& self, const Digest& session);

}  // namespace tessera::comm
