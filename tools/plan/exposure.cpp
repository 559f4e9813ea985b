#include "tools/plan/exposure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace tessera::tools {

using base::TraceEvent;
using plan::TransferRecord;

namespace {

constexpr std::size_t kSentences = 3;
/// Waits below this part of the step are not worth a sentence.
constexpr double kWorthwhile = 0.005;

/// The transfer whose end the wait waits for: the last one that is done in time.
const TransferRecord* awaited(const StepPlan& plan, const TraceEvent& wait) {
  const TransferRecord* found = nullptr;
  for (const auto* transfers : {&plan.in_flight, &plan.transfers})
    for (const TransferRecord& transfer : *transfers)
      if (transfer.done_ns <= wait.end_ns && transfer.done_ns > wait.start_ns &&
          (found == nullptr || transfer.done_ns >= found->done_ns))
        found = &transfer;
  return found;
}

double ms(std::int64_t ns) { return static_cast<double>(ns) / 1e6; }

std::string sentence(const TraceEvent& wait, const TransferRecord& transfer, std::int64_t tokens) {
  const std::string what = fmt::format("{}'s {}", wait.unit, comm::name_of(transfer.operation.kind));
  const std::int64_t duration = transfer.done_ns - transfer.begun_ns;
  const std::int64_t hidden = std::max<std::int64_t>(0, wait.start_ns - transfer.called_ns);
  std::string text = fmt::format("{} is exposed by {:.3g} ms: ", what, ms(wait.duration_ns()));
  if (transfer.begun_ns > transfer.called_ns)
    text += fmt::format("it waits {:.3g} ms for its link and ", ms(transfer.begun_ns - transfer.called_ns));
  text += fmt::format("{}travels for {:.3g} ms", transfer.begun_ns > transfer.called_ns ? "" : "it ", ms(duration));
  if (hidden == 0) return text + ", and nothing computes beside it.";
  const double needed = static_cast<double>(tokens) * static_cast<double>(transfer.done_ns - transfer.called_ns) /
                        static_cast<double>(hidden);
  return text + fmt::format(", and {} tokens per rank compute for {:.3g} ms beside it; {:.0f} would hide it.", tokens,
                            ms(hidden), std::ceil(needed / 10) * 10);
}

}  // namespace

std::vector<std::string> exposure_sentences(const StepPlan& plan, std::int64_t tokens) {
  std::vector<const TraceEvent*> waits;
  for (const TraceEvent& event : plan.events)
    if (is_wait(event) && ms(event.duration_ns()) > kWorthwhile * plan.result.step_ms_median) waits.push_back(&event);
  std::stable_sort(waits.begin(), waits.end(),
                   [](const TraceEvent* a, const TraceEvent* b) { return a->duration_ns() > b->duration_ns(); });
  std::vector<std::string> sentences;
  for (const TraceEvent* wait : waits) {
    if (sentences.size() == kSentences) break;
    const TransferRecord* transfer = awaited(plan, *wait);
    if (transfer != nullptr) sentences.push_back(sentence(*wait, *transfer, tokens));
  }
  if (sentences.empty() && plan.result.exposed_communication_ms <= kWorthwhile * plan.result.step_ms_median)
    sentences.emplace_back("Communication is hidden behind computation, but for less than 0.5 % of the step.");
  return sentences;
}

}  // namespace tessera::tools
