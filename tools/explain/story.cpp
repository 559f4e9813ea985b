// The story of a step: make_story() of explanation.h.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "tools/cli/output.h"
#include "tools/explain/explanation.h"

namespace tessera::tools {
namespace {

using base::TraceEvent;
using base::TraceEventKind;
using plan::TransferRecord;

/// Shorter waits are no rows: they would be shown as 0.000 ms.
constexpr std::int64_t kShownNs = 500;
/// Resumptions shorter than this part of the step are no rows: on real ranks every hook takes a microsecond.
constexpr std::int64_t kGaps = 1000;
/// Times in a queue that are shorter than this part of the step are not mentioned.
constexpr std::int64_t kQueues = 100;

bool starts_transfers(const TraceEvent& event) {
  return event.kind == TraceEventKind::unshard_issue || event.kind == TraceEventKind::reduce_issue;
}

class StoryBuilder {
 public:
  explicit StoryBuilder(const StoryInput& input) : input_(input) {
    story_.units.resize(input.wrapping.units().size());
    story_.step_ns = input.step_ns;
    shown_gap_ = std::max(kShownNs, input.step_ns / kGaps);
  }

  Story build() {
    for (index_ = 0; index_ < input_.events.size(); ++index_) add(input_.events[index_]);
    close_spans(std::numeric_limits<std::int64_t>::max());
    std::ranges::stable_sort(story_.rows, {}, &StoryRow::at_ns);
    return std::move(story_);
  }

 private:
  void add(const TraceEvent& event) {
    if (!starts_transfers(event)) close_spans(event.start_ns);
    switch (event.kind) {
      case TraceEventKind::unshard_issue:
        return unshard(event);
      case TraceEventKind::unshard_wait:
        return wait(event, "wait for " + event.unit);
      case TraceEventKind::forward:
        return forward(event);
      case TraceEventKind::backward:
        return backward(event);
      case TraceEventKind::reshard:
        return reshard(event);
      case TraceEventKind::reduce_issue:
        return reduce(event);
      case TraceEventKind::reduce_wait:
        return wait(event, "wait for " + event.unit + "'s reduction");
      case TraceEventKind::optimizer_step:
        return update(event);
    }
  }

  StoryRow& row(const TraceEvent& event, std::int64_t at_ns, std::string text, std::string note = "") {
    story_.rows.push_back({.kind = event.kind,
                           .unit = event.unit,
                           .at_ns = at_ns - input_.begin_ns,
                           .text = std::move(text),
                           .note = std::move(note)});
    return story_.rows.back();
  }

  const WrappedUnit& unit(const TraceEvent& event) const { return input_.wrapping.unit(event.unit); }
  UnitStory& unit_story(const TraceEvent& event) {
    return story_.units[static_cast<std::size_t>(&unit(event) - input_.wrapping.units().data())];
  }
  int parts_at_rest(const WrappedUnit& unit) const { return parts_over(unit.strategy.param_at_rest, input_.mesh); }
  const IssuedTransfers& issued() const { return input_.issued[index_]; }

  void unshard(const TraceEvent& event) {
    UnitStory& told = unit_story(event);
    const bool again = told.unshards_before_backward + told.unshards_in_backward > 0;
    (updated_       ? told.all_gathers_after_update
     : in_backward_ ? told.unshards_in_backward
                    : told.unshards_before_backward)++;
    StoryRow& added = row(event, called_ns(event), (updated_ ? "all-gather " : "unshard ") + event.unit);
    const int parts = parts_at_rest(unit(event));
    std::vector<std::string> notes;
    if (updated_)
      notes.emplace_back("shards that other ranks have updated");
    else if (again)
      notes.emplace_back("again: it was resharded");
    else if (story_.rows.size() == 1 && parts > 1)
      notes.push_back(
          fmt::format("{} shard{} come{}, own goes out", parts - 1, parts == 2 ? "" : "s", parts == 2 ? "s" : ""));
    if (!updated_ && is_ahead(event)) notes.emplace_back("ahead of need");
    const IssuedTransfers& sent = issued();
    added.sent = sent.bytes_sent;
    if (sent.queued_ns >= input_.step_ns / kQueues)
      notes.push_back(fmt::format("queued {:.3f}", static_cast<double>(sent.queued_ns) / 1e6));
    if (sent.rounds > 1)
      notes.push_back(fmt::format("{} rounds in {:.3f}", sent.rounds, static_cast<double>(event.duration_ns()) / 1e6));
    added.note = joined_by(notes, ", ");
    if (parts == 1) return;
    const WrappedUnit& unsharded_unit = unit(event);
    const int kept_parts = parts_over(unsharded_unit.strategy.param_after_forward, input_.mesh);
    unsharded_[event.unit] = unsharded_unit.bytes;
    if (kept_parts > 1 && kept_parts < parts && !unsharded_unit.kept_after_forward)
      secondary_[event.unit] = unsharded_unit.bytes / static_cast<std::uint64_t>(kept_parts);
    added.unsharded = unsharded();
    if (*added.unsharded == input_.wrapping.bytes() && unsharded_.size() > 1)
      added.note += added.note.empty() ? "the whole model" : ", the whole model";
  }

