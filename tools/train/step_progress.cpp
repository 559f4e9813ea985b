#include "tools/train/step_progress.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>

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

}  // namespace tessera::tools
