#include "tools/results/repeated_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

double median_of(const std::vector<RunResult>& rounds, double RunResult::*figure) {
  std::vector<double> values;
  for (const RunResult& round : rounds) values.push_back(round.*figure);
  return median(std::move(values));
}

bool ends_alike(const RunResult& a, const RunResult& b) {
  return a.final_parameters_hash == b.final_parameters_hash && same_bits(a.losses, b.losses);
}

}  // namespace

RunResult combine_rounds(const std::vector<RunResult>& rounds) {
  RunResult all = rounds.front();
  if (rounds.size() == 1) return all;
  for (double RunResult::*figure : {&RunResult::step_ms_median, &RunResult::step_ms_p95, &RunResult::tokens_per_second,
                                    &RunResult::exposed_communication_ms})
    all.*figure = median_of(rounds, figure);
  std::vector<StepParts> of_rounds;
  for (std::size_t i = 0; i < rounds.size(); ++i) {
    const RunResult& round = rounds[i];
    all.round_step_ms.push_back(round.step_ms_median);
    if (!ends_alike(round, rounds.front())) all.unequal_rounds.push_back(static_cast<int>(i) + 1);
    if (round.peak_bytes.total_peak > all.peak_bytes.total_peak) all.peak_bytes = round.peak_bytes;
    if (round.parts) of_rounds.push_back(*round.parts);
    if (round.link && all.link && round.link->percent > all.link->percent) all.link = round.link;
  }
  if (!of_rounds.empty()) all.parts = mean_of(of_rounds);
  return all;
}

std::size_t median_round(const std::vector<double>& step_ms) {
  std::vector<std::size_t> order(step_ms.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return step_ms[a] < step_ms[b]; });
  return order.empty() ? 0 : order[(order.size() - 1) / 2];
}

std::string unequal_rounds_text(const std::vector<RunResult>& runs) {
  std::string text;
  for (const RunResult& run : runs)
    if (!run.unequal_rounds.empty())
      text += fmt::format("{}: NOT REPEATABLE: round {} ended with other losses or parameters than round 1\n",
                          name_of(run), fmt::join(run.unequal_rounds, ", "));
  return text;
}

}  // namespace tessera::tools
