// The facts of one step under one strategy: what `explain` shows, as text or as JSON. A story in words, made from trace
// events alone, of a simulation or of a real rank; the values of a step on real ranks, which show what the ranks share
// and what they don't; and what the step costs.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/base/trace.h"
#include "tessera/comm/communicator.h"
#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/training_task.h"
#include "tessera/fsdp/wrap.h"
#include "tools/plan/options.h"
#include "tools/plan/step_plan.h"

namespace tessera::tools {

/// The ranks that keep one range of a flat parameter.
struct Shard {
  std::vector<int> ranks;
  fsdp::ElementRange range;           ///< in elements of the flat parameter
  std::vector<std::string> contents;  ///< parameters in the range, and how much of them
};

/// One unit of the model, and the strategy that the engine applies to it.
struct WrappedUnit {
  std::string name;
  std::string contents;                  ///< its modules
  std::vector<std::string> first, last;  ///< the root's modules before and after the units inside it
  std::int64_t elements = 0, padded = 0;
  std::uint64_t bytes = 0;  ///< the flat parameters when unsharded
  bool is_root = false;
  bool kept_after_forward = false;
  fsdp::Strategy strategy;
  std::vector<fsdp::FlatLayout> flats;
  /// The flat parameter that examples show: the largest.
  const fsdp::FlatLayout& largest() const;
};

/// The units of a plan's model. The model has no data.
class Wrapping {
 public:
  /// `step`: of the same plan.
  Wrapping(const TrainPlan& plan, const StepPlan& step);

  const std::vector<WrappedUnit>& units() const { return units_; }
  /// Throws std::out_of_range for an unknown name.
  const WrappedUnit& unit(const std::string& name) const {
    for (const WrappedUnit& unit : units_)
      if (unit.name == name) return unit;
    throw std::out_of_range("no unit " + name);
  }
  /// The unit that examples show: the first one that is not the root, if there is one.
  const WrappedUnit& example() const {
    for (const WrappedUnit& unit : units_)
      if (!unit.is_root) return unit;
    return units_.front();
  }
  std::int64_t padded() const { return padded_; }  ///< the sum over all units, as below
  std::uint64_t bytes() const { return bytes_; }
  bool encoded() const { return encoded_; }  ///< some elements encode parameters in 4 bits, two in each
  /// Modules that the root holds although only they use their parameters, each by its path.
  const std::vector<std::string>& needlessly_held() const { return needlessly_held_; }

