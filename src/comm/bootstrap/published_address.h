// Where rank 0 listens, as it publishes it in a program's store.
#pragma once

#include <string>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap/address.h"
#include "tessera/comm/bootstrap/hmac.h"

namespace tessera::comm {

struct TESSERA_API PublishedAddress {
  std::string host;              ///< the name of its host, as Bootstrap::hosts()
  std::string socket;            ///< for ranks on this host: the abstract name of a Unix socket
  Digest token{};                ///< a key that the ranks must know
  std::vector<HostPort> places;  ///< for others, by preference: addresses of its interfaces

  std::string text() const;
  /// Throws SystemError if the text is not one of text().
  static PublishedAddress parse(const std::string& text);
};

/// Opens a Unix socket and a port that the system chooses, and describes them in `address`, which has a new token.
/// Throws SystemError.
std::vector<UniqueFd> listen_for_all(const std::string& host, PublishedAddress& address);

/// connect_at() one of the places, another one in each `attempt`: some may lead elsewhere. There must be one.
Connection connect_at_place(const PublishedAddress& address, std::size_t attempt, Deadline deadline, std::string& why);

}  // namespace tessera::comm
