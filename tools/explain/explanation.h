// The facts of one step under one strategy: what `explain` shows, as text or as JSON.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/explain/real_step.h"
#include "tools/explain/story.h"
#include "tools/explain/wrapping.h"
#include "tools/plan/options.h"

namespace tessera::tools {

/// The options of a plan's step and cluster, of ranks that run, and what to show.
struct ExplainOptions : PlanOptions, WorldOptions {
  std::vector<std::string> sections;  ///< empty: all
  std::string question;               ///< a name, or "list"
  bool run = false;
  std::string html;  ///< file for the page
};

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
  std::int64_t link_ns = 0;         ///< of all operations, from first byte to end
  std::int64_t exposed_ns = 0;
};

/// One step, simulated, and perhaps run.
struct Explanation {
  std::string title;    ///< model, strategy, ranks, batch
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