 private:
  nn::Context context_;
  std::unique_ptr<fsdp::TrainingTask> task_;
  std::vector<WrappedUnit> units_;
  std::int64_t padded_ = 0;
  std::uint64_t bytes_ = 0;
  bool encoded_ = false;
  std::vector<std::string> needlessly_held_;
};

/// The range of `padded` elements that a rank keeps of state that is sharded over `axes`.
fsdp::ElementRange shard_of(int rank, std::int64_t padded, const fsdp::Axes& axes, const fsdp::MeshShape& mesh);

/// The shards of a unit's largest flat parameter over `axes`, in the order of their ranges.
std::vector<Shard> shards_of(const WrappedUnit& unit, const fsdp::Axes& axes, const fsdp::MeshShape& mesh);

/// The options of a plan's step and cluster, of ranks that run, and what to show.
struct ExplainOptions : PlanOptions, WorldOptions {
  std::vector<std::string> sections;    ///< empty: all
  std::vector<std::string> strategies;  ///< instead of one: each is told
  std::string question;                 ///< a name, or "list"
  bool run = false;
  std::string html;  ///< file for the page
};

/// The transfers that one unshard_issue or reduce_issue event has started.
struct IssuedTransfers {
  std::string operation;         ///< "all_gather"; of several the first
  std::uint64_t bytes_sent = 0;  ///< by this rank, in all of them
  int ranks = 1;                 ///< that the first one connects
  int rounds = 1;                ///< one after the other, over different ranks
  std::int64_t called_ns = 0;    ///< by the first one, on the clock of the events
  std::int64_t queued_ns = 0;    ///< from there to its first byte
};

/// One row of the story.
struct StoryRow {
  base::TraceEventKind kind = base::TraceEventKind::forward;
  std::string unit;
  std::int64_t at_ns = 0;                  ///< since the begin of the step
  std::string text;                        ///< "unshard h.0"
  std::string note;                        ///< why, or what it does
  std::optional<std::uint64_t> sent;       ///< bytes, by this rank
  std::optional<std::uint64_t> unsharded;  ///< bytes of unsharded parameters after it
  std::optional<std::int64_t> wait_ns;     ///< that compute waits
};

/// What happens to one unit in a step.
struct UnitStory {
  int unshards_before_backward = 0, unshards_in_backward = 0;
  int all_gathers_after_update = 0;
  bool resharded_after_forward = false;
  int reductions = 0;
};

/// The story of a step.
struct Story {
  std::vector<StoryRow> rows;
  std::vector<UnitStory> units;      ///< as in Wrapping::units()
  std::uint64_t most_unsharded = 0;  ///< bytes of unsharded parameters
  std::int64_t forward_end_ns = 0;   ///< since the begin of the step: the model has been computed once
  std::int64_t step_ns = 0;
};

/// The events and transfers of a step, whose times count from `begin_ns`.
struct StoryInput {
  const Wrapping& wrapping;
  std::span<const base::TraceEvent> events;  ///< in the order in which they began
  /// By event; empty for events that start nothing.
  std::span<const IssuedTransfers> issued;
  const fsdp::MeshShape& mesh;
  std::int64_t begin_ns = 0;
  std::int64_t step_ns = 0;
};

/// The event that started each transfer of a simulated step, as its index; nothing for those of no unit: order checks
/// and norms.
std::vector<std::optional<std::size_t>> starting_events(const StepPlan& step);

/// The transfers of a simulated step by the events that started them.
std::vector<IssuedTransfers> issued_transfers(const StepPlan& step);

Story make_story(const StoryInput& input);

/// A range of one unit's gradients with which a rank updates.
struct UnitGradient {
  std::string first;          ///< parameter, and its element, with which the range begins
  std::int64_t elements = 0;  ///< of parameters
  double sum_of_squares = 0;
  double norm() const { return std::sqrt(sum_of_squares); }
};

/// The values of one unit on one rank.
struct UnitValues {
  std::string name;
  std::string weights_hash;  ///< of the parameters with which the first forward computed
  double gradient_norm = 0;  ///< of its own data, before the reduction; of the last microbatch
  UnitGradient shard;        ///< after the reduction: of the mean over the ranks
};

struct RankValues {
  double loss = 0;  ///< of its own sequences
  std::vector<UnitValues> units;
};

/// The first step of a training, and the last of three on which times were taken.
struct RealStep {
  std::vector<RankValues> ranks;
  std::vector<base::TraceEvent> events;  ///< of the last rank
  std::int64_t begin_ns = 0, step_ns = 0;
  StepTimeline timeline;  ///< of all ranks
};

/// The norm of a unit's whole gradient, from shards of which ranks may keep the same; nothing where ranks have
/// different values of one shard, since nothing was averaged.
std::optional<double> whole_norm(const RealStep& step, std::size_t unit);

/// Collective: every rank of `world` calls it. The result is complete on rank 0. `plan` has steps and data.
RealStep run_real_step(const TrainPlan& plan, comm::Communicator& world,
                       const std::shared_ptr<base::MemoryTracker>& memory_tracker);

/// The operations of one kind over one number of ranks, in a step of one rank.
struct OperationCost {
  comm::OpKind kind = comm::OpKind::all_gather;
  int ranks = 1;
  std::uint64_t calls = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes = 0;                         ///< of the larger buffers
  std::vector<std::pair<std::string, int>> units;  ///< how often each unit
};

/// What a step costs one rank.
struct StepCost {
  std::vector<OperationCost> operations;  ///< of parameters and gradients
  std::uint64_t calls = 0, bytes_sent = 0;
  std::uint64_t formula_bytes = 0;  ///< of docs/comparison.md, for a step of the mean
  std::int64_t link_ns = 0;         ///< during which a link passes bytes of any operation
  std::int64_t exposed_ns = 0;
};

/// "gpt-nano, 120,576 parameters, fsdp on 4 ranks, 12 sequences of 64, f32, adamw". `mesh`: text after the ranks.
std::string step_title(const TrainPlan& plan, const std::string& strategies, const std::string& mesh = "");

/// One step, simulated, and perhaps run.
struct Explanation {
  std::string title;    ///< of its strategy
  std::string machine;  ///< whose times these are
  TrainPlan plan;
  StepPlan step;
  std::unique_ptr<Wrapping> wrapping;
  Story story;  ///< with the times of the real step, if there is one
  StepCost cost;
  std::string reference_name;         ///< the strategy that shards nothing
  std::optional<StepPlan> reference;  ///< its step; nothing for that strategy itself
  StepCost reference_cost;
  std::optional<RealStep> real;
  StepTimeline timeline;  ///< of the step in the story
};

/// Simulates the step of `options` under its strategy. `real`: the same step as it ran, if it did.
Explanation explain_step(const ExplainOptions& options, int ranks, std::optional<RealStep> real);

nlohmann::ordered_json to_json(const Explanation& explanation);

/// A question that learners ask about a step, with the answer from its facts.
struct Question {
  std::string name;  ///< of --question
  std::string text;
  std::string answer;   ///< "": this step has no facts for an answer
  std::string section;  ///< that shows the facts
  std::string lesson;   ///< file in docs/learn, without its ending
};

/// All questions, in the order of a step.
std::vector<Question> questions_about(const Explanation& explanation);

/// The names and texts of all questions, without answers.
std::string question_list();

/// Throws InvalidUsage, with the known names, if there is no such question.
void check_question(const std::string& name);

/// The sections that the options show, in lines of at most `width` columns: 80 or 100.
std::string to_text(const Explanation& explanation, const ExplainOptions& options, std::size_t width);

/// One question, whose name is known, with its answer. Throws InvalidUsage if the step has no facts for it.
std::string answer_text(const Explanation& explanation, const std::string& name, std::size_t width);

}  // namespace tessera::tools
