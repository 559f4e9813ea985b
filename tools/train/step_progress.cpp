#include "tools/train/step_progress.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <vector>

#include "tessera/base/text.h"
#include "tools/cli/output.h"
#include "tools/cli/progress_line.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kLastSteps = 16;

/// "1:05", "2:03:04"; seconds are rounded.
std::string duration_text(double seconds) {
  const std::int64_t all = std::llround(seconds);
  if (all < 3600) return fmt::format("{}:{:02}", all / 60, all % 60);
  return fmt::format("{}:{:02}:{:02}", all / 3600, all / 60 % 60, all % 60);
}

}  // namespace

StepProgress::StepProgress(const TrainPlan& plan)
    : steps_(plan.options.steps), tokens_(static_cast<double>(plan.options.global_batch * plan.seq_len)) {}

std::string StepProgress::text_after(const StepReport& step) {
  ends_.push_back(Clock::now());
  if (ends_.size() > kLastSteps + 1) ends_.pop_front();
  double rate = step.tokens_per_second;
  if (ends_.size() > 1) {
    const std::chrono::duration<double> time = ends_.back() - ends_.front();
    if (time.count() > 0) rate = tokens_ * static_cast<double>(ends_.size() - 1) / time.count();
  }
  const double left = tokens_ * static_cast<double>(steps_ - step.step) / rate;
  std::string text =
      fmt::format("step {}/{}  loss {:.4f}  {:.0f} tokens/s  ETA {}  memory {}, peak {}", step.step, steps_, step.loss,
                  rate, duration_text(left), human_bytes(step.live_bytes), human_bytes(step.peak_bytes));
  if (step.mfu) text += fmt::format("  MFU {:.1f} %", 100 * *step.mfu);
  if (step.loss_scale) text += fmt::format("  loss scale {}, {} skipped", *step.loss_scale, step.skipped_steps);
  return text;
}

void print_progress(std::string_view text) {
  fmt::print("{}{}\n", kProgressMark, base::printable(text));
  std::fflush(stdout);
}

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
