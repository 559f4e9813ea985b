// The bytes of the handshake, in the format of protocol version 7.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tessera/base/checksum.h"

namespace tessera::comm_test {

inline std::string frame(char type, const std::string& payload) {
  std::string bytes(1, type);
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(payload.size() >> (8 * i));
  return bytes + payload;
}
inline std::string checked(const std::string& content) {
  const std::uint64_t sum = base::checksum(std::as_bytes(std::span(content)));
  return content + std::string(reinterpret_cast<const char*>(&sum), sizeof(sum));
}
inline std::string challenge() {
  return frame('c',
               checked("tessera:" + std::string("\x07\x00\x00\x00", 4) + std::string(64, 'n') + std::string(1, '\0')));
}
inline constexpr std::size_t kHelloBytes = 5 + 20 + 2 + 5 + 1 + 96 + 8;  // of a rank of 'run-1'
inline constexpr std::size_t kChallengeBytes = 5 + 8 + 4 + 64 + 1 + 8;

}  // namespace tessera::comm_test