  /// When an all-gather could begin: a device's streams are given work long before.
  std::int64_t called_ns(const TraceEvent& event) const { return std::max(event.start_ns, issued().called_ns); }

  /// Whether compute goes on with another unit after this event.
  bool is_ahead(const TraceEvent& event) const {
    for (std::size_t i = index_ + 1; i < input_.events.size(); ++i)
      if (!starts_transfers(input_.events[i])) return input_.events[i].unit != event.unit;
    return false;
  }

  std::uint64_t unsharded() {
    std::uint64_t sum = 0;
    for (const auto* leases : {&unsharded_, &secondary_})
      for (const auto& [name, bytes] : *leases) sum += bytes;
    story_.most_unsharded = std::max(story_.most_unsharded, sum);
    return sum;
  }

  void wait(const TraceEvent& event, std::string text) {
    if (event.duration_ns() >= kShownNs) row(event, event.start_ns, std::move(text)).wait_ns = event.duration_ns();
    spans_.push_back(&event);
  }

  void forward(const TraceEvent& event) {
    // A recomputation is inside a backward; any other forward is the next microbatch's.
    const bool again =
        std::ranges::any_of(spans_, [](const TraceEvent* span) { return span->kind == TraceEventKind::backward; });
    if (!again) in_backward_ = false;
    const WrappedUnit& begun = unit(event);
    std::string note = again ? "again: its activations were not kept" : own_modules(begun, begun.first);
    row(event, event.start_ns, "forward " + event.unit, std::move(note));
    if (!again) story_.forward_end_ns = std::max(story_.forward_end_ns, event.end_ns - input_.begin_ns);
    spans_.push_back(&event);
  }

  void backward(const TraceEvent& event) {
    in_backward_ = true;
    const WrappedUnit& begun = unit(event);
    const bool outer = !begun.first.empty() || !begun.last.empty();
    std::string note = begun.is_root && outer && holds_others(event) ? "from the loss: " + joined_by(begun.last, " ")
                                                                     : "gradients of its own data";
    if (std::exchange(gradients_explained_, true) && !begun.is_root) note.clear();
    if (begun.is_root) gradients_explained_ = !holds_others(event);
    row(event, event.start_ns, "backward " + event.unit, std::move(note));
    spans_.push_back(&event);
  }

  void reshard(const TraceEvent& event) {
    UnitStory& told = unit_story(event);
    if (!in_backward_) told.resharded_after_forward = true;
    unsharded_.erase(event.unit);
    if (in_backward_) secondary_.erase(event.unit);
    const int parts = parts_at_rest(unit(event));
    StoryRow& added = row(event, event.start_ns, "reshard " + event.unit);
    if (!in_backward_ && parts > 1)
      added.note = fmt::format("{} shard{} go{}, own stays", parts - 1, parts == 2 ? "" : "s", parts == 2 ? "es" : "");
    added.unsharded = unsharded();
  }

  void reduce(const TraceEvent& event) {
    ++unit_story(event).reductions;
    std::string operation = issued().operation;
    std::ranges::replace(operation, '_', '-');
    if (operation.empty()) return;  // nothing of it is trained
    const bool joins = !story_.rows.empty() && story_.rows.back().kind == TraceEventKind::reshard &&
                       story_.rows.back().unit == event.unit;
    StoryRow& added = joins ? story_.rows.back() : row(event, event.start_ns, "");
    added.text =
        joins ? added.text + ", " + operation + " its gradients" : operation + " the gradients of " + event.unit;
    added.sent = issued().bytes_sent;
  }

  void update(const TraceEvent& event) {
    updated_ = true;
    const WrappedUnit& own = unit(event);
    std::int64_t elements = shard_of(0, own.padded, own.strategy.optimizer, input_.mesh).count();
    if (!story_.rows.empty() && story_.rows.back().kind == TraceEventKind::optimizer_step) {
      updated_elements_ += elements;
      story_.rows.back().text = "update";
      story_.rows.back().unit.clear();
    } else {
      updated_elements_ = elements;
      row(event, event.start_ns, "update " + event.unit);
    }
    const bool sharded = parts_over(own.strategy.optimizer, input_.mesh) > 1;
    story_.rows.back().note =
        fmt::format("{} {} parameters", sharded ? "its own shards:" : "all", with_commas(updated_elements_));
  }

