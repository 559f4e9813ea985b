#include "tessera/comm/core/call_verifier.h"

#include <algorithm>
#include <span>

#include "tessera/base/checksum.h"

namespace tessera::comm {

std::uint64_t CallVerifier::fingerprint(std::string_view signature) noexcept {
  return base::checksum(std::as_bytes(std::span(signature)));
}

bool CallVerifier::submit(int member, std::uint64_t sequence, std::string signature, std::uint64_t fingerprint) {
  Calls& calls = calls_[sequence];
  calls.signatures.resize(members_);
  calls.fingerprints.resize(members_);
  calls.signatures[static_cast<std::size_t>(member)] = std::move(signature);
  calls.fingerprints[static_cast<std::size_t>(member)] = fingerprint;
  return ++calls.submitted == members_;
}

bool CallVerifier::verified(std::uint64_t sequence) const {
  const auto found = calls_.find(sequence);
  if (found == calls_.end() || found->second.submitted < members_) return false;
  const auto& all = found->second.fingerprints;
  return std::ranges::all_of(all, [&](std::uint64_t one) { return one == all.front(); });
}

std::string CallVerifier::mismatch(std::uint64_t sequence, const std::function<std::string(int)>& rank_name) const {
  const std::vector<std::string>& signatures = calls_.at(sequence).signatures;
  return format_mismatch(sequence, static_cast<int>(members_), [&](int member) {
    return rank_name(member) + ": " + signatures[static_cast<std::size_t>(member)];
  });
}

std::string CallVerifier::format_mismatch(std::uint64_t sequence, int members,
                                          const std::function<std::string(int)>& row) {
  std::string table = "operation #" + std::to_string(sequence) + " differs between the ranks:";
  for (int member = 0; member < members; ++member) table += (member == 0 ? " " : "; ") + row(member);
  return table;
}

}  // namespace tessera::comm
