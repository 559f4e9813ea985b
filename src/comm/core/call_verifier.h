// Checked mode: the members of a communicator compare what they call as the same operation.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// Collects the signatures of all members by operation. Used under a lock of the group.
class TESSERA_API CallVerifier {
 public:
  explicit CallVerifier(std::size_t members) : members_(members) {}

  /// What a signature is compared by: messages truncate the text.
  static std::uint64_t fingerprint(std::string_view signature) noexcept;

  /// A member calls operation `sequence`. True: it is the last of all members, so that verified() or mismatch() is
  /// final.
  bool submit(int member, std::uint64_t sequence, std::string signature, std::uint64_t fingerprint);
  /// Whether all members have made the same call.
  bool verified(std::uint64_t sequence) const;
  /// "operation #3 differs between the ranks: rank 0: ...; rank 1: ...".
  std::string mismatch(std::uint64_t sequence, const std::function<std::string(int)>& rank_name) const;
  /// The same table with other rows.
  static std::string format_mismatch(std::uint64_t sequence, int members, const std::function<std::string(int)>& row);
  void erase(std::uint64_t sequence) { calls_.erase(sequence); }
  void clear() noexcept { calls_.clear(); }

 private:
  struct Calls {
    std::vector<std::string> signatures;  ///< by member
    std::vector<std::uint64_t> fingerprints;
    std::size_t submitted = 0;
  };
  std::size_t members_;
  std::map<std::uint64_t, Calls> calls_;  ///< by sequence
};

}  // namespace tessera::comm
