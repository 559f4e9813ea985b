#include "tools/plan/framework_profile.h"

#include <utility>

#include "tessera/base/dtype.h"

namespace tessera::tools {
namespace {

constexpr double kBackwardLaunch = 0.4;  // host time of a launch by the autograd engine, against one of a module
constexpr double kForwardLoss = 0.45;    // share of the loss's bytes
constexpr double kAccumulation = 6;      // bytes for each gradient that is added to a kept one

ProductSize one_of(const nn::ProductShape& shape) { return {shape.m, shape.n, shape.k, 1}; }

}  // namespace

KernelWork& KernelWork::operator+=(const KernelWork& other) {
  products += other.products;
  memory += other.memory;
  gaps += other.gaps;
  launches += other.launches;
  host += other.host;
  return *this;
}

void FrameworkProfile::call(const nn::KernelInvocation& call, base::Stream& stream, const std::function<void()>& run) {
  run();
  const KernelWork work = cost(call);
  if (!work.empty()) add(work, stream, call.kernel);
}

/// Calls that follow each other on a stream become one task, but not those of two blocks: the host may be ahead of the
/// device in one and behind it in the next.
void FrameworkProfile::add(const KernelWork& work, base::Stream& stream, std::string_view label) {
  const base::TaskId position = clock_.position(stream);
  const bool starts = begins_ || label.starts_with("attention") || label.starts_with("cross_entropy");
  const bool joins = !starts && position + 1 == clock_.graph().tasks().size() && work_.contains(position);
  if (joins) {
    work_.at(position) += work;
    return;
  }
  clock_.advance(stream, static_cast<std::int64_t>((work.products + work.memory + work.gaps) * 1e9), label);
  const base::TaskId task = clock_.position(stream);
  work_[task] = work;
  if (begins_) microbatches_.push_back(task);
  begins_ = false;
}

KernelWork FrameworkProfile::cost(const nn::KernelInvocation& call) {
  const auto tokens = static_cast<double>(workload_.tokens()), width = static_cast<double>(workload_.model.width);
  const double loss = tokens * static_cast<double>(workload_.model.vocabulary) * workload_.loss_bytes;
  if (call.kernel == "linear_forward" || call.kernel == "linear_activation_forward")
    return linear_forward(one_of(call.product));
  if (call.kernel == "linear_backward") return linear_backward(one_of(call.product), call.product.count == 2);
  if (call.kernel == "attention_forward" || call.kernel == "attention_dropout_forward") {
    const ProductSize size{call.product.m, call.product.n, call.product.k, call.product.count};
    return pass_ == Pass::backward ? block_recomputed(size) : block_forward(size);
  }
  if (call.kernel == "attention_backward" || call.kernel == "attention_dropout_backward")
    return block_backward({call.product.m, call.product.n, call.product.k, call.product.count});
  if (call.kernel == "embedding_forward") return embedding(false);
  if (call.kernel == "embedding_backward") return embedding(true);
  if (call.kernel == "cross_entropy_forward") return traffic(loss * kForwardLoss + tokens * width * 4, 8);
  if (call.kernel == "cross_entropy_backward") {
    pass_ = Pass::backward;
    return traffic(loss * (1 - kForwardLoss) + tokens * width * 8, 10);
  }
  constexpr double kOperands = 7;  // of adam_step
  if (call.kernel == "adam_step") return update(call.size / kOperands / static_cast<double>(base::size_of(call.dtype)));
  return {};
}

KernelWork FrameworkProfile::product(const ProductSize& size, double launches) const {
  const ProductTime time = product_time(*workload_.device, size);
  return {.products = time.memory ? 0 : time.seconds,
          .memory = time.memory ? time.seconds : 0,
          .gaps = kKernelGap,
          .launches = launches};
}

KernelWork FrameworkProfile::traffic(double bytes, double launches) const {
  return {.memory = bytes / workload_.device->memory_rate, .gaps = kKernelGap * launches, .launches = launches};
}

KernelWork FrameworkProfile::linear_forward(const ProductSize& size) {
  if (pass_ != Pass::backward) return product(size, 1);
  const std::size_t products = workload_.model.family == nn::ModelConfig::Family::llama ? 7 : 4;
  const std::size_t index = recomputed_products_++;
  const bool last = index + 1 == products;
  const bool kept = workload_.recomputation == Recomputation::selective && index % 2 == 0;
  return kept || (last && workload_.early_stop) ? KernelWork{} : product(size, 1);
}

KernelWork FrameworkProfile::linear_backward(const ProductSize& size, bool both) const {
  const bool head = size.n == workload_.model.vocabulary && size.k == workload_.model.width;
  const double launches = head ? 1 : kBackwardLaunch;
  KernelWork work = product({size.n, size.k, size.m, 1}, launches);
  if (both) work += product({size.m, size.k, size.n, 1}, launches);
  return work;
}

/// `size.batch`: heads of all sequences.
KernelWork FrameworkProfile::attention(const ProductSize& size, bool backward) const {
  if (workload_.attention != AttentionKernel::unfused)
    return {
        .memory = fused_attention_time(*workload_.device, workload_.attention, {size.batch, size.m, size.k}, backward),
        .launches = backward ? 4.0 : 2.0};
  const FrameworkStyle& style = *workload_.style;
  const double scores = static_cast<double>(size.batch) * static_cast<double>(size.m) * static_cast<double>(size.m);
  KernelWork work = traffic(scores * (backward ? style.scores_backward : style.scores_forward), backward ? 6 : 4);
  for (int i = 0; i < (backward ? 2 : 1); ++i) {
    work += product({size.m, size.m, size.k, size.batch}, 1);
    work += product({size.m, size.k, size.m, size.batch}, 1);
  }
  return work;
}

KernelWork FrameworkProfile::block_forward(const ProductSize& size) const {
  const FrameworkStyle& style = *workload_.style;
  const auto tokens = static_cast<double>(workload_.tokens()), width = static_cast<double>(workload_.model.width);
  KernelWork work = attention(size, false);
  work += traffic(tokens * (style.width_forward * width + style.hidden_forward * workload_.feed_forward),
                  style.kernels_forward);
  if (!workload_.sharded()) return work;
  work += traffic(workload_.gather_copy * workload_.block_parameters, 2);
  work.host += workload_.unit_host_s;
  return work;
}

KernelWork FrameworkProfile::block_recomputed(const ProductSize& size) const {
  const FrameworkStyle& style = *workload_.style;
  const auto tokens = static_cast<double>(workload_.tokens()), width = static_cast<double>(workload_.model.width);
  const bool full = workload_.recomputation == Recomputation::full;
  const bool shorter = full && workload_.early_stop;
  KernelWork work = traffic(
      tokens * ((style.width_forward - (shorter ? 6 : 0)) * width + style.hidden_forward * workload_.feed_forward),
      style.kernels_forward - (shorter ? 1 : 0));
  if (full) work += attention(size, false);
  return work;
}

KernelWork FrameworkProfile::block_backward(const ProductSize& size) {
  const FrameworkStyle& style = *workload_.style;
  const auto tokens = static_cast<double>(workload_.tokens()), width = static_cast<double>(workload_.model.width);
  recomputed_products_ = 0;
  const std::size_t block = workload_.recomputed.size() - 1 - blocks_back_ % workload_.recomputed.size();
  ++blocks_back_;
  KernelWork work = attention(size, true);
  work += traffic(tokens * (style.width_backward * width + style.hidden_backward * workload_.feed_forward),
                  style.kernels_backward);
  work.launches *= kBackwardLaunch;
  if (workload_.recomputed[block]) work.host += workload_.recomputed_host_s;
  if (!workload_.sharded()) {
    if (workload_.microbatches > 1) work += traffic(kAccumulation * workload_.block_parameters, 0);
    return work;
  }
  const bool gathers = workload_.strategy != "shard_grad_op" && block + 1 < workload_.recomputed.size();
  if (gathers) work += traffic(workload_.gather_copy * workload_.block_parameters, 2);
  work += traffic(workload_.reduce_copy * workload_.block_parameters, 2);
  work.host += workload_.unit_host_s;
  return work;
}

KernelWork FrameworkProfile::embedding(bool backward) {
  const auto elements = static_cast<double>(workload_.tokens() * workload_.model.width);
  const auto table = static_cast<double>(workload_.model.vocabulary * workload_.model.width);
  if (backward) return std::exchange(embedding_done_, true) ? KernelWork{} : traffic(6 * (elements + table), 5);
  if (pass_ == Pass::forward) return {};  // the table of positions
  pass_ = Pass::forward;
  begins_ = true;
  embedding_done_ = false;
  return traffic(6 * elements, 4);
}

KernelWork FrameworkProfile::update(double elements) {
  const bool first = std::exchange(pass_, Pass::update) != Pass::update;
  return traffic(elements * workload_.engine_share * workload_.optimizer_bytes,
                 first ? workload_.optimizer_launches : 0);
}

}  // namespace tessera::tools
