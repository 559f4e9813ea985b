#include "tools/evaluation.h"

#include "tessera/nn/data.h"

namespace tessera::tools {

Evaluation evaluate(const TrainPlan& plan, nn::CausalModel& model, comm::Communicator& control) {
  nn::DataOptions options = plan.data;
  options.files = {plan.options.eval};
  const nn::Windows windows(options);
  const std::int64_t ranks = control.size();
  const std::int64_t rounds = (windows.count() + ranks - 1) / ranks;
  double sums[2] = {0, 0};  // of losses, and of windows
  for (std::int64_t round = 0; round < rounds; ++round) {
    const std::int64_t index = round * ranks + control.rank();
    const bool real = index < windows.count();
    const double loss = model.loss(windows.window(real ? index : 0)).item();
    if (!real) continue;
    sums[0] += loss;
    sums[1] += 1;
  }
  if (ranks > 1) {
    const comm::View view = comm::view_of(sums, 2);
    control.all_reduce(view, view, comm::ReduceOp::sum(), {.label = "eval"}).wait();
  }
  return {sums[0] / sums[1], static_cast<std::int64_t>(sums[1]) * plan.seq_len};
}

}  // namespace tessera::tools
