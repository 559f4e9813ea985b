#include "tessera/nn/ops/cross_entropy.h"

#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

struct Saved {
  Tensor logits, targets, row_max, row_sum;
  Tensor valid;  // f64: how many targets count
  CrossEntropyOptions options;
  std::shared_ptr<Gradient> dloss;
};

template <class T>
void forward(const Saved& saved, const Tensor& loss) {
  const kernels::CrossEntropyForward<T> args{saved.logits.data<T>(),        saved.targets.data<std::int32_t>(),
                                             size(saved.targets.count()),   size(saved.logits.dim(-1)),
                                             saved.options.ignore_index,    data_or_null<T>(saved.row_max),
                                             data_or_null<T>(saved.row_sum)};
  launch(loss.context(), args,
         [out = loss.data<double>(), valid = saved.valid.data<double>()](ThreadPool& pool, const auto& a) {
           const kernels::CrossEntropyResult result = kernels::cross_entropy_forward<T>(pool, a);
           *valid = static_cast<double>(result.valid);
           *out = result.valid == 0 ? 0.0 : result.loss_sum / *valid;
         });
}

template <class T>
void backward(const Saved& saved) {
  Gradient& slot = *saved.logits.gradient();
  const bool over = saved.options.overwrite_logits && !slot.written() && !slot.bound();
  const GradientTarget target = over ? GradientTarget{saved.logits, false} : slot.write();
  kernels::CrossEntropyBackward<T> args;
  args.logits = saved.logits.data<T>();
  args.targets = saved.targets.data<std::int32_t>();
  args.rows = size(saved.targets.count());
  args.vocabulary = size(saved.logits.dim(-1));
  args.ignore_index = saved.options.ignore_index;
  args.row_max = saved.row_max.data<T>();
  args.row_sum = saved.row_sum.data<T>();
  args.dlogits = target.tensor.data<T>();
  args.accumulate = target.accumulate;
  const double* upstream = saved.dloss->value().data<double>();
  launch(saved.logits.context(), args, [upstream, valid = saved.valid.data<double>()](ThreadPool& pool, auto a) {
    a.scale = *valid == 0.0 ? T(0) : static_cast<T>(*upstream / *valid);
    kernels::cross_entropy_backward<T>(pool, a);
  });
  if (over) slot.give(saved.logits);
}

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, CrossEntropyOptions options) {
  require_dtype("cross_entropy", "targets", targets, DType::i32);
  if (logits.shape().empty() || targets.count() != rows_of(logits))
    throw InvalidUsage("cross_entropy: logits have shape " + to_string(logits.shape()) + " and targets " +
                       to_string(targets.shape()));
  Context& context = logits.context();
  Tensor loss = Tensor::empty(context, {}, DType::f64);
  Saved saved{logits, targets, {}, {}, Tensor::empty(context, {}, DType::f64), options, nullptr};
  Tape* tape = recording({logits}, loss);
  if (tape != nullptr) {
    saved.row_max = Tensor::empty(context, {targets.count()}, logits.dtype());
    saved.row_sum = Tensor::empty(context, {targets.count()}, logits.dtype());
  }
  for_floating("cross_entropy", logits.dtype(), [&](auto zero) { forward<decltype(zero)>(saved, loss); });
  if (tape != nullptr) {
    saved.dloss = loss.gradient();
    tape->record("cross_entropy", loss, [saved = std::move(saved)] {
      for_floating("cross_entropy", saved.logits.dtype(), [&](auto zero) { backward<decltype(zero)>(saved); });
    });
  }
  return loss;
}

}  // namespace tessera::nn::ops
