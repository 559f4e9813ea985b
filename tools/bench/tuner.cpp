#include "tools/bench/tuner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "tessera/base/parse.h"

namespace tessera::tools {
namespace {

std::string size_text(std::uint64_t bytes) { return bytes == UINT64_MAX ? "max" : base::format_size(bytes); }

std::vector<std::uint64_t> sizes_of(std::span<const AlgorithmTimes> times) {
  std::set<std::uint64_t> sizes;
  for (const AlgorithmTimes& one : times)
    for (const auto& [bytes, us] : one.us) sizes.insert(bytes);
  return {sizes.begin(), sizes.end()};
}

const double* time_at(const AlgorithmTimes& times, std::uint64_t bytes) {
  const auto found = times.us.find(bytes);
  return found == times.us.end() ? nullptr : &found->second;
}

/// The algorithm after `champion` (null: none yet) at sizes[i].
const AlgorithmTimes* successor(std::span<const AlgorithmTimes> times, const std::vector<std::uint64_t>& sizes,
                                std::size_t i, const AlgorithmTimes* champion) {
  const double* to_beat = champion == nullptr ? nullptr : time_at(*champion, sizes[i]);
  const AlgorithmTimes* best = to_beat == nullptr ? nullptr : champion;
  double best_us = to_beat == nullptr ? INFINITY : *to_beat * kChallengerWins;
  for (const AlgorithmTimes& one : times) {
    const double* us = time_at(one, sizes[i]);
    if (us == nullptr || &one == champion || *us >= best_us) continue;
    if (to_beat != nullptr && i + 1 < sizes.size()) {  // a single fast measurement is no range
      const double* next = time_at(one, sizes[i + 1]);
      const double* next_to_beat = time_at(*champion, sizes[i + 1]);
      if (next != nullptr && next_to_beat != nullptr && *next >= *next_to_beat) continue;
    }
    best = &one;
    best_us = *us;
  }
  return best;
}

}  // namespace

std::vector<comm::AlgorithmRange> choose_ranges(std::span<const AlgorithmTimes> times) {
  const std::vector<std::uint64_t> sizes = sizes_of(times);
  std::vector<comm::AlgorithmRange> ranges;
  if (sizes.empty()) return ranges;
  const AlgorithmTimes* champion = nullptr;
  for (const AlgorithmTimes& one : times)
    if (champion == nullptr && time_at(one, sizes.front()) != nullptr) champion = &one;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const AlgorithmTimes* next = successor(times, sizes, i, champion);
    if (next == champion && !ranges.empty()) continue;
    std::uint64_t from = 0;
    if (!ranges.empty()) {  // no algorithm is used between a size it accepted and one it refused
      ranges.back().to = time_at(*champion, sizes[i]) != nullptr ? sizes[i] : sizes[i - 1] + 1;
      from = time_at(*next, sizes[i - 1]) != nullptr ? ranges.back().to : sizes[i];
    }
    champion = next;
    ranges.push_back({champion->name, from, UINT64_MAX});
  }
  if (sizes.back() < kEndless) ranges.back().to = sizes.back() + 1;
  return ranges;
}

std::string algorithms_text(std::string_view operation, std::span<const comm::AlgorithmRange> ranges) {
  std::string text;
  for (const comm::AlgorithmRange& range : ranges) {
    text += text.empty() ? std::string(operation) + "=" : ";";
    text += range.name;
    if (range.from != 0 || range.to != UINT64_MAX) text += ":" + size_text(range.from) + "-" + size_text(range.to);
  }
  return text;
}

std::string algorithms_of_round(const std::vector<comm::OpKind>& operations, const std::vector<std::string>& known,
                                std::size_t number) {
  std::vector<std::string> chosen;
  for (const comm::OpKind kind : operations) {
    std::vector<std::string> own;
    for (const std::string& entry : known)
      if (entry.starts_with(std::string(comm::name_of(kind)) + "=")) own.push_back(entry);
    if (number < own.size()) chosen.push_back(own[number]);
  }
  return fmt::format("{}", fmt::join(chosen, ","));
}

std::string AlgorithmTuner::round(std::size_t number) const {
  std::vector<comm::OpKind> operations;
  for (const BenchOp* op : plan_.ops) operations.push_back(op->kind);
  return algorithms_of_round(operations, known_, number);
}

void AlgorithmTuner::add_default(const BenchResult& result) {
  operations_[result.op].by_default[result.bytes] = result;
}

void AlgorithmTuner::add(const BenchResult& result) {
  std::vector<AlgorithmTimes>& times = operations_[result.op].times;
  const auto same = [&](const AlgorithmTimes& one) { return one.name == result.algorithm; };
  auto found = std::find_if(times.begin(), times.end(), same);
  if (found == times.end()) found = times.insert(times.end(), {result.algorithm, {}});
  found->us[result.bytes] = result.time_us.median;
}

std::string AlgorithmTuner::table_of(const BenchOp& op, const Operation& operation) const {
  const std::vector<comm::AlgorithmRange> ranges = choose_ranges(operation.times);
  std::string text = fmt::format("#\n# {}: median us out of place by algorithm, * the choice of the table\n#\n#{:>11}",
                                 op.name, "size");
  for (const AlgorithmTimes& one : operation.times) text += fmt::format("  {:>18}", one.name);
  text += fmt::format("  {:>18}\n", "own choice");
  for (const std::uint64_t bytes : sizes_of(operation.times)) {
    text += fmt::format("{:>12}", bytes);
    for (const AlgorithmTimes& one : operation.times) {
      const bool taken = std::any_of(ranges.begin(), ranges.end(), [&](const comm::AlgorithmRange& range) {
        return range.name == one.name && bytes >= range.from && bytes < range.to;
      });
      const double* us = time_at(one, bytes);
      text += fmt::format("  {:>16}{:>2}", us == nullptr ? "refused" : fmt::format("{:.2f}", *us), taken ? "*" : "");
    }
    const auto own = operation.by_default.find(bytes);
    if (own != operation.by_default.end())
      text += fmt::format("  {:>18.2f}  {}", own->second.time_us.median, own->second.algorithm);
    text += "\n";
  }
  return text;
}

std::string AlgorithmTuner::table() const {
  std::string text;
  for (const BenchOp* op : plan_.ops)
    if (const auto found = operations_.find(op->name); found != operations_.end()) text += table_of(*op, found->second);
  return text;
}

std::string AlgorithmTuner::text_of(const BenchOp& op) const {
  const auto found = operations_.find(op.name);
  return found == operations_.end() ? "" : algorithms_text(comm::name_of(op.kind), choose_ranges(found->second.times));
}

std::string AlgorithmTuner::file(const std::string& setting) const {
  std::string text = "# " + setting + "\n# Use: TESSERA_ALGO=@FILE, or these lines joined by commas.\n";
  for (const BenchOp* op : plan_.ops)
    if (const std::string line = text_of(*op); !line.empty()) text += line + "\n";
  return text;
}

nlohmann::ordered_json AlgorithmTuner::json() const {
  nlohmann::ordered_json all = nlohmann::ordered_json::object();
  for (const BenchOp* op : plan_.ops)
    if (const std::string line = text_of(*op); !line.empty())
      all[std::string(comm::name_of(op->kind))] = line.substr(line.find('=') + 1);
  return all;
}

}  // namespace tessera::tools
