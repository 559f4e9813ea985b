// The questions of explanation.h.

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "tessera/base/error.h"
#include "tools/cli/output.h"
#include "tools/explain/explanation.h"
#include "tools/train/model_task.h"

namespace tessera::tools {
namespace {

/// Text and answer from the facts of a step; nothing if it has none.
using Told = std::optional<std::pair<std::string, std::string>>;

struct QuestionKind {
  const char* name;
  const char* text;  ///< for any step
  const char* section;
  const char* lesson;
  Told (*tell)(const Explanation& step);
};

std::string milliseconds(std::int64_t ns) { return fmt::format("{:.3f} ms", static_cast<double>(ns) / 1e6); }

std::string unit_names(const Explanation& step) {
  const std::vector<WrappedUnit>& units = step.wrapping->units();
  if (units.size() > 4) return fmt::format("{}, {} .. {}", units[0].name, units[1].name, units.back().name);
  return joined_by(each_of(units, &WrappedUnit::name), ", ");
}

int parts_at_rest_of(const Explanation& step) {
  int parts = 1;
  for (const WrappedUnit& unit : step.wrapping->units())
    parts = std::max(parts, parts_over(unit.strategy.param_at_rest, step.step.mesh));
  return parts;
}

/// The first unit whose story is as `wanted` says.
template <class Wanted>
const WrappedUnit* find_unit(const Explanation& step, Wanted&& wanted) {
  for (std::size_t i = 0; i < step.wrapping->units().size(); ++i)
    if (wanted(step.wrapping->units()[i], step.story.units[i])) return &step.wrapping->units()[i];
  return nullptr;
}

Told whose_unit(const Explanation& step) {
  const WrappedUnit& unit = step.wrapping->example();
  const fsdp::Strategy& strategy = unit.strategy;
  const int parts = parts_over(strategy.optimizer, step.step.mesh);
  if (parts == 1) return {};
  const int rank = std::min(2, step.plan.ranks - 1);
  const auto shard = shard_of(rank, unit.largest().padded, strategy.optimizer, step.step.mesh);
  const std::int64_t place = shard.begin / std::max<std::int64_t>(1, shard.count()) + 1;
  std::vector<std::string> kinds;
  if (!strategy.param_at_rest.empty()) kinds.emplace_back("parameters");
  if (!strategy.gradient.empty()) kinds.emplace_back("gradients");
  kinds.emplace_back("optimizer state");
  return {
      {fmt::format("Does rank {} belong to a unit?", rank),
       fmt::format("No. Of every unit ({}) it keeps shard {} of {}: {}. A unit says what is used together, a shard who "
                   "keeps it.",
                   unit_names(step), place, parts, joined_by(kinds, ", "))}};
}

Told whole_model(const Explanation& step) {
  return {{"When does a batch see the whole model?",
           fmt::format("By {}: {}, one after the other, on the rank that has the batch. {}",
                       milliseconds(step.story.forward_end_ns), unit_names(step),
                       parts_at_rest_of(step) > 1 ? "Parameters come to the data; no other rank computes for it."
                                                  : "Every rank has all parameters.")}};
}

Told other_ranks(const Explanation& step) {
  if (step.plan.ranks == 1) return {};
  const std::int64_t each = step.plan.options.global_batch / step.plan.ranks;
  return {{"Is the step repeated for the batch of rank 1?",
           fmt::format("No. Rank 1 makes the same rows at the same time, with sequences {} to {} instead of 0 to {}.",
                       each, 2 * each - 1, each - 1)}};
}

Told why_twice(const Explanation& step) {
  const WrappedUnit* const twice = find_unit(step, [](const WrappedUnit&, const UnitStory& told) {
    return told.unshards_before_backward > 0 && told.unshards_in_backward > 0;
  });
  if (twice == nullptr) return {};
  const WrappedUnit* const once = find_unit(step, [](const WrappedUnit& unit, const UnitStory& told) {
    return !unit.is_root && told.unshards_before_backward > 0 && told.unshards_in_backward == 0;
  });
  std::string text = fmt::format("Why is {} unsharded twice", twice->name);
  std::string answer =
      fmt::format("{} is resharded after forward, so that others fit, and backward needs it again.", twice->name);
  if (once != nullptr) {
    text += fmt::format(", and {} once", once->name);
    answer += fmt::format(" {} stays: backward begins with it, so resharding it would gain nothing.", once->name);
  }
  return {{text + "?", answer}};
}

Told why_root(const Explanation& step) {
  const WrappedUnit* const root = find_unit(step, [](const WrappedUnit& unit, const UnitStory& told) {
    return unit.is_root && told.unshards_before_backward > 0 && !told.resharded_after_forward;
  });
  if (root == nullptr || root->first.empty() || root->last.empty()) return {};
  std::string answer =
      fmt::format("It computes before all others ({}) and after them ({}): it is in use for the whole step.",
                  joined_by(root->first, " "), joined_by(root->last, " "));
  const std::vector<std::string>& held = step.wrapping->needlessly_held();
  if (!held.empty())
    answer += fmt::format(" {} could be {}: --wrap \"{};{}\".", joined_by(held, " and "),
                          held.size() == 1 ? "a unit of its own" : "units of their own", step.plan.options.wrap,
                          joined_by(held, ";"));
  return {{"Why does the root stay?", answer}};
}

Told first_wait(const Explanation& step) {
  for (const StoryRow& row : step.story.rows) {
    if (row.kind == base::TraceEventKind::forward) return {};
    if (row.wait_ns)
      return {{fmt::format("Why does compute wait for {} first?", row.unit),
               fmt::format("Its {} can't be hidden: no unit is there to compute with before it.",
                           milliseconds(*row.wait_ns))}};
  }
  return {};
}

Told last_wait(const Explanation& step) {
  std::int64_t waited = 0;
  for (const StoryRow& row : step.story.rows) {
    if (row.kind == base::TraceEventKind::backward || row.kind == base::TraceEventKind::forward) waited = 0;
    if (row.kind == base::TraceEventKind::reduce_wait && row.wait_ns) waited += *row.wait_ns;
  }
  if (waited == 0) return {};
  return {
      {"Why does compute wait at the end?",
       fmt::format("For {} the last reductions are under way and nothing is left to compute beside them; the update "
                   "needs their results.",
                   milliseconds(waited))}};
}

Told why_gradients(const Explanation& step) {
  if (find_unit(step, [](const WrappedUnit&, const UnitStory& told) { return told.reductions > 0; }) == nullptr)
    return {};
  std::string answer = "Each rank has computed them from its own sequences. The reduction averages them over the ranks";
  answer += parts_over(step.wrapping->example().strategy.optimizer, step.step.mesh) > 1
                ? ", and each keeps its shard of the mean."
                : ", and all have the mean.";
  if (!step.real) answer += " --run shows the norms.";
  return {{"The weights are equal; why do the gradients differ?", answer}};
}

Told after_update(const Explanation& step) {
  if (step.plan.ranks == 1) return {};
  int all_gathers = 0;
  for (const UnitStory& told : step.story.units) all_gathers += told.all_gathers_after_update;
  const std::string answer =
      all_gathers > 0 ? fmt::format(
                            "The step itself: {} all-gathers follow the update, since every rank keeps all parameters "
                            "and has updated its shards only.",
                            all_gathers)
      : parts_at_rest_of(step) > 1
          ? "No rank does. Each rank has updated its shards; the all-gathers of the next step bring them."
          : "No rank has to. Every rank had the same mean and has made the same whole update.";
  return {{"Who sends the new parameters to the other ranks?", answer}};
}

Told more_bytes(const Explanation& step) {
  if (!step.reference || step.cost.bytes_sent == 0) return {};
  const std::uint64_t all_reduce = step.reference_cost.bytes_sent, sent = step.cost.bytes_sent;
  const std::string text = fmt::format("Is that more than the all_reduce of {}?", step.reference_name);
  if (sent == all_reduce)
    return {
        {text, fmt::format("No: {} B are {} B. A reduce_scatter and an all_gather are the two halves of an all_reduce.",
                           with_commas(sent), with_commas(all_reduce))}};
  std::uint64_t again = 0;
  bool in_backward = false;
  for (const StoryRow& row : step.story.rows) {
    in_backward = in_backward || row.kind == base::TraceEventKind::backward;
    if (in_backward && row.kind == base::TraceEventKind::unshard_issue) again += row.sent.value_or(0);
  }
  const double factor = static_cast<double>(sent) / static_cast<double>(all_reduce);
  std::string answer =
      fmt::format("{} B instead of {} B: x {:.2f}.", with_commas(sent), with_commas(all_reduce), factor);
  if (again > 0)
    answer += fmt::format(
        " A reduce_scatter and one all_gather are the two halves of an all_reduce; the all_gathers of backward add {} "
        "B.",
        with_commas(again));
  return {{text, answer}};
}

Told less_memory(const Explanation& step) {
  if (!step.reference) return {};
  const std::uint64_t own = step.step.result.model_state_bytes.total();
  const std::uint64_t whole = step.reference->result.model_state_bytes.total();
  if (own >= whole) return {};
  const std::uint64_t activations =
      step.step.result.peak_bytes.peak[static_cast<std::size_t>(base::MemoryCategory::activation)];
  return {
      {"What is saved, and what is not?",
       fmt::format(
           "Model state: {} B a rank instead of {} B. Activations are of its own sequences{}, under every strategy.",
           with_commas(own), with_commas(whole),
           activations == 0 ? "" : fmt::format(", up to {} B", with_commas(activations)))}};
}

Told more_blocks(const Explanation& step) {
  if (step.story.most_unsharded == 0 || step.plan.lora || step.plan.task) return {};
  const fsdp::EngineOptions engine = engine_options(step.plan, step.plan.options.strategy);
  TrainPlan deeper = step.plan;
  deeper.model.layers *= 4;
  nn::Context context;
  const auto task = make_task(deeper, context);
  const auto units = fsdp::planned_units(task->model().root(), step.plan.options.wrap, engine.strategy, step.step.mesh,
                                         engine.reshard_after_forward);
  std::uint64_t whole = 0;
  for (const fsdp::UnitSize& unit : units)
    whole += static_cast<std::uint64_t>(unit.padded) * base::size_of(step.plan.precision.compute);
  const std::uint64_t most =
      fsdp::peak_formula(engine.strategy, step.step.mesh, units, step_shape_of(step.plan.options), step.plan.precision)
          .unsharded_parameter;
  const auto percent = [](std::uint64_t part, std::uint64_t of) {
    return std::round(100 * static_cast<double>(part) / static_cast<double>(of));
  };
  const std::uint64_t bytes = step.wrapping->bytes();
  return {
      {fmt::format("What if there were {} blocks instead of {}?", deeper.model.layers, step.plan.model.layers),
       fmt::format("Then at most {} of {} B are unsharded at a time, {:.0f} % of the model; here {} of {} B, {:.0f} %.",
                   with_commas(most), with_commas(whole), percent(most, whole), with_commas(step.story.most_unsharded),
                   with_commas(bytes), percent(step.story.most_unsharded, bytes))}};
}

constexpr QuestionKind kQuestions[] = {
    {"whose-unit", "Does a rank belong to a unit?", "WRAP", "1-shards", whose_unit},
    {"whole-model", "When does a batch see the whole model?", "STEP", "1-shards", whole_model},
    {"other-ranks", "Is the step repeated for the batch of another rank?", "STEP", "1-shards", other_ranks},
    {"less-memory", "What is saved, and what is not?", "REST", "2-memory", less_memory},
    {"more-blocks", "What if there were more blocks?", "STEP", "2-memory", more_blocks},
    {"why-twice", "Why is a unit unsharded twice?", "STEP", "3-step", why_twice},
    {"why-gradients", "The weights are equal; why do the gradients differ?", "VALUES", "3-step", why_gradients},
    {"after-update", "Who sends the new parameters to the other ranks?", "STEP", "3-step", after_update},
    {"more-bytes", "Is more sent than in an all_reduce?", "COST", "4-bytes", more_bytes},
    {"first-wait", "Why does compute wait at the beginning?", "STEP", "5-overlap", first_wait},
    {"last-wait", "Why does compute wait at the end?", "STEP", "5-overlap", last_wait},
    {"why-root", "Why does the root stay unsharded?", "WRAP", "6-wrap", why_root},
};

}  // namespace

std::vector<Question> questions_about(const Explanation& explanation) {
  std::vector<Question> questions;
  for (const QuestionKind& kind : kQuestions) {
    const Told told = kind.tell(explanation);
    questions.push_back(
        {kind.name, told ? told->first : kind.text, told ? told->second : "", kind.section, kind.lesson});
  }
  return questions;
}

std::string question_list() {
  std::string text;
  for (const QuestionKind& kind : kQuestions) text += fmt::format("{:<14} {}\n", kind.name, kind.text);
  return text;
}

void check_question(const std::string& name) {
  std::string known;
  for (const QuestionKind& kind : kQuestions) {
    if (name == kind.name) return;
    known += std::string(" ") + kind.name;
  }
  throw base::InvalidUsage("--question " + name + ": no such question; known: list" + known);
}

}  // namespace tessera::tools
