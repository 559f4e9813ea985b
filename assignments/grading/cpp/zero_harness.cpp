// Updates parameters by a student's zero_optimizer() and, for comparison, by AdamW in one process.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "3-zero/zero.h"
#include "grading/cpp/grading.h"
#include "grading/cpp/memory.h"

namespace assignment {

void adamw(std::span<float> values, std::span<const float> gradients, std::span<float> m, std::span<float> v,
           int step) {
  constexpr double kRate = 0.01, kBeta1 = 0.9, kBeta2 = 0.999, kDecay = 0.01;
  if (gradients.size() != values.size() || m.size() != values.size() || v.size() != values.size())
    throw std::invalid_argument("adamw: " + std::to_string(values.size()) + " values, " +
                                std::to_string(gradients.size()) + " gradients, " + std::to_string(m.size()) + " and " +
                                std::to_string(v.size()) + " moments");
  const auto first = static_cast<float>(kRate / (1 - std::pow(kBeta1, step)));
  const auto second = static_cast<float>(1 - std::pow(kBeta2, step));
  for (std::size_t i = 0; i < values.size(); ++i) {
    m[i] = static_cast<float>(kBeta1) * m[i] + static_cast<float>(1 - kBeta1) * gradients[i];
    v[i] = static_cast<float>(kBeta2) * v[i] + static_cast<float>(1 - kBeta2) * gradients[i] * gradients[i];
    values[i] = values[i] * static_cast<float>(1 - kRate * kDecay) - first * m[i] / (std::sqrt(v[i] / second) + 1e-8F);
  }
}

double squares(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return sum;
}

}  // namespace assignment

namespace {

using grading::Case, grading::Fact, grading::Recorder;

constexpr int kSteps = 3;

float wave(std::size_t i, std::size_t key) {
  return static_cast<float>(static_cast<int>((i * 7919 + key * 104729) % 8191) - 4095) / 3000.0F;
}

std::vector<float> waves(std::size_t count, std::size_t key) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = wave(i, key);
  return values;
}

std::vector<float> gradients_of(std::size_t count, int step, int rank) {
  return waves(count, static_cast<std::size_t>(10 * step + rank + 1));
}

/// sum(a..b) = sum(a..m) + sum(m..b), as the library adds.
template <class T, class Term>
T tree_sum(int begin, int end, const Term& term) {
  if (end - begin == 1) return term(begin);
  const int middle = begin + (end - begin) / 2;
  return tree_sum<T>(begin, middle, term) + tree_sum<T>(middle, end, term);
}

std::size_t slice_begin(std::size_t count, int ranks, int rank) {
  return rank == ranks ? count : static_cast<std::size_t>(rank) * count / static_cast<std::size_t>(ranks) / 8 * 8;
}

std::vector<float> reference(std::size_t count, int ranks, double max_norm) {
  std::vector<float> values = waves(count, 0), mean(count), m(count), v(count);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<std::vector<float>> every;
    for (int rank = 0; rank < ranks; ++rank) every.push_back(gradients_of(count, step, rank));
    for (std::size_t i = 0; i < count; ++i)
      mean[i] = tree_sum<float>(0, ranks, [&](int rank) { return every[static_cast<std::size_t>(rank)][i]; }) /
                static_cast<float>(ranks);
    if (max_norm > 0) {
      const double sum = tree_sum<double>(0, ranks, [&](int rank) {
        const std::size_t begin = slice_begin(count, ranks, rank);
        return assignment::squares(std::span(mean).subspan(begin, slice_begin(count, ranks, rank + 1) - begin));
      });
      const double factor = std::min(1.0, max_norm / (std::sqrt(sum) + 1e-6));
      for (float& value : mean) value *= static_cast<float>(factor);
    }
    assignment::adamw(values, mean, m, v, step + 1);
  }
  return values;
}

std::unique_ptr<assignment::ZeroOptimizer> make(Recorder& world, std::span<float> parameters, double max_norm) {
  auto optimizer = assignment::zero_optimizer(world, parameters, max_norm);
  if (optimizer == nullptr) throw std::logic_error("zero_optimizer() returned nothing");
  return optimizer;
}

void run_steps(grading::Grading& grading, int ranks, std::size_t count, double max_norm) {
  const bool clips = max_norm > 0;
  const Case part = {"n" + std::to_string(ranks) + "-" + std::to_string(count) + (clips ? "-clip" : ""), ranks,
                     std::to_string(ranks) + (ranks > 1 ? " ranks, " : " rank, ") + std::to_string(count) +
                         " parameters" + (clips ? ", clipped" : "")};
  grading.run(part, [&](Recorder& world, Fact& fact) {
    const std::vector<float> expected = reference(count, ranks, max_norm);
    std::vector<float> parameters = waves(count, 0);
    std::vector<std::vector<float>> gradients;
    for (int step = 0; step < kSteps; ++step) gradients.push_back(gradients_of(count, step, world.rank()));
    fact.set("count", static_cast<double>(count));
    const grading::CountMemory counting;
    const auto optimizer = make(world, parameters, max_norm);
    std::int64_t most = 0;
    for (int step = 0; step < kSteps; ++step) {
      world.set_mark(step);
      optimizer->step(gradients[static_cast<std::size_t>(step)]);
      most = std::max(most, grading::CountMemory::now());
    }
    fact.set("kept_bytes", static_cast<double>(most))
        .set("peak_bytes", static_cast<double>(grading::CountMemory::peak()));
    fact.set_calls(world.calls(), parameters).set_traffic(world.traffic());
    grading.write_floats(fact, part, "final", parameters);
    grading.write_floats(fact, part, "expected", expected);
  });
}

void run_fault(grading::Grading& grading) {
  const Case part = {"fault", 3, "3 ranks, of which rank 2 fails in its second operation"};
  grading.run(part, [&](Recorder& world, Fact& fact) {
    std::vector<float> parameters = waves(1000, 0);
    const auto optimizer = make(world, parameters, 0);
    if (world.rank() == 2) world.fail_after(1);
    fact.set("threw", grading::fails([&] { optimizer->step(gradients_of(1000, 0, world.rank())); }) ? 1 : 0);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return grading::run_grading(argc, argv, [](grading::Grading& grading, const grading::Part& part) {
    if (part.kind == "fault")
      run_fault(grading);
    else
      run_steps(grading, part.ranks, part.amount, part.kind == "clip" ? 5.0 : 0.0);
  });
}
