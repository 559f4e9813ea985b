// What a program tells about its training: losses, bytes, memory and the times of its last step. Alone it prints a few
// lines; with --result the line that `tessera compare --programs` reads (docs/programs.md).
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/checksum.h"
#include "tessera/base/trace.h"
#include "tessera/comm/init.h"
#include "tessera/comm/traffic.h"
#include "tiny.h"

namespace tiny {

using base::TraceEventKind;

class Report {
 public:
  /// Arguments: [--steps N] [--result] [--block-ms MS] [WORD...]; `words` are the rest. --block-ms: a block's forward
  /// of the whole batch lasts so long on one rank, and its backward twice, as if each rank had a processor of its own.
  Report(comm::Communicator& world, nn::Context& context, std::string name, int argc, char** argv)
      : name_(std::move(name)), world_(world), context_(context), trace_(world.rank()) {
    for (int i = 1; i < argc; ++i) {
      const std::string_view word = argv[i];
      if (word == "--result")
        prints_result_ = true;
      else if (word == "--steps" && i + 1 < argc)
        steps_ = std::max(1, std::atoi(argv[++i]));
      else if (word == "--block-ms" && i + 1 < argc)
        block_ms_ = std::atof(argv[++i]);
      else
        words.emplace_back(word);
    }
  }
  std::vector<std::string> words;
  double share = 1;  ///< of a block's work, which one event of this rank is
  int steps() const { return steps_; }

  /// Runs `work` as an event of the timeline, and returns what it returns.
  template <class Work>
  auto time(TraceEventKind kind, const std::string& unit, std::size_t bytes, Work&& work) {
    const auto span = trace_.begin(kind, unit, bytes, context_.stream());
    const bool is_block = unit.starts_with("h.");
    const double factor = !is_block                          ? 0
                          : kind == TraceEventKind::forward  ? 1
                          : kind == TraceEventKind::backward ? 2
                                                             : 0;
    struct End {  // also of work that returns nothing
      Report& report;
      std::size_t span;
      std::chrono::steady_clock::time_point until;
      ~End() {
        std::this_thread::sleep_until(until);
        report.trace_.end(span, report.context_.stream());
      }
    } const end{
        *this, span,
        std::chrono::steady_clock::now() + std::chrono::microseconds(std::llround(1e3 * factor * share * block_ms_))};
    return work();
  }
  /// Runs an operation and waits for it, as an event: compute has nothing else to do.
  template <class Start>
  void wait(const std::string& unit, std::size_t bytes, bool of_gradients, Start&& start) {
    time(of_gradients ? TraceEventKind::reduce_wait : TraceEventKind::unshard_wait, unit, bytes,
         [&] { start().wait(); });
  }

  void begin_step() {
    trace_.drain();
    world_.barrier().wait();
    context_.memory_tracker().keep_history(true);
    begun_ns_ = base::host_time_ns();
    before_ = world_.traffic();
  }
  /// The mean over the ranks of what they pass is the loss of the batch.
  void end_step(double part_of_loss) {
    const std::int64_t ended = base::host_time_ns();
    traffic_ = world_.traffic() - before_;
    history_ = context_.memory_tracker().drain_history();
    context_.memory_tracker().keep_history(false);
    losses_.push_back(reduced(part_of_loss, comm::ReduceOp::avg()));
    events_ = trace_.drain();
    ms_.push_back(largest(static_cast<double>(ended - begun_ns_) / 1e6));
  }

  /// The end: gathers the whole parameters from the ranks' parts and prints the result. Collective.
  void finish(const std::vector<Parameter>& mine);

 private:
  double largest(double mine) { return reduced(mine, comm::ReduceOp::max()); }
  double reduced(double mine, comm::ReduceOp op) {
    const comm::View view = comm::view_of(&mine, 1);
    world_.all_reduce(view, view, op).wait();
    return mine;
  }
  nlohmann::json gathered(const nlohmann::json& mine);
  nlohmann::json own_timeline(std::int64_t origin) const;
  nlohmann::json result(const std::string& hash, std::size_t parameters);

