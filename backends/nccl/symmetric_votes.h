// What the members of a communicator report to each other while they make a symmetric window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tessera::comm::nccl {

/// The steps are numbered alike on all members. Thread-safe.
class SymmetricVotes {
 public:
  struct Vote {
    std::uint64_t bytes = 0;
    std::string problem = {};  ///< "": none
    std::string windows = {};  ///< of the first step: which windows the member has, without spaces
  };

  std::uint64_t next_step();
  /// Stores the vote of a member, which may be ahead of this one.
  void submit(std::size_t member, std::uint64_t step, Vote vote);
  /// The first of `members` that has not voted in this step; none: all have.
  std::optional<std::size_t> absent(std::uint64_t step, std::size_t members) const;
  /// The votes of a complete step, by member. It is forgotten.
  std::vector<Vote> extract(std::uint64_t step);

 private:
  mutable std::mutex mutex_;
  std::uint64_t step_ = 0;
  std::map<std::uint64_t, std::map<std::size_t, Vote>> steps_;
};

}  // namespace tessera::comm::nccl
