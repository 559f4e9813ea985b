// The memory tracker against the operating system: tracked plus reserved bytes equal what the process uses.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <string>

#include "tests/harness/training.h"

namespace tessera::fsdp {
namespace {

/// VmHWM or VmRSS of this process, in bytes.
std::uint64_t status_bytes(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(field + ":")) return std::stoull(line.substr(field.size() + 1)) * 1024;
  throw std::runtime_error("no " + field);
}

/// Restarts the peak from the memory that is resident now.
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

struct Growth {
  double tracked = 0;
  double seen = 0;
  double error() const { return std::abs(tracked - seen) / seen; }
};

/// Two steps of GPT-2 (124M parameters) on one rank. `hidden`: bytes that are used but not tracked.
Growth train_gpt2(std::size_t hidden) {
  harness::TrainingSpec spec;
  spec.model = nn::preset("gpt2");
  spec.ranks = 1;
  spec.global_batch = 1;
  spec.seq_len = 96;
  spec.steps = 2;
  spec.lr = 1e-4;
  spec.engine = harness::engine_for("fsdp");
  Growth growth;
  std::unique_ptr<char[]> untracked;
  spec.after_backward = [&](int, int step, Engine&, nn::CausalModel&) {
    if (step != 1) return;
    untracked.reset(new char[hidden]);
    std::memset(untracked.get(), 1, hidden);
  };
  reset_peak();
  const std::uint64_t before = status_bytes("VmRSS");
  spec.after_step = [&](int, int step, Engine&, nn::CausalModel& model) {
    if (step != 1) return;
    const auto memory_tracker = model.context().memory_tracker().snapshot();
    growth.tracked = static_cast<double>(memory_tracker.total_peak + memory_tracker.reserved);
    growth.seen = static_cast<double>(status_bytes("VmHWM") - before);
  };
  harness::train(spec);
  return growth;
}

TEST(ProcessMemory, TrackedAndReservedEqualProcessWithinFivePercent) {
  const Growth growth = train_gpt2(0);
  EXPECT_LT(growth.error(), 0.05) << "tracked " << growth.tracked << ", process " << growth.seen;
}

/// Negative control: untracked memory is detected.
TEST(ProcessMemory, DetectsUntrackedMemory) {
  const Growth growth = train_gpt2(std::size_t{600} << 20);
  EXPECT_GT(growth.error(), 0.05) << "tracked " << growth.tracked << ", process " << growth.seen;
}

}  // namespace
}  // namespace tessera::fsdp
