// Runs a student's ring_all_reduce() on worlds of 1 to 5 ranks.
#include <cmath>

#include "1-ring/ring.h"
#include "grading/cpp/grading.h"

namespace {

using grading::Case, grading::Fact, grading::Recorder;

/// As input() of ring.py of the grader: sums of such values depend on the order of the additions.
float input(std::size_t i, int rank) {
  const auto r = static_cast<std::size_t>(rank);
  const auto whole = static_cast<float>(static_cast<int>((i * 7919 + r * 104729) % 8191) - 4095);
  return std::ldexp(whole / 3.0F, static_cast<int>((i + 3 * r) % 5));
}

std::vector<float> inputs(std::size_t count, int rank) {
  std::vector<float> x(count);
  for (std::size_t i = 0; i < count; ++i) x[i] = input(i, rank);
  return x;
}

void run_sums(grading::Grading& grading, int ranks, std::size_t count) {
  const Case part = {"n" + std::to_string(ranks) + "-" + std::to_string(count), ranks,
                     std::to_string(ranks) + " ranks, " + std::to_string(count) + " elements"};
  grading.run(part, [&](Recorder& world, Fact& fact) {
    std::vector<float> x = inputs(count, world.rank());
    fact.set("count", static_cast<double>(count));
    assignment::ring_all_reduce(world, x);
    fact.set_calls(world.calls(), x).set_traffic(world.traffic());
    grading.write_floats(fact, part, "output", x);
  });
}

/// The last rank fails instead of taking part.
void run_fault(grading::Grading& grading) {
  const Case part = {"fault", 3, "3 ranks, of which rank 2 fails"};
  grading.run(part, [&](Recorder& world, Fact& fact) {
    std::vector<float> x = inputs(1000, world.rank());
    if (world.rank() == 2) {
      world.abort("the grader made rank 2 fail");
      return;
    }
    fact.set("threw", grading::fails([&] { assignment::ring_all_reduce(world, x); }) ? 1 : 0);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return grading::run_grading(argc, argv, [](grading::Grading& grading, const grading::Part& part) {
    if (part.kind == "fault")
      run_fault(grading);
    else
      run_sums(grading, part.ranks, part.amount);
  });
}
