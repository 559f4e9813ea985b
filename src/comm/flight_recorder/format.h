// The layout of a rank's file of the flight recorder, in the byte order of the host. docs/postmortem.md describes it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera::comm::flight {

inline constexpr std::array<char, 16> kMagic = {'t', 'e', 's', 's', 'e', 'r', 'a', ' ',
                                                'f', 'l', 'i', 'g', 'h', 't', ' ', '1'};
inline constexpr std::uint32_t kEntries = 1024;

/// What is known of a call. The values are those of the file.
enum class State : std::uint32_t {
  issued = 1,  ///< the rank has called it, and the call has not returned
  started,     ///< the call has returned: it is in flight
  waiting,     ///< the rank waits for it
  done,        ///< the rank has seen its end
  failed,      ///< with an error, which is among the lines of the file
  handed,      ///< a device stream waits for it; nothing is known of its end
};
inline constexpr std::uint32_t kStates = 6;
inline constexpr std::array<std::string_view, kStates> kStateNames = {"issued", "started", "waiting",
                                                                      "done",   "failed",  "handed to a stream"};

/// The beginning of the file. Entries follow, then lines of text.
struct Header {
  std::array<char, 16> magic;
  std::uint32_t entries;      ///< kEntries
  std::uint32_t entry_bytes;  ///< sizeof(Entry)
  std::array<char, 40> reserved;
};
static_assert(sizeof(Header) == 64);

/// One call. Call N of the rank is entry (N - 1) % kEntries.
struct Entry {
  /// Of the rank's calls, from 1; written last. 0: unused, or being written. If the rank still runs, an entry is valid
  /// only if this was the same before and after the entry was read.
  std::uint64_t number;
  std::uint32_t state;  ///< a State
  std::uint8_t kind;    ///< an OpKind
  std::uint8_t dtype;   ///< a DType
  std::uint8_t reduce;  ///< a ReduceOp::Kind
  std::uint8_t reserved;
  std::uint32_t communicator;  ///< as in the line "communicator"
  std::int32_t root;           ///< of rooted collectives; the peer of messages
  std::uint64_t sequence;      ///< of the communicator's collectives, from 1; 0 for messages
  std::uint64_t bytes;         ///< of the larger buffer of a rank that uses both; 0 if ranks may differ
  std::int64_t step;           ///< 0: before the first
  std::int64_t issued_ns;      ///< of the steady clock of the host, as all times
  std::int64_t ended_ns;       ///< when the rank saw the end; 0: it has not
  std::array<char, 64> label;  ///< padded with zeros; longer ones are cut
};
static_assert(sizeof(Entry) == 128);

inline constexpr std::size_t kTextOffset = sizeof(Header) + kEntries * sizeof(Entry);

}  // namespace tessera::comm::flight
