#include "tools/report/flight_log.h"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>

#include "tessera/comm/core/op_traits.h"

namespace tessera::tools {
namespace {

/// The calls of one rank on one communicator, by sequence.
using CallsOfRank = std::map<std::uint64_t, const FlightCall*>;

/// Those of the ranks of one communicator that have a file.
using GroupCalls = std::map<int, CallsOfRank>;

/// What is known of a member and a call that others made.
enum class Made : std::uint8_t { yes, no, unknown };

class Finder {
  using Kind = FirstDivergence::Kind;

 public:
  explicit Finder(std::span<const FlightLog> logs) {
    for (const FlightLog& log : logs) {
      logs_.emplace(log.rank, &log);
      for (const auto& [number, group] : log.groups) groups_[group];
    }
    for (const FlightLog& log : logs)
      for (const FlightCall& call : log.calls)
        if (call.sequence > 0) groups_[log.groups.at(call.communicator)][log.rank].emplace(call.sequence, &call);
  }

  std::optional<FirstDivergence> find() {
    std::vector<FirstDivergence> found;
    for (const auto& [group, calls] : groups_)
      if (auto divergence = first_of(group, calls)) found.push_back(std::move(*divergence));
    if (found.empty()) return std::nullopt;
    for (const auto& [group, calls] : groups_) find_hindered(group, calls);
    for (FirstDivergence& divergence : found) keep_causes(divergence);
    return *std::ranges::min_element(found, {}, [&](const FirstDivergence& one) { return weight(one); });
  }

 private:
  static std::map<int, FlightCall> calls_at(const GroupCalls& all, std::uint64_t sequence) {
    std::map<int, FlightCall> calls;
    for (const auto& [rank, made] : all)
      if (const auto call = made.find(sequence); call != made.end()) calls.emplace(rank, *call->second);
    return calls;
  }

  static std::int64_t first_time(const std::map<int, FlightCall>& calls) {
    std::int64_t first = std::numeric_limits<std::int64_t>::max();
    for (const auto& [rank, call] : calls) first = std::min(first, call.issued_ns);
    return first;
  }

  /// A file holds the last calls only: an early one may be gone.
  Made made(const GroupCalls& all, int rank, std::uint64_t sequence, std::int64_t at_ns) const {
    const auto log = logs_.find(rank);
    if (log == logs_.end()) return Made::unknown;
    if (const auto calls = all.find(rank); calls != all.end()) {
      if (sequence > calls->second.rbegin()->first) return Made::no;
      return calls->second.count(sequence) == 1 ? Made::yes : Made::unknown;
    }
    const std::vector<FlightCall>& last = log->second->calls;
    const bool complete = last.empty() || last.front().number == 1;
    return complete || at_ns > last.front().issued_ns ? Made::no : Made::unknown;
  }

  /// The members that have not made a call that others made.
  std::vector<int> absent_of(const FlightGroup& group, const GroupCalls& all, std::uint64_t sequence,
                             std::int64_t at_ns) const {
    std::vector<int> absent = group.members;
    std::erase_if(absent, [&](int rank) { return made(all, rank, sequence, at_ns) != Made::no; });
    return absent;
  }
  std::vector<int> without_file(const FlightGroup& group) const {
    std::vector<int> missing = group.members;
    std::erase_if(missing, [&](int rank) { return logs_.contains(rank); });
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

  std::optional<FirstDivergence> first_of(const FlightGroup& group, const GroupCalls& all) const {
    std::set<std::uint64_t> sequences;
    for (const auto& [rank, calls] : all)
      for (const auto& [sequence, call] : calls) sequences.insert(sequence);
    const std::vector<int> missing = without_file(group);
    for (const std::uint64_t sequence : sequences) {
      FirstDivergence found{.group = group, .sequence = sequence, .ranks = {}, .calls = {}};
      found.calls = calls_at(all, sequence);
      found.at_ns = first_time(found.calls);
      found.kind = Kind::differs;
      found.ranks = minority_of(found.calls);
      if (!found.ranks.empty()) return found;
      found.kind = Kind::never_called;
      found.ranks = absent_of(group, all, sequence, found.at_ns);
      if (!found.ranks.empty()) return found;
      const bool ended = std::ranges::all_of(found.calls, [](const auto& made) { return made.second.ended_well(); });
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
  void find_hindered(const FlightGroup& group, const GroupCalls& all) {
    const bool missing = !without_file(group).empty();
    for (const auto& [rank, calls] : all)
      for (const auto& [sequence, call] : calls)
        if (call->state == comm::flight::State::failed ||
            (!call->ended_well() && (missing || !absent_of(group, all, sequence, call->issued_ns).empty())))
          hindered_.insert(rank);
  }

  void keep_causes(FirstDivergence& divergence) const {
    if (divergence.kind != Kind::never_called) return;
    std::vector<int> causes = divergence.ranks;
    std::erase_if(causes, [&](int rank) { return hindered_.contains(rank); });
    if (!causes.empty()) divergence.ranks = causes;
  }

  /// The least is the first divergence.
  std::tuple<bool, bool, std::int64_t> weight(const FirstDivergence& divergence) const {
    const bool all_hindered = std::ranges::all_of(divergence.ranks, [&](int rank) { return hindered_.contains(rank); });
    return {divergence.kind != Kind::differs, all_hindered, divergence.at_ns};
  }

  std::map<int, const FlightLog*> logs_;
  std::map<FlightGroup, GroupCalls> groups_;
  std::set<int> hindered_;
};

}  // namespace

bool same_call(const FlightCall& a, const FlightCall& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.bytes == b.bytes && a.label == b.label &&
         (!comm::reduces(a.kind) || a.reduce == b.reduce) && (!comm::has_root(a.kind) || a.root == b.root);
}

std::optional<FirstDivergence> find_first_divergence(std::span<const FlightLog> logs) { return Finder(logs).find(); }

}  // namespace tessera::tools
