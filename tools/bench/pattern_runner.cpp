#include "tools/bench/pattern_runner.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

PatternUnits units_of(const BenchSpec& plan, const std::vector<std::size_t>& host_of_rank) {
  PatternUnits units;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const std::size_t unit = plan.pattern->kind == BenchPattern::Kind::groups
                                 ? r / static_cast<std::size_t>(plan.ranks / plan.pattern->groups)
                             : host_of_rank.empty() ? r
                                                    : host_of_rank[r];
    if (unit >= units.size()) units.resize(unit + 1);
    units[unit].push_back(rank);
  }
  return units;
}

}  // namespace

PatternRunner::PatternRunner(const BenchSpec& plan, const Ranks& ranks, const ordered_json& environment)
    : plan_(plan),
      control_(ranks.control),
      measured_(ranks.measured),
      memory_(ranks.memory),
      environment_(environment) {
  std::vector<std::size_t> host_of_rank;
  if (environment.contains("hosts") && environment["hosts"].size() > 1)
    for (const ordered_json& rank : environment["ranks"]) host_of_rank.push_back(rank.at("host"));
  hosts_ = !host_of_rank.empty() && plan.pattern->kind != BenchPattern::Kind::groups;
  units_ = units_of(plan, host_of_rank);
  rounds_ = pattern_rounds(*plan.pattern, units_);
}

ordered_json PatternRunner::run(const BenchOp& op, std::uint64_t bytes) {
  using enum BenchPattern::Kind;
  const BenchPattern::Kind kind = plan_.pattern->kind;
  bytes_ = bytes;
  wrong_ = 0;
  Times times;
  for (const auto& round : rounds_) times.push_back(time_round(op, round));
  std::uint8_t again = slow_parts(rates_of(op, times), plan_.outlier).empty() ? 0 : 1;
  control_.all_reduce(&again, 1, comm::ReduceOp::max(), "bench");
  for (std::size_t r = 0; again != 0 && r < rounds_.size(); ++r) {
    const std::vector<double> second = time_round(op, rounds_[r]);
    for (std::size_t rank = 0; rank < second.size(); ++rank) times[r][rank] = std::min(times[r][rank], second[rank]);
  }
  const std::vector<UnitRate> rates = rates_of(op, times);
  ordered_json json = {
      {"pattern", plan_.pattern->name},
      {"backend", measured_.backend()},
      {"op", sends() ? "send" : op.name},
      {"one_way", sends() || kind == neighbors},
      {"bytes", sends() ? shape_of(op, 1).bytes : shape_of(op, rounds_.front().front().ranks.size()).bytes},
      {"dtype", base::name_of(plan_.dtype)},
      {"redop", op.reduces ? comm::name_of(plan_.redop) : "none"},
      {"memory", plan_.communicator_memory ? "communicator" : "ordinary"},
      {"unit", plan_.pattern->groups > 0 ? "group"
               : hosts_                  ? "host"
                                         : "rank"},
      {"units", units_json()},
      {"rounds", rounds_json(op, times)},
      {"rates", ordered_json::array()},
      {"outlier", plan_.outlier},
      {"slow", ordered_json::array()},
      {"wrong", plan_.check ? ordered_json(wrong_) : ordered_json()}};
  for (const UnitRate& rate : rates) json["rates"].push_back({{"units", rate.units}, {"gbps", rate.gbps}});
  for (const SlowPart& part : slow_parts(rates, plan_.outlier))
    json["slow"].push_back({{"units", part.units}, {"gbps", part.gbps}, {"median_gbps", part.median_gbps}});
  if (kind != pairs && kind != bisection) return json;
  json["matrix_gbps"] = std::vector(units_.size(), ordered_json(std::vector<ordered_json>(units_.size())));
  for (const UnitRate& rate : rates)
    for (const bool back : {false, true}) {
      if (back && sends()) continue;
      const int from = rate.units[back ? 1 : 0], to = rate.units[back ? 0 : 1];
      json["matrix_gbps"][static_cast<std::size_t>(from)][static_cast<std::size_t>(to)] = rate.gbps;
    }
  return json;
}

BenchShape PatternRunner::shape_of(const BenchOp& op, std::size_t ranks, int rank) const {
  return bench_shape(op, sends() ? bytes_ * ranks : bytes_, plan_.dtype, static_cast<int>(ranks), rank);
}

PatternRunner::Part PatternRunner::part_of(const BenchOp& op, const std::vector<PatternGroup>& round) {
  Part part;
  int color = -1;
  for (std::size_t g = 0; g < round.size(); ++g) {
    const auto found = std::ranges::find(round[g].ranks, control_.rank());
    if (found == round[g].ranks.end()) continue;
    part.group = &round[g];
    part.rank = static_cast<int>(found - round[g].ranks.begin());
    part.shape = shape_of(op, round[g].ranks.size(), part.rank);
    if (sends() && part.rank > 0) part.shape.out_count = 0;
    color = static_cast<int>(g);
  }
  if (op.kind != comm::OpKind::send && !sends()) part.communicator = measured_.split(color, part.rank);
  return part;
}

