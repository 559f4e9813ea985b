#include "tools/postmortem/divergence_finder.h"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>

#include "tessera/comm/core/op_traits.h"

namespace tessera::tools {
namespace {

/// The calls of one rank on one communicator, by sequence.
using Calls = std::map<std::uint64_t, const FlightCall*>;

/// One communicator of the run.
struct Group {
  FlightGroup description;
  std::map<int, Calls> calls;  // of the ranks with a file
};

/// What is known of a member and a call that others made.
enum class Made : std::uint8_t { yes, no, unknown };

class Finder {
  using Kind = FirstDivergence::Kind;

 public:
  explicit Finder(std::span<const FlightLog> logs) {
    for (const FlightLog& log : logs) {
      logs_.emplace(log.rank, &log);
      for (const auto& [number, description] : log.groups) group_of(description);
    }
    for (const FlightLog& log : logs)
      for (const FlightCall& call : log.calls)
        if (call.sequence > 0) group_of(log.groups.at(call.communicator)).calls[log.rank].emplace(call.sequence, &call);
  }

  std::optional<FirstDivergence> find() {
    std::vector<FirstDivergence> found;
    for (const auto& [description, group] : groups_)
      if (auto divergence = first_of(group)) found.push_back(std::move(*divergence));
    if (found.empty()) return std::nullopt;
    for (const auto& [description, group] : groups_) find_hindered(group);
    for (FirstDivergence& divergence : found) keep_causes(divergence);
    return *std::min_element(found.begin(), found.end(),
                             [&](const FirstDivergence& a, const FirstDivergence& b) { return weight(a) < weight(b); });
  }

 private:
  Group& group_of(const FlightGroup& description) {
    Group& group = groups_[description];
    group.description = description;
    return group;
  }

  static std::map<int, FlightCall> calls_at(const Group& group, std::uint64_t sequence) {
    std::map<int, FlightCall> calls;
    for (const auto& [rank, made] : group.calls)
      if (const auto call = made.find(sequence); call != made.end()) calls.emplace(rank, *call->second);
    return calls;
  }

  static std::int64_t first_time(const std::map<int, FlightCall>& calls) {
    std::int64_t first = std::numeric_limits<std::int64_t>::max();
    for (const auto& [rank, call] : calls) first = std::min(first, call.issued_ns);
    return first;
  }

  /// A file holds the last calls only: an early one may be gone.
  Made made(const Group& group, int rank, std::uint64_t sequence, std::int64_t at_ns) const {
    const auto log = logs_.find(rank);
    if (log == logs_.end()) return Made::unknown;
    if (const auto calls = group.calls.find(rank); calls != group.calls.end()) {
      if (sequence > calls->second.rbegin()->first) return Made::no;
      return calls->second.count(sequence) == 1 ? Made::yes : Made::unknown;
    }
    const std::vector<FlightCall>& all = log->second->calls;
    const bool complete = all.empty() || all.front().number == 1;
    return complete || at_ns > all.front().issued_ns ? Made::no : Made::unknown;
  }

  /// The members that have not made a call that others made.
  std::vector<int> absent_of(const Group& group, std::uint64_t sequence, std::int64_t at_ns) const {
    std::vector<int> absent;
    for (const int rank : group.description.members)
      if (made(group, rank, sequence, at_ns) == Made::no) absent.push_back(rank);
    return absent;
  }
  std::vector<int> without_file(const Group& group) const {
    std::vector<int> missing;
    for (const int rank : group.description.members)
      if (logs_.count(rank) == 0) missing.push_back(rank);
    return missing;
  }

  /// The ranks whose call is that of the fewest ranks.
  static std::vector<int> minority_of(const std::map<int, FlightCall>& calls) {
    std::vector<int> fewest;
    for (const auto& [rank, call] : calls) {
      std::vector<int> same;
      for (const auto& [other, theirs] : calls)
        if (same_call(call, theirs)) same.push_back(other);
      if (fewest.empty() || same.size() <= fewest.size()) fewest = same;  // of two equal halves the later one
    }
    return fewest.size() < calls.size() ? fewest : std::vector<int>{};
  }

  /// The ranks that died in a call which failed on the others.
  std::vector<int> dead_in(const std::map<int, FlightCall>& calls) const {
    std::vector<int> dead;
    bool failed = false;
    for (const auto& [rank, call] : calls) {
      failed |= call.state == comm::flight::State::failed;
      const FlightLog& log = *logs_.at(rank);
      if (!call.ended_well() && log.end == FlightEnd::none && log.failures.empty()) dead.push_back(rank);
    }
    return failed ? dead : std::vector<int>{};
  }

  std::optional<FirstDivergence> first_of(const Group& group) const {
    std::set<std::uint64_t> sequences;
    for (const auto& [rank, calls] : group.calls)
      for (const auto& [sequence, call] : calls) sequences.insert(sequence);
    const std::vector<int> missing = without_file(group);
    for (const std::uint64_t sequence : sequences) {
      FirstDivergence found{.group = group.description, .sequence = sequence, .ranks = {}, .calls = {}};
      found.calls = calls_at(group, sequence);
      found.at_ns = first_time(found.calls);
      found.kind = Kind::differs;
      found.ranks = minority_of(found.calls);
      if (!found.ranks.empty()) return found;
      found.kind = Kind::never_called;
      found.ranks = absent_of(group, sequence, found.at_ns);
      if (!found.ranks.empty()) return found;
      const bool ended = std::all_of(found.calls.begin(), found.calls.end(),
                                     [](const auto& made) { return made.second.ended_well(); });
      found.kind = Kind::no_file;
      found.ranks = missing;
      if (!missing.empty() && !ended) return found;
      found.kind = Kind::died_in;
      found.ranks = dead_in(found.calls);
      if (!found.ranks.empty()) return found;
    }
    return std::nullopt;
  }

  /// Adds the ranks with a call that failed, or that has not ended because others have not made it.
  void find_hindered(const Group& group) {
    const bool missing = !without_file(group).empty();
    for (const auto& [rank, calls] : group.calls)
      for (const auto& [sequence, call] : calls)
        if (call->state == comm::flight::State::failed ||
            (!call->ended_well() && (missing || !absent_of(group, sequence, call->issued_ns).empty())))
          hindered_.insert(rank);
  }

  void keep_causes(FirstDivergence& divergence) const {
    if (divergence.kind != Kind::never_called) return;
    std::vector<int> causes;
    for (const int rank : divergence.ranks)
      if (hindered_.count(rank) == 0) causes.push_back(rank);
    if (!causes.empty()) divergence.ranks = causes;
  }

  /// The least is the first divergence.
  std::tuple<bool, bool, std::int64_t> weight(const FirstDivergence& divergence) const {
    const bool all_hindered = std::all_of(divergence.ranks.begin(), divergence.ranks.end(),
                                          [&](int rank) { return hindered_.count(rank) == 1; });
    return {divergence.kind != Kind::differs, all_hindered, divergence.at_ns};
  }

  std::map<int, const FlightLog*> logs_;
  std::map<FlightGroup, Group> groups_;
  std::set<int> hindered_;
};

}  // namespace

bool same_call(const FlightCall& a, const FlightCall& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.bytes == b.bytes && a.label == b.label &&
         (!comm::reduces(a.kind) || a.reduce == b.reduce) && (!comm::has_root(a.kind) || a.root == b.root);
}

std::optional<FirstDivergence> find_first_divergence(std::span<const FlightLog> logs) { return Finder(logs).find(); }

}  // namespace tessera::tools
