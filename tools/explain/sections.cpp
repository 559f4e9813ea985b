// The facts of a step as text: to_text() and answer_text() of explanation.h.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <map>

#include "tessera/base/error.h"
#include "tools/cli/output.h"
#include "tools/explain/explanation.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kIndent = 6;  // of what stands under a section's name
constexpr std::size_t kShownShards = 8;
constexpr std::size_t kValueName = 25, kValueWidth = 10;  // columns of VALUES
/// Rows of units beyond these many from either end are left out of a long story.
constexpr std::size_t kShownUnits = 3;
constexpr std::size_t kMostAction = 17;     // columns, of a step's actions beside notes
constexpr std::size_t kLeastContents = 16;  // columns, for what a unit is; else it goes on below

double ms_of(std::int64_t ns) { return static_cast<double>(ns) / 1e6; }

/// `text` in lines of at most `width` columns: the first after `head`, the others at its width.
std::string wrapped(std::size_t width, const std::string& head, const std::string& text) {
  std::string all, line = head;
  std::size_t start = 0;
  bool first = true;
  while (start < text.size()) {
    const std::size_t end = std::min(text.find(' ', start), text.size());
    const std::string word = text.substr(start, end - start);
    if (!first && line.size() + 1 + word.size() > width) {
      all += line + "\n";
      line = std::string(head.size(), ' ') + word;
    } else {
      line += (first ? "" : " ") + word;
    }
    first = false;
    start = end + 1;
  }
  return all + line + "\n";
}

std::string heading(const char* name) { return fmt::format("{:<{}}", name, kIndent); }
const std::string kMargin(kIndent, ' ');

/// Without spaces at the end.
std::string line_of(std::string text) {
  text.erase(text.find_last_not_of(' ') + 1);
  return text + "\n";
}

/// A note after a row, or below it where there is no room.
std::string beside_or_below(std::size_t width, const std::string& row, const std::string& note) {
  return row.size() + note.size() <= width ? line_of(row + note) : line_of(row) + wrapped(width, kMargin + "  ", note);
}

std::string after_forward(const Explanation& step, std::size_t index) {
  const WrappedUnit& unit = step.wrapping->units()[index];
  const UnitStory& told = step.story.units[index];
  if (told.unshards_before_backward == 0) return "always whole";
  if (told.resharded_after_forward) return "resharded";
  return unit.is_root ? "stays: the root" : index + 1 == step.wrapping->units().size() ? "stays: the last" : "stays";
}

/// Rows of units that are alike are one row.
std::vector<std::pair<std::size_t, std::size_t>> alike(const Explanation& step) {
  std::vector<std::pair<std::size_t, std::size_t>> groups;
  const std::vector<WrappedUnit>& units = step.wrapping->units();
  for (std::size_t i = 0; i < units.size(); ++i) {
    const bool same = units.size() > 2 * kShownUnits && i > 0 && units[i].elements == units[i - 1].elements &&
                      units[i].contents == units[i - 1].contents &&
                      after_forward(step, i) == after_forward(step, i - 1);
    if (!same) groups.emplace_back(i, i);
    groups.back().second = i;
  }
  return groups;
}

/// "ranks 0, 2": those that keep one shard.
std::string ranks_of_shard(const Shard& shard) {
  if (shard.ranks.size() == 1) return fmt::format("rank {}", shard.ranks[0]);
  if (shard.ranks.size() > 4) return fmt::format("ranks {}, {} ..", shard.ranks[0], shard.ranks[1]);
  return fmt::format("ranks {}", joined_by(shard.ranks, ", "));
}

