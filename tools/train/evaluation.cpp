#include "tools/train/evaluation.h"

#include <xxhash.h>

#include <algorithm>
#include <memory>

#include "tools/results/statistics.h"

namespace tessera::tools {

Evaluation evaluate(const TrainPlan& plan, fsdp::TrainingTask& task, comm::HostCollectives& control) {
  const std::int64_t count = task.evaluation_samples(), ranks = control.size();
  const std::int64_t at_once = std::max<std::int64_t>(1, plan.options.global_batch / ranks);
  double sums[2] = {0, 0};  // of losses, and of samples
  // Consecutive samples go to consecutive ranks.
  for (std::int64_t first = 0; first < count; first += at_once * ranks) {
    const std::int64_t begin = first + at_once * control.rank();
    const std::int64_t real = std::clamp<std::int64_t>(count - begin, 0, at_once);
    const double mean =
        task.evaluation_loss(real == 0 ? base::ElementRange{0, 1} : base::ElementRange{begin, begin + real});
    sums[0] += real == 0 ? 0 : mean * static_cast<double>(real);
    sums[1] += static_cast<double>(real);
  }
  if (ranks > 1) control.all_reduce(sums, 2, comm::ReduceOp::sum(), "eval");
  return {unsigned_nan(sums[0] / sums[1]), static_cast<std::int64_t>(sums[1]) * plan.seq_len};
}

std::string hash_parameters(fsdp::Engine& engine) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
  XXH3_128bits_reset(state.get());
  engine.state().for_each_parameter([&](const fsdp::Parameter&, std::span<const float> values) {
    XXH3_128bits_update(state.get(), values.data(), values.size_bytes());
  });
  XXH128_canonical_t bytes;
  XXH128_canonicalFromHash(&bytes, XXH3_128bits_digest(state.get()));
  std::string text;
  for (const unsigned char byte : bytes.digest) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace tessera::tools