  /// Ends the spans that are over at `now`, and adds a row where the one around goes on computing.
  void close_spans(std::int64_t now) {
    while (!spans_.empty() && spans_.back()->end_ns <= now) {
      const TraceEvent& ended = *spans_.back();
      spans_.pop_back();
      if (spans_.empty()) return;
      const TraceEvent& around = *spans_.back();
      if (std::min(now, around.end_ns) - ended.end_ns >= shown_gap_) resume(around, ended.end_ns);
    }
  }

  void resume(const TraceEvent& event, std::int64_t at_ns) {
    const bool forward = event.kind == TraceEventKind::forward;
    const WrappedUnit& goes_on = unit(event);
    const bool more = std::ranges::any_of(input_.events, [&](const TraceEvent& later) {
      return later.kind == event.kind && later.start_ns >= at_ns && later.start_ns < event.end_ns;
    });
    std::string note;
    if (!more && goes_on.is_root) note = joined_by(forward ? goes_on.last : goes_on.first, " ");
    if (!more && forward && goes_on.is_root) note += note.empty() ? "the loss" : ", the loss";
    row(event, at_ns, (forward ? "forward " : "backward ") + event.unit + ", on", std::move(note));
  }

  /// Whether other units compute inside this event.
  bool holds_others(const TraceEvent& event) const {
    return std::ranges::any_of(input_.events, [&](const TraceEvent& other) {
      return other.kind == event.kind && &other != &event && other.start_ns >= event.start_ns &&
             other.end_ns <= event.end_ns && other.unit != event.unit;
    });
  }

  std::string own_modules(const WrappedUnit& unit, const std::vector<std::string>& names) const {
    return unit.is_root && !names.empty() ? joined_by(names, " ") + ", of its own sequences" : "";
  }

  const StoryInput& input_;
  Story story_;
  std::size_t index_ = 0;
  std::int64_t shown_gap_ = 0;
  std::vector<const TraceEvent*> spans_;  // not ended, outermost first
  bool in_backward_ = false, updated_ = false, gradients_explained_ = false;
  std::map<std::string, std::uint64_t> unsharded_, secondary_;
  std::int64_t updated_elements_ = 0;
};

}  // namespace

std::vector<std::optional<std::size_t>> starting_events(const StepPlan& step) {
  std::vector<std::optional<std::size_t>> started(step.transfers.size());
  // Both lists are in the order of the program. A transfer belongs to the next event of its unit; a further round of a
  // collective, which no event announces, to the last one.
  std::size_t current = 0;
  std::map<std::string, std::size_t> last;
  for (std::size_t i = 0; i < step.transfers.size(); ++i) {
    const TransferRecord& transfer = step.transfers[i];
    std::size_t next = last.empty() ? 0 : current + 1;
    while (next < step.events.size() &&
           !(starts_transfers(step.events[next]) && step.events[next].unit == transfer.label &&
             step.events[next].start_ns <= transfer.called_ns))
      ++next;
    if (next < step.events.size()) current = last[transfer.label] = next;
    if (const auto found = last.find(transfer.label); found != last.end()) started[i] = found->second;
  }
  return started;
}

std::vector<IssuedTransfers> issued_transfers(const StepPlan& step) {
  std::vector<IssuedTransfers> issued(step.events.size());
  std::map<const IssuedTransfers*, plan::RankSet> members;  // of the last transfer
  const std::vector<std::optional<std::size_t>> started = starting_events(step);
  for (std::size_t i = 0; i < step.transfers.size(); ++i) {
    if (!started[i]) continue;
    const TransferRecord& transfer = step.transfers[i];
    IssuedTransfers& found = issued[*started[i]];
    if (found.operation.empty()) {
      found.operation = comm::name_of(transfer.operation.kind);
      found.ranks = transfer.operation.ranks;
      found.called_ns = transfer.called_ns;
      members[&found] = transfer.operation.members;
      found.queued_ns = transfer.begun_ns - transfer.called_ns;
    }
    if (transfer.operation.ranks != found.ranks || !(transfer.operation.members == members[&found])) {
      ++found.rounds;
      found.ranks = transfer.operation.ranks;
    }
    members[&found] = transfer.operation.members;
    found.bytes_sent += transfer.operation.bytes_sent;
  }
  return issued;
}

Story make_story(const StoryInput& input) { return StoryBuilder(input).build(); }

}  // namespace tessera::tools
