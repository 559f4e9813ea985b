#include "tools/train/divergence.h"

#include <cmath>
#include <cstdio>
#include <vector>

#include "tools/cli/output.h"

namespace tessera::tools {
namespace {

constexpr const char* kRemedy =
    "later steps are meaningless; lower --lr, give --clip-norm, or resume from an earlier checkpoint";

}  // namespace

void DivergenceMonitor::after_step(std::int64_t step, double own, double mean, std::optional<double> norm) {
  const bool lost = !std::isfinite(mean);
  if (warned_ || (!lost && std::isfinite(norm.value_or(0)))) return;
  warned_ = true;
  if (!lost) {
    if (control_.rank() == 0)
      print_clean(stderr, "tessera: warning: {}: step {}: the norm of the gradients is {} on every rank: {}\n", run_,
                  step, *norm, kRemedy);
    return;
  }
  std::vector<double> losses = {own};
  if (control_.size() > 1) {
    losses.clear();
    for (const auto& rank : control_.gather_all(std::vector<double>{own})) losses.push_back(rank[0]);
  }
  std::vector<std::string> ranks;
  for (std::size_t rank = 0; rank < losses.size(); ++rank)
    if (!std::isfinite(losses[rank])) ranks.push_back(std::to_string(rank));
  const std::string where =
      ranks.size() == losses.size() ? "every rank" : (ranks.size() == 1 ? "rank " : "ranks ") + joined_by_and(ranks);
  if (control_.rank() == 0)
    print_clean(stderr, "tessera: warning: {}: step {}: the loss is {} on {}: {}\n", run_, step, mean, where, kRemedy);
}

void DivergenceMonitor::after_evaluation(double loss) const {
  if (!warned_ && !std::isfinite(loss) && control_.rank() == 0)
    print_clean(stderr,
                "tessera: warning: {}: the loss of the evaluation is {}: weights or activations are not finite\n", run_,
                loss);
}

}  // namespace tessera::tools
