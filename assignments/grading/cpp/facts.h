// What a rank reports to the grader: a file of JSON lines, one for each case.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "grading/cpp/recorder.h"

namespace grading {

/// A JSON object.
class Fact {
 public:
  Fact& set(std::string_view key, double value);
  Fact& set(std::string_view key, std::string_view text);
  Fact& set(std::string_view key, std::span<const double> values);
  /// [[kind, peer, offset, count, out_offset, out_count, mark], ..]; offsets in elements from the start of `memory`, -1
  /// outside of it.
  Fact& set_calls(std::span<const Call> calls, std::span<const float> memory);
  /// {kind: [calls, bytes_sent]} and the bytes to each peer.
  Fact& set_traffic(const tessera::comm::TrafficStats& traffic);
  std::string text() const { return "{" + body_ + "}"; }

 private:
  Fact& put(std::string_view key, const std::string& json);
  std::string body_;
};

/// A part of the grading, on the first `ranks` ranks of the world.
struct Case {
  std::string name;
  int ranks = 1;
  std::string says;  ///< in the student's words: "3 ranks, 12 elements"
};

/// The world of the grading on one rank.
class Grading {
 public:
  Grading();

  /// Calls `body` on the ranks of the case, each with a communicator of these ranks, and writes a fact. Exceptions of
  /// `body` become errors in it. After a case that timed out anywhere no other one is run.
  void run(const Case& part, const std::function<void(Recorder&, Fact&)>& body);
  /// Writes an array beside the facts, and its name under `key`.
  void write_floats(Fact& fact, const Case& part, std::string_view key, std::span<const float> values) const;

 private:
  const std::unique_ptr<tessera::comm::Communicator> world_;
  bool stopped_ = false;
};

/// The function `main` of a program of the grader: runs `body`, and reports what it throws.
int run_grading(const std::function<void(Grading&)>& body);

}  // namespace grading
