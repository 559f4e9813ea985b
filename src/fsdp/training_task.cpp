#include "tessera/fsdp/training_task.h"

#include <charconv>
#include <cmath>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/fsdp/nn_task.h"
#include "tessera/nn/tape.h"

namespace tessera::fsdp {

TrainingTask::~TrainingTask() = default;

double TrainingTask::evaluation_loss(ElementRange /*samples*/) { refuse_evaluation(); }

void TrainingTask::refuse_evaluation() { throw Unsupported("this task has no evaluation; leave --eval out"); }

TaskOptions::TaskOptions(std::map<std::string, std::string> values) : values_(std::move(values)) {}

std::string TaskOptions::text(const std::string& name, const std::string& missing) const {
  read_.insert(name);
  const auto found = values_.find(name);
  return found == values_.end() ? missing : found->second;
}

std::int64_t TaskOptions::integer(const std::string& name, std::int64_t missing, std::int64_t least,
                                  std::int64_t most) const {
  return base::parse_integer(text(name, std::to_string(missing)), "option " + name, least, most);
}

double TaskOptions::number(const std::string& name, double missing) const {
  const std::string given = text(name);
  if (!values_.contains(name)) return missing;
  double value = 0;
  const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
  if (error != std::errc() || end != given.data() + given.size() || !std::isfinite(value))
    throw InvalidUsage("option " + name + ": '" + given + "' is not a finite number");
  return value;
}

void TaskOptions::refuse_unknown(const std::string& task) const {
  for (const auto& [name, value] : values_) {
    if (read_.contains(name)) continue;
    std::string known;
    for (const std::string& one : read_) known += (known.empty() ? "" : ", ") + one;
    throw InvalidUsage(task + " has no option '" + name + "'; it has " + (known.empty() ? "none" : known));
  }
}

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
