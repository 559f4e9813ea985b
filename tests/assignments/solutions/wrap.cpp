// A solution of assignment 6.
#include "wrap.h"

#include <algorithm>
#include <cstddef>

namespace assignment {
namespace {

std::vector<int> units_of(int blocks, int size) {
  std::vector<int> units;
  for (int begin = 0; begin < blocks; begin += size) units.push_back(std::min(size, blocks - begin));
  return units;
}

/// The root, the unit that computes and the one that is prefetched.
std::int64_t bytes_at_once(const Situation& situation, const std::vector<int>& units) {
  int two = units.front();
  for (std::size_t i = 1; i < units.size(); ++i) two = std::max(two, units[i - 1] + units[i]);
  return 4 * (situation.root_parameters + two * situation.block_parameters);
}

/// A step: one link passes one operation after the other, and the latency follows; one unit is prefetched.
class Step {
 public:
  Step(const Situation& situation, const std::vector<int>& units)
      : situation_(situation), units_(units), there_(units.size()) {}

  double seconds() {
    now_ = send(situation_.root_parameters);
    there_[0] = send_unit(0);
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      now_ = std::max(now_, there_[unit]);
      if (unit + 1 < units_.size()) there_[unit + 1] = send_unit(unit + 1);
      now_ += units_[unit] * situation_.forward_seconds;
    }
    double last = now_;
    for (std::size_t unit = units_.size(); unit-- > 0;) {
      now_ = std::max(now_, there_[unit]);
      if (unit > 0) there_[unit - 1] = send_unit(unit - 1);
      now_ += units_[unit] * situation_.backward_seconds;
      last = send_unit(unit);
    }
    return std::max({now_, last, send(situation_.root_parameters)});
  }

 private:
  double send_unit(std::size_t unit) { return send(units_[unit] * situation_.block_parameters); }
  double send(std::int64_t parameters) {
    const double part = static_cast<double>(situation_.ranks - 1) / situation_.ranks;
    port_ = std::max(port_, now_) + 4 * part * static_cast<double>(parameters) / situation_.bytes_per_second;
    return port_ + situation_.latency;
  }

  const Situation& situation_;
  const std::vector<int>& units_;
  std::vector<double> there_;
  double now_ = 0, port_ = 0;
};

}  // namespace

std::vector<int> wrap(const Situation& situation) {
  std::vector<int> best;
  double least = 0;
  for (int size = 1; size <= situation.blocks; ++size) {
    const std::vector<int> units = units_of(situation.blocks, size);
    if (bytes_at_once(situation, units) > situation.unsharded_bytes) continue;
    const double seconds = Step(situation, units).seconds();
    if (best.empty() || seconds < least) {
      best = units;
      least = seconds;
    }
  }
  return best;
}

}  // namespace assignment
