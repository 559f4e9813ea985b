#include "tools/explain/step_page.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/cli/output.h"
#include "tools/explain/sections.h"
#include "tools/pages/page.h"

namespace tessera::tools {
namespace {

constexpr int kMostRanks = 8;           // that pictures show
constexpr std::size_t kPageWidth = 80;  // columns of the story

/// The row of the story without its columns.
std::string sentence_of(const StoryRow& row) {
  std::string text = row.text;
  if (row.wait_ns) text += fmt::format(", {:.3f} ms", static_cast<double>(*row.wait_ns) / 1e6);
  if (!row.note.empty()) text += " (" + row.note + ")";
  if (row.sent) text += fmt::format(", {} B sent", with_commas(*row.sent));
  return text;
}

}  // namespace

StepTimeline simulated_timeline(const StepPlan& step, std::int64_t length_ns) {
  StepTimeline timeline{.step = 1, .length_ns = length_ns, .simulated = true};
  RankTimeline rank{.events = step.events, .memory = samples_of(step.step_memory, step.begin_ns, kMostSamples)};
  for (base::TraceEvent& event : rank.events) {
    event.start_ns -= step.begin_ns;
    event.end_ns -= step.begin_ns;
  }
  const std::vector<base::TransferEvent> transfers = transfer_events(step);
  const std::vector<std::optional<std::size_t>> started = starting_events(step);
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    if (!started[i]) continue;
    Transfer& added = rank.transfers.emplace_back(Transfer{transfers[i], *started[i]});
    for (std::int64_t* const time : {&added.times.called_ns, &added.times.begun_ns, &added.times.done_ns})
      *time -= step.begin_ns;
  }
  for (rank.rank = 0; rank.rank < std::min(kMostRanks, step.mesh.size()); ++rank.rank) {
    for (base::TraceEvent& event : rank.events) event.rank = rank.rank;
    for (Transfer& transfer : rank.transfers) transfer.times.rank = rank.rank;
    timeline.ranks.push_back(rank);
  }
  return timeline;
}

std::string explain_page(const Explanation& explanation, const std::vector<std::string>& command) {
  RunResult run = explanation.step.result;
  run.timeline = explanation.timeline;
  if (explanation.real) run.peak_bytes = {};  // the simulated rank's
  pages::StepStory story{.title = explanation.title,
                         .times = "T" + explanation.machine.substr(1) + ".",
                         .teller = explanation.real              ? fmt::format("rank {}", explanation.plan.ranks - 1)
                                   : explanation.plan.ranks == 1 ? "the rank"
                                                                 : "every rank",
                         .command = command};
  for (const StoryRow& row : explanation.story.rows) story.sentences.push_back({row.at_ns, sentence_of(row)});
  story.sentences.push_back({explanation.story.step_ns, "the step ends"});
  story.text = to_text(explanation, {}, kPageWidth);
  return pages::page_of_step(story, run);
}

}  // namespace tessera::tools