  const std::string name_;
  comm::Communicator& world_;
  nn::Context& context_;
  base::TraceRecorder trace_;
  int steps_ = 4;
  bool prints_result_ = false;
  double block_ms_ = 0;
  std::int64_t begun_ns_ = 0;
  comm::TrafficStats before_, traffic_;
  base::MemoryHistory history_;
  std::vector<base::TraceEvent> events_;
  std::vector<double> losses_, ms_;
};

/// What the ranks give, as an array.
inline nlohmann::json Report::gathered(const nlohmann::json& mine) {
  const std::string text = mine.dump() + ",";
  const std::uint64_t size = text.size();
  std::vector<std::uint64_t> sizes(static_cast<std::size_t>(world_.size()));
  world_.all_gather(comm::view_of(&size, 1), comm::view_of(sizes.data(), sizes.size())).wait();
  const std::vector<std::size_t> counts(sizes.begin(), sizes.end());
  std::string all(std::accumulate(counts.begin(), counts.end(), std::size_t{0}), ' ');
  world_
      .all_gather_v({text.data(), text.size(), base::DType::u8, {}}, {all.data(), all.size(), base::DType::u8, {}},
                    counts)
      .wait();
  all.back() = ']';
  return nlohmann::json::parse("[" + all);
}

inline constexpr std::array<const char*, kBlocks + 2> kUnits = {"embed", "h.0", "h.1", "h.2", "h.3", "head"};

/// This rank's part of the timeline: [kind, unit, start, length, bytes] of each event, and the live bytes over time.
inline nlohmann::json Report::own_timeline(std::int64_t origin) const {
  nlohmann::json events = nlohmann::json::array(), memory = nlohmann::json::array();
  for (const base::TraceEvent& event : events_)
    events.push_back({static_cast<int>(event.kind),
                      std::find(kUnits.begin(), kUnits.end(), event.unit) - kUnits.begin(), event.start_ns - origin,
                      event.duration_ns(), event.bytes});
  std::array<std::int64_t, base::kMemoryUses> live = history_.before;
  std::int64_t shown = -1;
  const auto sample = [&](std::int64_t at) {
    const std::int64_t total = std::accumulate(live.begin(), live.end(), std::int64_t{0});
    if (shown >= 0 && std::abs(total - shown) < 4096) return;  // too little to be seen
    shown = total;
    memory.push_back({at});
    for (const std::int64_t bytes : live) memory.back().push_back(bytes);
  };
  sample(0);
  for (const base::MemoryChange& change : history_.changes) {
    live[static_cast<std::size_t>(change.use)] += change.bytes;
    sample(std::max<std::int64_t>(0, change.at_ns - origin));
  }
  return {{"rank", world_.rank()}, {"events", events}, {"memory", memory}};
}

/// The fields of a run of compare.json. Bytes and calls are those of the rank with most.
inline nlohmann::json Report::result(const std::string& hash, std::size_t parameters) {
  const auto most = [&](std::uint64_t mine) { return static_cast<std::uint64_t>(largest(static_cast<double>(mine))); };
  nlohmann::json calls = {{"control", 0}}, bytes = {{"control", 0}};
  for (const auto& [name, kind] : {std::pair("all_gather", comm::OpKind::all_gather),
                                   {"reduce_scatter", comm::OpKind::reduce_scatter},
                                   {"all_reduce", comm::OpKind::all_reduce},
                                   {"send", comm::OpKind::send}}) {
    calls[name] = most(traffic_.of(kind).calls);
    bytes[name] = most(traffic_.of(kind).bytes_sent);
  }
  const base::MemoryTracker::Snapshot memory = context_.memory_tracker().snapshot();
  const auto peak_of = [&](base::MemoryCategory use) { return most(memory.peak_of(use)); };
  nlohmann::json peak = {{"total", most(memory.total_peak)}, {"reserved", 0}};
  nlohmann::json memory_kinds = nlohmann::json::array(), event_kinds = nlohmann::json::array();
  for (std::size_t i = 0; i < base::kMemoryUses; ++i) {
    memory_kinds.push_back(base::name_of(static_cast<base::MemoryCategory>(i)));
    peak[memory_kinds.back()] = peak_of(static_cast<base::MemoryCategory>(i));
  }
  for (int kind = 0; kind <= static_cast<int>(TraceEventKind::optimizer_step); ++kind)
    event_kinds.push_back(base::name_of(static_cast<TraceEventKind>(kind)));
  double waited = 0;
  for (const base::TraceEvent& event : events_)
    if (event.kind == TraceEventKind::unshard_wait || event.kind == TraceEventKind::reduce_wait)
      waited += static_cast<double>(event.duration_ns()) / 1e6;
  std::int64_t origin = begun_ns_;
  const comm::View first = comm::view_of(&origin, 1);
  world_.all_reduce(first, first, comm::ReduceOp::min()).wait();
  std::vector<double> sorted = ms_;
  std::sort(sorted.begin(), sorted.end());
  const double median = sorted[sorted.size() / 2];
  return {{"strategy", name_},
          {"backend", world_.backend()},
          {"parameters", parameters},
          {"mesh", {1, world_.size()}},
          {"losses", losses_},
          {"final_parameters_hash", hash},
          {"step_ms", {{"median", median}, {"p95", sorted.back()}}},
          {"tokens_per_second", 1e3 * kSequences * kPositions / median},
          {"exposed_communication_ms", largest(waited)},
          {"copied_bytes_per_step", 0},
          {"calls_per_step", calls},
          {"wire_bytes_per_step", bytes},
          {"model_state_bytes",
           {{"parameter", peak_of(base::MemoryCategory::parameter)},
            {"gradient", peak_of(base::MemoryCategory::gradient)},
            {"optimizer", 0}}},
          {"peak_bytes", peak},
          {"timeline",
           {{"step", losses_.size()},
            {"length_ns", static_cast<std::int64_t>(1e6 * ms_.back())},
            {"simulated", false},
            {"one_clock", true},
            {"pieces", {1, 1, 1}},
            {"predicted_state", 0},
            {"event_kinds", event_kinds},
            {"memory_kinds", memory_kinds},
            {"units", kUnits},
            {"ranks", gathered(own_timeline(origin))}}}};
}

inline void Report::finish(const std::vector<Parameter>& mine) {
  Parameters all(context_, /*with_memory=*/false);
  add_embedding(all);
  for (int i = 0; i < kBlocks; ++i) Block(all, i);
  Head head(all);
  // The ranks that have an element agree on it; the others have "nothing", which is less than any.
  std::vector<float> model;
  for (const Parameter& p : all.all()) {
    std::vector<float> values(static_cast<std::size_t>(p.rows * p.columns), std::numeric_limits<float>::lowest());
    for (const Parameter& own : mine)
      if (own.name == p.name)
        each_element(own, [&](std::int64_t to, std::int64_t from) { values[to] = own.values()[from]; });
    const comm::View view = comm::view_of(values.data(), values.size());
    world_.all_reduce(view, view, comm::ReduceOp::max()).wait();
    model.insert(model.end(), values.begin(), values.end());
  }
  char hash[20];
  std::snprintf(hash, sizeof hash, "%016llx",
                static_cast<unsigned long long>(base::checksum(std::as_bytes(std::span(model)))));
  const std::string text = prints_result_ ? result(hash, model.size()).dump() : "";
  const auto sent = static_cast<unsigned long long>(largest(static_cast<double>(traffic_.bytes_sent())));
  if (world_.rank() != 0) return;
  if (prints_result_) {
    std::printf("%s\n", text.c_str());
    return;
  }
  for (std::size_t i = 0; i < losses_.size(); ++i) std::printf("step %zu loss %.6f\n", i + 1, losses_[i]);
  std::printf("a rank sends at most %llu bytes in a step; parameters %s\n", sent, hash);
}

}  // namespace tiny
