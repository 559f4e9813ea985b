// One line of what a rank reports to the grader.
#pragma once

#include <span>
#include <string>
#include <string_view>

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

}  // namespace grading
