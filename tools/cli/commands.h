// The subcommands: one file each. A subcommand adds its options to the parser and sets the function to run.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace tessera::tools {

struct CommandLine {
  CLI::App& app;
  std::vector<std::string> arguments;  ///< of the program, without its name: for ranks that re-run it
  std::vector<std::string> program;    ///< arguments after `--` of `run`
  std::function<int()> chosen;         ///< set by the callback of the parsed subcommand; returns the exit code
};

void add_bench(CommandLine& commands);
void add_checkpoint(CommandLine& commands);
void add_compare(CommandLine& commands);
void add_doctor(CommandLine& commands);
void add_explain(CommandLine& commands);
void add_info(CommandLine& commands);
void add_plan(CommandLine& commands);
void add_report(CommandLine& commands);
void add_run(CommandLine& commands);
void add_train(CommandLine& commands);

}  // namespace tessera::tools
