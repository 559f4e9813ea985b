// The world of the grading on one rank, and the function `main` of the grader's programs.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "grading/cpp/fact.h"

namespace grading {

/// What an argument asks for: KIND,RANKS,AMOUNT.
struct Part {
  std::string kind;
  int ranks = 1;
  std::size_t amount = 0;
};

/// A part of the grading, on the first `ranks` ranks of the world.
struct Case {
  std::string name;
  int ranks = 1;
  std::string says;  ///< in the student's words: "3 ranks, 12 elements"
};

class Grading {
 public:
  Grading();
  /// The argument that asks for the cases that follow; it is part of their facts.
  void set_argument(std::string argument) { argument_ = std::move(argument); }

  /// Calls `body` on the ranks of the case, each with a communicator of these ranks, and reports a fact before and one
  /// after. Exceptions of `body` become errors in it. After a case that timed out anywhere no other one is run.
  void run(const Case& part, const std::function<void(Recorder&, Fact&)>& body);
  /// Writes an array beside the facts, and its name under `key`.
  void write_floats(Fact& fact, const Case& part, std::string_view key, std::span<const float> values) const;

 private:
  void report(const Fact& fact) const;

  const std::unique_ptr<tessera::comm::Communicator> world_;
  std::string argument_;
  bool stopped_ = false;
};

/// True if `body` throws an error of the library.
bool fails(const std::function<void()>& body);

/// The function `main` of a program of the grader: runs `body` for each argument, and reports what it throws.
int run_grading(int argc, char** argv, const std::function<void(Grading&, const Part&)>& body);

}  // namespace grading