std::string shards_text(const Explanation& step, std::size_t width) {
  const WrappedUnit& unit = step.wrapping->example();
  const std::vector<Shard> shards = shards_of(unit, unit.strategy.optimizer, step.step.mesh);
  if (shards.size() == 1) return kMargin + "No shards: every rank keeps all of every unit.\n";
  const fsdp::FlatLayout& flat = unit.largest();
  const std::string of = unit.flats.size() == 1
                             ? unit.name
                             : fmt::format("{}, {} {} parameters", unit.name, flat.trainable ? "trained" : "frozen",
                                           base::name_of(flat.dtype));
  std::string text = wrapped(
      width, kMargin,
      fmt::format("Shards of {}. Their bounds ignore tensors; the layout is the same under every strategy:", of));
  std::size_t ranks = 0, end = 0;
  for (const Shard& shard : shards) {
    ranks = std::max(ranks, ranks_of_shard(shard).size());
    end = std::max(end, std::to_string(shard.range.end - 1).size());
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (shards.size() > kShownShards && i >= kShownShards / 2 && i + 1 < shards.size()) {
      if (i == kShownShards / 2) text += kMargin + fmt::format("... {} more\n", shards.size() - kShownShards / 2 - 1);
      continue;
    }
    const Shard& shard = shards[i];
    text += wrapped(width,
                    fmt::format("{}{:<{}}  {:>{}}..{:<{}}  ", kMargin, ranks_of_shard(shard), ranks, shard.range.begin,
                                end, shard.range.end - 1, end),
                    joined_by(shard.contents, ", "));
  }
  return text;
}

std::string wrapping_text(const Explanation& step, std::size_t width) {
  const std::vector<WrappedUnit>& units = step.wrapping->units();
  std::size_t widest = 4;
  std::vector<std::string> names;
  for (const auto& [first, last] : alike(step)) {
    names.push_back(first == last ? units[first].name
                                  : fmt::format("{} .. {}, each", units[first].name, units[last].name));
    widest = std::max(widest, names.back().size());
  }
  std::string text = heading("WRAP") + fmt::format("{:<{}}  {:>11} {:>13} {:>12}  {:<15}", "unit", widest,
                                                   step.wrapping->encoded() ? "elements" : "parameters", "bytes",
                                                   "a rank keeps", "after forward");
  text = text.size() + 2 + kLeastContents <= width ? text + "  what it is\n" : line_of(text);
  std::size_t row = 0;
  for (const auto& [first, last] : alike(step)) {
    const WrappedUnit& unit = units[first];
    const auto parts = static_cast<std::uint64_t>(parts_over(unit.strategy.param_at_rest, step.step.mesh));
    const std::string head = fmt::format("{}{:<{}}  {:>11} {:>13} {:>12}  {:<15}  ", kMargin, names[row++], widest,
                                         with_commas(unit.elements), with_commas(unit.bytes),
                                         with_commas(unit.bytes / parts), after_forward(step, first));
    text += head.size() + kLeastContents <= width ? wrapped(width, head, unit.contents)
                                                  : line_of(head) + wrapped(width, kMargin + "    ", unit.contents);
  }
  return text + shards_text(step, width);
}

std::string state_row(std::size_t width, const std::string& name, const RunResult::ModelState& state,
                      const std::string& note) {
  const std::string row =
      fmt::format("{}{:<15} {:>13} {:>13} {:>13} {:>13}", kMargin, name, with_commas(state.parameter),
                  with_commas(state.gradient), with_commas(state.optimizer), with_commas(state.total()));
  return beside_or_below(width, row + "  ", note);
}

/// "= 16 P": bytes for each parameter, padding included.
std::string per_parameter(const RunResult::ModelState& state, std::int64_t padded) {
  const double bytes = static_cast<double>(state.total()) / static_cast<double>(padded);
  return std::abs(bytes - std::round(bytes)) < 1e-9 ? fmt::format("= {:.0f} P", bytes)
                                                    : fmt::format("= {:.3g} P", bytes);
}

std::string rest_text(const Explanation& step, std::size_t width) {
  const RunResult::ModelState& state = step.step.result.model_state_bytes;
  std::string text = heading("REST") + fmt::format("{:<15} {:>13} {:>13} {:>13} {:>13}\n", "a rank keeps, B",
                                                   "parameters", "gradients", "optimizer", "together");
  const std::int64_t padded = step.wrapping->padded();
  const char* const of = step.wrapping->encoded() ? " elements; one in 4 bits holds two parameters" : "";
  text += state_row(width, step.step.result.strategy, state,
                    per_parameter(state, padded) + ", P = " + with_commas(padded) + of);
  if (!step.reference) return text;
  const RunResult::ModelState& whole = step.reference->result.model_state_bytes;
  return text + state_row(width, step.reference_name, whole, per_parameter(whole, padded));
}

