#include "tessera/fsdp/nn_task.h"

#include <limits>

#include "tessera/nn/tape.h"

namespace tessera::fsdp {

NnTask::NnTask(std::unique_ptr<nn::Module> module, std::uint64_t seed) : module_(std::move(module)), seed_(seed) {}
NnTask::~NnTask() = default;

Model& NnTask::model() {
  if (model_ == nullptr) model_ = std::make_unique<NnModel>(*module_);
  return *model_;
}

void NnTask::forward_backward(std::int64_t step, ElementRange samples, double scale) {
  context().random() = {.seed = seed_, .step = static_cast<std::uint64_t>(step), .first_sample = samples.begin};
  losses_.push_back(run_step(step, samples, scale));
}

nn::Tensor NnTask::run_step(std::int64_t step, ElementRange samples, double scale) {
  return differentiate([&] { return loss(step, samples); }, scale);
}

double NnTask::evaluation_loss(ElementRange samples) {
  const nn::EvaluationScope no_dropout(context());
  return evaluation(samples).item();
}

nn::Tensor NnTask::evaluation(ElementRange /*samples*/) { refuse_evaluation(); }

nn::Tensor NnTask::differentiate(const std::function<nn::Tensor()>& forward, double scale) {
  nn::Tape tape;
  nn::Tensor loss;
  {
    const nn::TapeScope recording(context(), &tape);
    loss = forward();
  }
  tape.backward(loss, scale);
  return loss;
}

double NnTask::mean_loss() {
  const std::vector<nn::Tensor> losses = std::exchange(losses_, {});
  if (context().device().type == base::DeviceType::meta) return std::numeric_limits<double>::quiet_NaN();
  double mean = 0;
  for (const nn::Tensor& loss : losses) mean += loss.item() / static_cast<double>(losses.size());
  return mean;
}

}  // namespace tessera::fsdp
