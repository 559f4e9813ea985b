#include "tools/train/divergence.h"
#include "tools/cli/output.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace tessera::tools {
namespace {

std::string list_of(const std::vector<std::size_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
  return text;
}

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
  std::vector<std::size_t> ranks;
  for (std::size_t rank = 0; rank < losses.size(); ++rank)
    if (!std::isfinite(losses[rank])) ranks.push_back(rank);
  const std::string where = ranks.size() == losses.size() ? "every rank" : list_of(ranks);
  if (control_.rank() == 0)
    print_clean(stderr, "tessera: warning: {}: step {}: the loss is {} on {}: {}\n", run_, step, mean, where, kRemedy);
}

}  // namespace tessera::tools