/// Width of what happens, and of the action in it, before its note.
struct StepColumns {
  std::size_t width = 100;
  std::size_t at = 13, what = 50, sent = 11, unsharded = 12, waits = 8, action = 12;
};

StepColumns step_columns(const Story& story, std::size_t width) {
  StepColumns columns;
  if (width < columns.width) columns = {.width = width, .at = 9, .sent = 11, .unsharded = 11, .waits = 8};
  columns.what = width - columns.at - columns.sent - columns.unsharded - columns.waits - 6;
  for (const StoryRow& row : story.rows)
    if (!row.note.empty()) columns.action = std::min(kMostAction, std::max(columns.action, row.text.size()));
  return columns;
}

std::string step_row(const StepColumns& columns, const std::string& at, const std::string& what,
                     const std::array<std::string, 3>& numbers) {
  return line_of(fmt::format("{:>{}}  {:<{}} {:>{}} {:>{}} {:>{}}", at, columns.at, what, columns.what, numbers[0],
                             columns.sent, numbers[1], columns.unsharded, numbers[2], columns.waits));
}

/// A note that is too long for its column goes on below.
std::string step_row(const StepColumns& columns, const StoryRow& row) {
  std::string what = row.text, rest;
  if (!row.note.empty()) {
    what = fmt::format("{:<{}} ", row.text, columns.action);
    const std::size_t room = columns.what > what.size() ? columns.what - what.size() : 0;
    const std::size_t end = row.note.size() <= room ? row.note.size() : row.note.rfind(' ', room);
    what += row.note.substr(0, end);
    if (end < row.note.size()) rest = row.note.substr(end + 1);
  }
  std::string text = step_row(columns, fmt::format("{:.3f}", ms_of(row.at_ns)), what,
                              {row.sent ? with_commas(*row.sent) : "", row.unsharded ? with_commas(*row.unsharded) : "",
                               row.wait_ns ? fmt::format("{:.3f}", ms_of(*row.wait_ns)) : ""});
  if (!rest.empty()) text += wrapped(columns.width, std::string(columns.at + 2 + columns.action + 1, ' '), rest);
  return text;
}

/// Whether a row is of a unit in the middle of many.
bool left_out(const Explanation& step, const StoryRow& row) {
  const std::vector<WrappedUnit>& units = step.wrapping->units();
  if (row.unit.empty() || units.size() <= 2 * kShownUnits) return false;
  const auto index = static_cast<std::size_t>(&step.wrapping->unit(row.unit) - units.data());
  return index >= kShownUnits && index + kShownUnits - 1 < units.size();
}

std::string step_text(const Explanation& step, bool all, std::size_t width) {
  const int ranks = step.plan.ranks;
  const std::int64_t each = step.plan.options.global_batch / ranks;
  const std::string own = each == 1 ? "sequence r" : fmt::format("sequences {}r..{}r+{}", each, each, each - 1);
  std::string text = heading("STEP") + (ranks == 1 ? "one rank does this\n"
                                                   : "all ranks do this at the same time, rank r with " + own + "\n");
  const StepColumns columns = step_columns(step.story, width);
  text += step_row(columns, "at ms", "", {"sends B", "unsharded B", "waits ms"});
  std::vector<const StoryRow*> skipped;
  const auto flush = [&] {
    if (skipped.size() == 1) text += step_row(columns, *skipped.front());
    if (skipped.size() > 1)
      text +=
          step_row(columns, "...", fmt::format("{} rows of the units between; see --section step", skipped.size()), {});
    skipped.clear();
  };
  for (const StoryRow& row : step.story.rows) {
    if (!all && left_out(step, row)) {
      skipped.push_back(&row);
      continue;
    }
    flush();
    text += step_row(columns, row);
  }
  flush();
  return text + step_row(columns, fmt::format("{:.3f}", ms_of(step.story.step_ns)), "end", {});
}

