#include "grading/cpp/grading.h"

#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <optional>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/comm/init.h"

namespace grading {
namespace {

using namespace tessera;

/// The name of an error of the library, else "exception".
std::string kind_of(const std::exception& error) {
  if (dynamic_cast<const base::Timeout*>(&error) != nullptr) return "Timeout";
  if (dynamic_cast<const base::Aborted*>(&error) != nullptr) return "Aborted";
  if (dynamic_cast<const base::PeerLost*>(&error) != nullptr) return "PeerLost";
  if (dynamic_cast<const base::InvalidUsage*>(&error) != nullptr) return "InvalidUsage";
  if (dynamic_cast<const base::Mismatch*>(&error) != nullptr) return "Mismatch";
  return "exception";
}

/// Where the facts go; none: a student runs the program alone, and sees them.
std::optional<std::string> folder() {
  return base::read_env({.name = "GRADE_DIR", .default_value = "", .help = "where the grader reads the facts"});
}

void write(const std::string& line, int rank) {
  if (!folder()) {
    std::cerr << line << std::endl;
    return;
  }
  std::ofstream file(*folder() + "/rank" + std::to_string(rank) + ".jsonl", std::ios::app);
  file << line << std::endl;
}

/// What to report if the student's code ends the process.
struct Unfinished {
  int rank = 0;
  std::string line;  // empty: no case runs
};
Unfinished unfinished;

Part parse(const std::string& argument) {
  const std::size_t first = argument.find(','), second = argument.rfind(',');
  return {argument.substr(0, first), std::stoi(argument.substr(first + 1, second - first - 1)),
          std::stoul(argument.substr(second + 1))};
}

}  // namespace

Grading::Grading() : world_(comm::init()) {
  std::atexit([] {
    if (!unfinished.line.empty()) write(unfinished.line, unfinished.rank);
  });
}

void Grading::report(const Fact& fact) const { write(fact.text(), world_->rank()); }

void Grading::run(const Case& part, const std::function<void(Recorder&, Fact&)>& body) {
  if (stopped_) return;
  const bool takes_part = world_->rank() < part.ranks;
  const auto group = world_->split(takes_part ? 0 : -1, world_->rank());
  int timed_out = 0;
  if (takes_part) {
    Fact fact;
    fact.set("case", part.name)
        .set("says", part.says)
        .set("rank", group->rank())
        .set("ranks", part.ranks)
        .set("part", argument_);
    report(Fact(fact).set("status", "began"));
    unfinished = {world_->rank(), Fact(fact)
                                      .set("status", "error")
                                      .set("kind", "exit")
                                      .set("error", "your code ended the process by exit()")
                                      .text()};
    try {
      Recorder recorder(*group);
      body(recorder, fact);
      fact.set("status", "ok");
    } catch (const std::exception& error) {
      timed_out = dynamic_cast<const base::Timeout*>(&error) != nullptr ? 1 : 0;
      fact.set("status", "error").set("kind", kind_of(error)).set("error", kind_of(error) + ": " + error.what());
      group->abort("rank " + std::to_string(group->rank()) + " threw an exception");
    }
    unfinished.line.clear();
    report(fact);
  }
  const comm::View flag = comm::view_of(&timed_out, 1);
  world_->all_reduce(flag, flag, comm::ReduceOp::max(), {.timeout = std::chrono::seconds(50)}).wait();
  stopped_ = timed_out != 0;
}

void Grading::write_floats(Fact& fact, const Case& part, std::string_view key, std::span<const float> values) const {
  if (!folder()) return;
  const std::string name = part.name + "." + std::string(key) + "." + std::to_string(world_->rank()) + ".f32";
  std::ofstream file(*folder() + "/" + name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size_bytes()));
  fact.set(key, name);
}

bool fails(const std::function<void()>& body) {
  try {
    body();
    return false;
  } catch (const base::Error&) {
    return true;
  }
}

int run_grading(int argc, char** argv, const std::function<void(Grading&, const Part&)>& body) {
  try {
    Grading grading;
    for (int i = 1; i < argc; ++i) {
      grading.set_argument(argv[i]);
      body(grading, parse(argv[i]));
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}

}  // namespace grading
