// Random tokens, and proof of knowing one without sending it.
#pragma once

#include <string>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap/protocol.h"

namespace tessera::comm {

using protocol::Digest;

/// Uses the system's generator. Throws SystemError.
TESSERA_API Digest random_digest();
/// HMAC-SHA256 of `message` under `key`. Also works while the process exits.
TESSERA_API Digest prove(const Digest& key, std::string_view message);
/// PBKDF2 of `key`: takes about 20 ms, and so does each guess of one who knows the result.
TESSERA_API Digest stretch(const Digest& key);
/// Compares in time that doesn't depend on the content.
bool same(const Digest& a, const Digest& b);

TESSERA_API std::string to_hex(const Digest& digest);
/// Throws SystemError if the text is not 64 hexadecimal digits.
Digest from_hex(std::string_view text);

}  // namespace tessera::comm
