// tessera explain: one step, told rank by rank and unit by unit.
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/comm/launch.h"
#include "tools/cli/commands.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"
#include "tools/explain/explanation.h"
#include "tools/launch/ranks.h"
#include "tools/pages/page.h"
#include "tools/plan/model_plan.h"

namespace tessera::tools {
namespace {

constexpr int kDefaultRanks = 4;
constexpr std::size_t kPageWidth = 80;  // columns of the story on a page

/// Columns of the text: 100, or 80 where COLUMNS or the terminal has less room. A pipe has room for 100.
std::size_t text_width() {
  constexpr std::size_t kWide = 100, kNarrow = 80;
  const std::optional<std::string> columns = base::read_foreign_env("COLUMNS");
  winsize size{};
  std::size_t room = kWide;
  if (columns && columns->find_first_not_of("0123456789") == std::string::npos && columns->size() < 6)
    room = std::stoul(*columns);
  else if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    room = size.ws_col;
  return room < kWide ? kNarrow : kWide;
}

/// Options that only ranks that run use.
void refuse_run_options(const CLI::App& command, const ExplainOptions& options) {
  for (const char* name : {"--backend", "--data", "--data-format", "--threads"})
    if (command.count(name) > 0)
      throw base::InvalidUsage(fmt::format("{} has no effect without --run; give --run, or leave it out", name));
  if (std::ranges::find(options.sections, "values") != options.sections.end())
    throw base::InvalidUsage("--section values: values are of ranks that run; give --run too");
}

std::vector<std::string> strategies_of(const ExplainOptions& options) {
  return options.strategies.empty() ? std::vector{options.strategy} : options.strategies;
}

/// Called by the process that starts the ranks, or by rank 0.
void check_explained(const ExplainOptions& options, int ranks) {
  std::vector<std::string> inputs = options.data;
  inputs.insert(inputs.end(), {options.model, options.cluster});
  check_outputs({{"--json", options.json}, {"--html", options.html}}, inputs);
  warn_ineffective_options(options, strategies_of(options));
  const ClusterSpec cluster = cluster_of(options, ranks);
  if (options.cpu_offload && cluster.compute.kind == ComputeSpec::Kind::host)
    print_clean(stderr, "tessera: --cpu-offload does nothing on cluster {}: its ranks already use host memory\n",
                cluster.name);
}

/// The row of the story without its columns.
std::string sentence_of(const StoryRow& row) {
  std::string text = row.text;
  if (row.wait_ns) text += fmt::format(", {:.3f} ms", static_cast<double>(*row.wait_ns) / 1e6);
  if (!row.note.empty()) text += " (" + row.note + ")";
  if (row.sent) text += fmt::format(", {} B sent", with_commas(*row.sent));
  return text;
}

/// `command`: arguments of the program.
pages::StepStory story_of(const Explanation& explanation, const std::vector<std::string>& command) {
  pages::StepStory story{.title = explanation.title,
                         .times = "T" + explanation.machine.substr(1) + ".",
                         .teller = explanation.real              ? fmt::format("rank {}", explanation.plan.ranks - 1)
                                   : explanation.plan.ranks == 1 ? "the rank"
                                                                 : "every rank",
                         .command = command};
  for (const StoryRow& row : explanation.story.rows) story.sentences.push_back({row.at_ns, sentence_of(row)});
  story.sentences.push_back({explanation.story.step_ns, "the step ends"});
  story.text = to_text(explanation, {}, kPageWidth);
  return story;
}

std::string explain_page(const std::vector<Explanation>& told, const std::vector<std::string>& command) {
  std::vector<pages::StepStory> stories;
  std::vector<RunResult> runs;
  std::vector<std::string> names;
  for (const Explanation& explanation : told) {
    stories.push_back(story_of(explanation, command));
    RunResult& run = runs.emplace_back(explanation.step.result);
    run.timeline = explanation.timeline;
    if (explanation.real) run.peak_bytes = {};  // the simulated rank's
    names.push_back(name_of(run));
  }
  if (told.size() > 1) stories.front().title = step_title(told.front().plan, joined_by_and(names));
  return pages::page_of_step(stories, std::move(runs));
}

void show(const ExplainOptions& options, int ranks, std::optional<RealStep> real,
          const std::vector<std::string>& arguments) {
  std::vector<Explanation> told;
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const std::string& strategy : strategies_of(options)) {
    ExplainOptions one = options;
    one.strategy = strategy;
    const Explanation& explanation = told.emplace_back(explain_step(one, ranks, std::exchange(real, {})));
    print_clean("{}{}", told.size() > 1 ? "\n\n" : "",
                options.question.empty() ? to_text(explanation, options, text_width())
                                         : answer_text(explanation, options.question, text_width()));
    json.push_back(to_json(explanation));
  }
  if (!options.html.empty()) write_file(options.html, explain_page(told, arguments));
  write_json(options.json, options.strategies.empty() ? json.front() : nlohmann::ordered_json{{"steps", json}});
}

/// The plan of the ranks that run: over the same mesh as the simulated ones.
TrainPlan real_plan(const ExplainOptions& options, int ranks) {
  TrainOptions one{options, {options}};
  one.steps = 1;
  one.cpu_offload = false;  // ranks that run are on the host's cores
  one.products = nn::Products::own;
  TrainPlan plan = make_plan(one, ranks);
  plan.ranks_per_host = std::min(ranks, cluster_of(options, ranks).ranks_per_host);
  return plan;
}

int run_as_rank(const ExplainOptions& options, const TrainPlan& plan, const std::vector<std::string>& arguments) {
  const auto memory_tracker = std::make_shared<base::MemoryTracker>();
  const auto world = init_world(world_of(plan, memory_tracker));
  RealStep step = run_real_step(plan, *world, memory_tracker);
  if (world->rank() == 0) show(options, plan.ranks, std::move(step), arguments);
  return 0;
}

int explain(const CommandLine& commands, const CLI::App& command, const ExplainOptions& options) {
  if (options.question == "list") {
    refuse_other_options(command, "--question list", {"--question"});
    print_clean("{}", question_list());
    return 0;
  }
  if (!options.question.empty()) {
    check_question(options.question);
    if (!options.sections.empty())
      throw base::InvalidUsage("--question prints one answer and no sections; leave --section out");
  }
  if (!options.strategies.empty() && command.count("--strategy") > 0)
    throw base::InvalidUsage("--strategies names the strategies; leave --strategy out");
  if (!options.strategies.empty() && !options.question.empty())
    throw base::InvalidUsage("--question answers about one strategy; give --strategy instead of --strategies");
  if (!options.strategies.empty() && options.run)
    throw base::InvalidUsage("--strategies: one strategy runs at a time; leave --run out, or give --strategy");
  const int ranks = options.run ? world_size(options.ranks) : options.ranks.value_or(kDefaultRanks);
  const bool spawn = options.run && must_spawn(ranks);
  const bool checked = comm_variable("TESSERA_LAUNCHER") == "tessera";  // by the process that has started this rank
  if (!checked && (!options.run || spawn || comm::resolve_launch().rank == 0)) check_explained(options, ranks);
  if (!options.run) {
    refuse_run_options(command, options);
    show(options, ranks, {}, commands.arguments);
    return 0;
  }
  const TrainPlan plan = real_plan(options, ranks);
  engine_options(plan, options.strategy);
  if (!spawn) return run_as_rank(options, plan, commands.arguments);
  warn_if_alone_under_launcher(ranks);
  LaunchSpec spec = training_launch_spec(plan, commands.arguments);
  spec.environment.emplace_back("COLUMNS", std::to_string(text_width()));  // rank 0 writes to a pipe
  return launch(spec);
}

void add_explain_options(CLI::App& command, ExplainOptions& options) {
  add_step_options(command, options);
  add_world_options(command, options, options);
  add_strategy_option(command, options);
  add_option(command, "--strategies", options.strategies,
             "tell the step under each of these strategies, on one page; instead of --strategy", list_of("A,B"));
  add_cluster_options(command, options);
  add_option(command, "--section", options.sections, "sections to show: wrap, rest, step, cost, values, questions",
             // "cut" is the older name of "wrap".
             list_of("A,B", one_of({"wrap", "rest", "step", "cost", "values", "questions", "cut"})));
  add_option(command, "--question", options.question, "answer one question, or list them: list", "NAME|list");
  command.add_flag("--run", options.run,
                   "run the step on real ranks too: show values of all ranks, and the times of this machine");
  add_option(command, "--html", options.html, "write a page that plays the step: its map, timelines and memory",
             "FILE.html");
  add_option(command, "--json", options.json, "write the facts as JSON", "FILE");
}

}  // namespace

void add_explain(CommandLine& commands) {
  CLI::App* command = commands.app.add_subcommand(
      "explain", "tell one step of a training: what each rank keeps, unshards, computes, reshards and reduces");
  const auto options = std::make_shared<ExplainOptions>();
  options->model = "gpt-nano";
  add_explain_options(*command, *options);
  command->callback([&commands, command, options] {
    commands.chosen = [&commands, command, options] { return explain(commands, *command, *options); };
  });
}

}  // namespace tessera::tools
