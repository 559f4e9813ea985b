#include "tools/train/evaluation.h"

#include <xxhash.h>

#include <algorithm>
#include <memory>

#include "tessera/nn/data.h"
#include "tools/results/statistics.h"

namespace tessera::tools {

Evaluation evaluate(const TrainPlan& plan, nn::CausalModel& model, comm::HostCollectives& control) {
  const nn::EvaluationScope no_dropout(model.context());
  const nn::SequentialSampler windows(plan.eval, plan.eval->all(), plan.seq_len);
  const std::int64_t ranks = control.size();
  const std::int64_t at_once = std::max<std::int64_t>(1, plan.options.global_batch / ranks);
  double sums[2] = {0, 0};  // of losses, and of windows
  // Consecutive windows go to consecutive ranks. Windows beyond the last one are empty, and every rank runs the same
  // number.
  for (std::int64_t first = 0; first < windows.count(); first += at_once * ranks) {
    const std::int64_t begin = first + at_once * control.rank();
    const std::int64_t real = std::clamp<std::int64_t>(windows.count() - begin, 0, at_once);
    const nn::TokenBatch batch = windows.batch(model.context(), {begin, begin + at_once});
    const double mean = model.loss(batch.tokens, batch.targets).item();  // over the targets that count
    sums[0] += mean * static_cast<double>(real);
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