std::string counted_units(const OperationCost& cost) {
  std::vector<std::string> names;
  std::map<int, int> by_count;
  for (const auto& [name, count] : cost.units) {
    names.push_back(count == 1 ? name : fmt::format("{} x {}", count, name));
    ++by_count[count];
  }
  if (names.size() > 4) {
    names.clear();
    for (const auto& [count, units] : by_count)
      names.push_back(fmt::format("{} units{}", units, count == 1 ? "" : fmt::format(" {} times", count)));
  }
  return joined_by(names, ", ");
}

/// "3/4 x 682,240: root, 2 x h.0", if that is what was sent: another algorithm, or a plug-in, may send something else.
std::string factors(const OperationCost& cost) {
  const auto ranks = static_cast<std::uint64_t>(cost.ranks);
  const std::uint64_t rounds = cost.kind == comm::OpKind::all_reduce ? 2 : 1;
  if (cost.bytes_sent * ranks != rounds * (ranks - 1) * cost.bytes) return counted_units(cost);
  return fmt::format("= {}{}/{} x {}: {}", rounds == 2 ? "2 x " : "", ranks - 1, ranks, with_commas(cost.bytes),
                     counted_units(cost));
}

std::string no_operations(const Explanation& step) {
  const fsdp::Strategy& strategy = step.wrapping->example().strategy;
  if (fsdp::periodic_axis(strategy).empty()) return "no operations between ranks\n";
  return fmt::format("no operations between ranks in this step: replicas synchronize after every {} steps\n",
                     sync_period(strategy));
}

std::string cost_text(const Explanation& step, std::size_t width) {
  std::string text = heading("COST") + fmt::format("{:<15} {:>6} {:>14}\n", "of a rank", "calls", "bytes sent");
  if (step.cost.operations.empty()) return heading("COST") + no_operations(step);
  for (const OperationCost& cost : step.cost.operations)
    text += wrapped(width,
                    fmt::format("{}{:<15} {:>6} {:>14}  ", kMargin, comm::name_of(cost.kind), cost.calls,
                                with_commas(cost.bytes_sent)),
                    factors(cost));
  std::string note = step.cost.formula_bytes == step.cost.bytes_sent
                         ? "as by formula"
                         : "by formula " + with_commas(step.cost.formula_bytes);
  if (step.reference)
    note +=
        fmt::format("; {} sends {}: x {:.2f}", step.reference_name, with_commas(step.reference_cost.bytes_sent),
                    static_cast<double>(step.cost.bytes_sent) / static_cast<double>(step.reference_cost.bytes_sent));
  text += wrapped(
      width,
      fmt::format("{}{:<15} {:>6} {:>14}  ", kMargin, "together", step.cost.calls, with_commas(step.cost.bytes_sent)),
      note);
  const Calls& calls = step.step.result.calls_per_step;
  text += kMargin + fmt::format("and {} calls of {} B for order checks, norms and the loss\n",
                                calls_text(calls.control), with_commas(step.step.result.wire_bytes_per_step.control));
  if (!step.plan.can_be_simulated) return text;
  std::string link = fmt::format("link busy for {:.3f} ms = {:.3f} exposed + {:.3f} hidden; step {:.3f}",
                                 ms_of(step.cost.link_ns), ms_of(step.cost.exposed_ns),
                                 ms_of(step.cost.link_ns - step.cost.exposed_ns), step.step.result.step_ms_median);
  if (step.reference) link += fmt::format(" ({} {:.3f})", step.reference_name, step.reference->result.step_ms_median);
  return text + wrapped(width, kMargin, link);
}

/// The first ranks for which a line has room.
std::size_t ranks_in(std::size_t width, const RealStep& real) {
  return std::min(real.ranks.size(), (width - kIndent - kValueName) / kValueWidth);
}

template <class Value>
std::string values_row(std::size_t width, const RealStep& real, const std::string& name, const std::string& note,
                       Value&& value) {
  std::string text = fmt::format("{}{:<{}}", kMargin, name, kValueName);
  for (std::size_t rank = 0; rank < ranks_in(width, real); ++rank)
    text += fmt::format(" {:>{}}", value(real.ranks[rank]), kValueWidth - 1);
  return beside_or_below(width, text + "   ", note);
}

