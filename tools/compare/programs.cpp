#include "tools/compare/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>

#include "tessera/base/error.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/launch/launcher.h"
#include "tools/launch/ranks.h"
#include "tools/pages/page.h"
#include "tools/results/comparison.h"
#include "tools/results/rounds.h"

namespace tessera::tools {
namespace {

struct Program {
  std::string name;
  std::vector<std::string> command;
};

/// "NAME=PROGRAM ARGUMENTS", or without a name that of the program's file.
Program parse_program(const std::string& text) {
  const std::size_t equals = text.find('=');
  std::istringstream words(equals == std::string::npos ? text : text.substr(equals + 1));
  Program program;
  for (std::string word; words >> word;) program.command.push_back(word);
  if (program.command.empty())
    throw base::InvalidUsage("--programs: '" + text + "' names no program; write NAME=PROGRAM ARGUMENTS");
  program.name = equals == std::string::npos ? std::filesystem::path(program.command[0]).filename().string()
                                             : text.substr(0, equals);
  return program;
}

std::vector<Program> parse_programs(const std::vector<std::string>& texts) {
  std::vector<Program> all;
  for (const std::string& text : texts) {
    all.push_back(parse_program(text));
    if (std::ranges::count(all, all.back().name, &Program::name) > 1)
      throw base::InvalidUsage("--programs: two programs are called '" + all.back().name + "'; write NAME=PROGRAM");
  }
  return all;
}

/// The options that concern programs; the others are of this tool's own trainings.
void refuse_training_options(const CLI::App& command) {
  const std::vector<std::string> known = {"--programs", "--ranks", "--steps", "--repeat",
                                          "--backend",  "--json",  "--report"};
  for (const CLI::Option* option : command.get_options())
    if (option->count() > 0 && std::ranges::count(known, option->get_name()) == 0)
      throw base::InvalidUsage(option->get_name() + " has no effect on --programs; pass it to the programs");
}

/// Null if the line is no JSON.
nlohmann::json object_of(std::string_view line) try {
  return line.starts_with('{') ? base::parse_json<nlohmann::json>(line, "") : nlohmann::json();
} catch (const base::InvalidUsage&) {
  return nullptr;
}

/// Runs it once. Returns the exit code; on 0 it has filled `result`, and what it says of `comparison`.
int run_program(const Program& program, const CompareOptions& options, Comparison& comparison, RunResult& result) {
  LaunchSpec plan{.ranks = comparison.ranks, .command = program.command};
  plan.command.insert(plan.command.end(), {"--steps", std::to_string(options.steps), "--result"});
  plan.environment = {{"TESSERA_BACKEND", options.backend},
                      {"TESSERA_PRODUCTS", "own"},
                      {"TESSERA_DETERMINISTIC", "1"},
                      {"TESSERA_ALGO", kComparedAlgorithms}};
  set_prefix(plan, options.backend);
  bool found = false;
  plan.on_output = [&](int, std::string_view line) {
    const nlohmann::json json = object_of(line);
    if (!json.contains("losses")) return print_clean("{}: {}\n", program.name, line);
    found = true;
    const base::JsonReader reader(json, "--programs: the result of " + program.name);
    result = parse_run_result(reader);
    result.strategy = program.name;
    comparison.parameters = reader.value("parameters", comparison.parameters);
  };
  const int code = launch(plan);
  if (code == 0 && !found)
    throw base::InvalidUsage("--programs: " + program.name +
                             " printed no result, a line of JSON; see docs/programs.md");
  return code;
}

/// How far the losses of a run that is not bitwise equal to the first are from the first one's.
std::string distance_text(const Comparison& comparison) {
  const RunResult& first = comparison.runs.front();
  std::string text;
  for (const RunResult& run : comparison.runs) {
    if (ends_alike(first, run)) continue;
    double most = 0;
    for (std::size_t i = 0; i < std::min(run.losses.size(), first.losses.size()); ++i)
      most = std::max(most, std::abs(run.losses[i] / first.losses[i] - 1));
    text += fmt::format("the losses of {} are within {:.1e} of those of {}\n", run.strategy, most, first.strategy);
  }
  return text;
}

}  // namespace

int compare_programs(const CLI::App& command, const CompareOptions& options) {
  refuse_training_options(command);
  if (options.steps < 1) throw base::InvalidUsage("--steps 0: a comparison needs at least one step");
  const std::vector<Program> programs = parse_programs(options.programs);
  check_outputs({{"--json", options.json}, {"--report", options.report}}, {});
  Comparison comparison{.model = "programs",
                        .ranks = world_size(options.ranks),
                        .backend = options.backend,
                        .steps = options.steps,
                        .machine = machine_line(),
                        .rounds = options.rounds()};
  if (!must_spawn(comparison.ranks))
    throw base::InvalidUsage("--programs: compare starts the ranks itself; leave the launcher and --ranks 1 out");
  std::vector<std::vector<RunResult>> results(programs.size());
  for (std::size_t round = 0; round < comparison.rounds; ++round)
    for (const std::size_t i : round_order(round, programs.size()))
      if (const int code = run_program(programs[i], options, comparison, results[i].emplace_back()); code != 0)
        return code;
  for (const std::vector<RunResult>& rounds : results) comparison.runs.push_back(combine_rounds(rounds));
  if (comparison.rounds > 1) comparison.differences = differences_of(comparison.runs);
  print_clean("{}{}\n{}", comparison_table(comparison), equality_statement(comparison), distance_text(comparison));
  print_clean("{}", differences_text(comparison.differences, comparison.rounds));
  write_json(options.json, to_json(comparison));
  if (!options.report.empty()) write_file(options.report, pages::page({comparison}));
  return 0;
}

}  // namespace tessera::tools