comm::Work PatternRunner::start(const Part& part) const {
  if (part.communicator) return part.call.start(*part.communicator);
  const std::vector<int>& ranks = part.group->ranks;
  const std::size_t n = ranks.size(), me = static_cast<std::size_t>(part.rank);
  std::vector<comm::P2POp> parts;
  if (!sends()) {
    parts = {comm::P2POp::send(part.call.in, ranks[(me + 1) % n]),
             comm::P2POp::recv(part.call.out, ranks[(me + n - 1) % n])};
  } else if (me > 0) {
    parts = {comm::P2POp::send(part.call.in, ranks.front())};
  } else {
    for (std::size_t sender = 1; sender < n; ++sender) {
      auto* const to =
          static_cast<std::byte*>(part.call.out.data) + sender * part.shape.count * base::size_of(part.call.out.dtype);
      parts.push_back(
          comm::P2POp::recv({to, part.shape.count, part.call.out.dtype, part.call.out.device}, ranks[sender]));
    }
  }
  return measured_.batch(parts);
}

/// The medians of each rank's times.
std::vector<double> PatternRunner::time_round(const BenchOp& op, const std::vector<PatternGroup>& round) {
  Part part = part_of(op, round);
  const bool in_place = sends();  // the receiver's own part is where the others arrive
  const BenchData data{&op, plan_.dtype, plan_.redop, part.group ? static_cast<int>(part.group->ranks.size()) : 1, 0};
  std::optional<BenchBuffers> buffers;
  if (part.group != nullptr) {
    buffers.emplace(memory_, part.rank, data, part.shape);
    buffers->fill(part.shape, in_place);
    part.call = buffers->call(part.shape, in_place);
  }
  const int calls = plan_.iterations.value_or(bytes_ <= (64 << 10) ? 100 : 20);  // enough for a median
  const auto body = [&] {
    if (part.group != nullptr) start(part).wait();
  };
  std::vector<double> samples;
  for (int i = -plan_.warmup; i < calls; ++i) {
    const double us = time_once(control_, {}, body);
    if (i >= 0) samples.push_back(part.group == nullptr ? 0 : us);
  }
  if (plan_.check) {
    if (part.group != nullptr) buffers->fill(part.shape, in_place);
    control_.communicator().barrier().wait();
    body();
    const bool has_output = part.group != nullptr && !expected_parts(data, part.shape, part.rank).empty();
    std::uint64_t wrong =
        has_output ? count_wrong(data, part.shape, part.rank, buffers->output(part.shape, in_place).data) : 0;
    control_.all_reduce(&wrong, 1, comm::ReduceOp::sum(), "bench");
    wrong_ += wrong;
  }
  const Times all = control_.gather_all(samples);
  std::vector<double> medians;
  for (int rank = 0; rank < plan_.ranks; ++rank) medians.push_back(median(all[static_cast<std::size_t>(rank)]));
  return medians;
}

double PatternRunner::time_of(const std::vector<double>& times, const PatternGroup& group) const {
  double slowest = 0;
  for (const int rank : group.ranks) slowest = std::max(slowest, times[static_cast<std::size_t>(rank)]);
  return slowest;
}

double PatternRunner::gbps(const BenchOp& op, double us, std::size_t ranks) const {
  const double bytes = static_cast<double>(shape_of(op, ranks).bytes) * bus_factor(op, static_cast<int>(ranks));
  return us > 0 ? bytes / us * 1e-3 : 0;
}

/// A ring of neighbors has a rate for each of its links: its two ranks are done when all of theirs are, so the link
/// took no longer than the faster one.
std::vector<UnitRate> PatternRunner::rates_of(const BenchOp& op, const Times& times) const {
  std::vector<UnitRate> rates;
  const auto add = [&](const std::vector<int>& units, double us, std::size_t ranks) {
    const double rate = gbps(op, us, ranks);
    const auto known = std::ranges::find(rates, units, &UnitRate::units);
    if (known == rates.end())
      rates.push_back({units, rate});
    else
      known->gbps += rate;  // groups of the same two hosts, at the same time
  };
  for (std::size_t r = 0; r < rounds_.size(); ++r)
    for (const PatternGroup& group : rounds_[r]) {
      const std::size_t n = group.ranks.size();
      if (plan_.pattern->kind != BenchPattern::Kind::neighbors) add(group.units, time_of(times[r], group), n);
      for (std::size_t i = 0; plan_.pattern->kind == BenchPattern::Kind::neighbors && i < n; ++i) {
        const std::size_t next = (i + 1) % n;
        add({group.units[i], group.units[next]},
            std::min(times[r][static_cast<std::size_t>(group.ranks[i])],
                     times[r][static_cast<std::size_t>(group.ranks[next])]),
            n);
      }
    }
  return rates;
}

ordered_json PatternRunner::rounds_json(const BenchOp& op, const Times& times) const {
  ordered_json rounds = ordered_json::array();
  for (std::size_t r = 0; r < rounds_.size(); ++r) {
    ordered_json groups = ordered_json::array();
    double sum = 0;
    for (const PatternGroup& group : rounds_[r]) {
      const double us = time_of(times[r], group);
      const double rate = gbps(op, us, group.ranks.size());
      sum += rate;
      groups.push_back({{"ranks", group.ranks}, {"units", group.units}, {"time_us", us}, {"busbw_gbps", rate}});
    }
    rounds.push_back({{"sum_gbps", sum}, {"groups", groups}});
  }
  return rounds;
}

ordered_json PatternRunner::units_json() const {
  ordered_json units = ordered_json::array();
  for (std::size_t u = 0; u < units_.size(); ++u) {
    std::string name = fmt::format("rank {}", u);
    if (plan_.pattern->groups > 0)
      name = fmt::format("group {} (ranks {} to {})", u, units_[u].front(), units_[u].back());
    if (hosts_) name = fmt::format("host {} ({})", u, environment_["hosts"][u].at("name").get<std::string>());
    units.push_back({{"name", name}, {"ranks", units_[u]}});
  }
  return units;
}

}  // namespace tessera::tools