std::string values_text(const Explanation& step, std::size_t width) {
  const RealStep& real = *step.real;
  const WrappedUnit& unit = step.wrapping->example();
  const auto index = static_cast<std::size_t>(&unit - step.wrapping->units().data());
  double mean = 0;
  bool same = true;
  std::string text = "VALUES  " + fmt::format("{:<23}", "of the first step");
  for (std::size_t rank = 0; rank < real.ranks.size(); ++rank) {
    if (rank < ranks_in(width, real)) text += fmt::format(" {:>9}", fmt::format("rank {}", rank));
    mean += real.ranks[rank].loss / static_cast<double>(real.ranks.size());
    same = same && real.ranks[rank].units[index].weights_hash == real.ranks[0].units[index].weights_hash;
  }
  text += "\n";
  const auto of_unit = [&](const RankValues& rank) -> const UnitValues& { return rank.units[index]; };
  text += values_row(width, real, unit.name + " as used, hash", same ? "the same weights" : "weights differ",
                     [&](const RankValues& rank) { return of_unit(rank).weights_hash; });
  text += values_row(width, real, "loss", fmt::format("mean {:.6f}", mean),
                     [&](const RankValues& rank) { return fmt::format("{:.6f}", rank.loss); });
  text += values_row(width, real, "gradient of " + unit.name + ", norm",
                     step.plan.options.accumulate == 1 ? "of own sequences" : "of the last microbatch",
                     [&](const RankValues& rank) { return fmt::format("{:.4f}", of_unit(rank).gradient_norm); });
  const std::optional<double> norm = whole_norm(real, index);
  text += values_row(width, real, norm ? "what it keeps of the mean" : "what it updates with",
                     norm ? fmt::format("together {:.4f}", *norm) : "nothing is averaged",
                     [&](const RankValues& rank) { return fmt::format("{:.4f}", of_unit(rank).shard.norm()); });
  return text;
}

std::string questions_text(const Explanation& step, std::size_t width) {
  std::string text = line_of(heading("QUESTIONS"));
  for (const Question& question : questions_about(step)) {
    if (question.answer.empty()) continue;
    text += wrapped(width, fmt::format("{}{:<14} ", kMargin, question.name), question.text);
    text += wrapped(width, kMargin + std::string(15, ' '), question.answer + " (" + question.section + ")");
  }
  return text + kMargin + "--question NAME: one of them, and the lesson that shows it\n";
}

}  // namespace

std::string to_text(const Explanation& explanation, const ExplainOptions& options, std::size_t width) {
  const auto shows = [&](const char* section) {
    return options.sections.empty() || std::ranges::find(options.sections, section) != options.sections.end();
  };
  std::string text = wrapped(width, "", explanation.title) + wrapped(width, "", explanation.machine);
  if (shows("wrap") || shows("cut")) text += "\n" + wrapping_text(explanation, width);  // "cut" is its older name
  if (shows("rest")) text += "\n" + rest_text(explanation, width);
  if (shows("step")) text += "\n" + step_text(explanation, !options.sections.empty(), width);
  if (shows("cost")) text += "\n" + cost_text(explanation, width);
  if (shows("values") && explanation.real) text += "\n" + values_text(explanation, width);
  if (shows("questions")) text += "\n" + questions_text(explanation, width);
  return text;
}

std::string answer_text(const Explanation& explanation, const std::string& name, std::size_t width) {
  const std::vector<Question> questions = questions_about(explanation);
  const Question& question = *std::ranges::find(questions, name, &Question::name);
  if (question.answer.empty())
    throw base::InvalidUsage("--question " + name + ": this step has no answer to '" + question.text +
                             "'; try another --strategy, or more ranks");
  std::string section = question.section;
  std::ranges::transform(section, section.begin(), [](unsigned char c) { return std::tolower(c); });
  return wrapped(width, "", question.text) + wrapped(width, "", question.answer) +
         fmt::format("Shown by: {}--section {}; lesson: docs/learn/{}.md\n", section == "values" ? "--run " : "",
                     section, question.lesson);
}

}  // namespace tessera::tools
