#include "tessera/nn/ops/cross_entropy.h"

#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

using kernels::OpMath;

/// Number of classes.
std::size_t classes_of(const Tensor& logits, const CrossEntropyOptions& options) {
  return size(options.vocabulary != 0 ? options.vocabulary : logits.dim(-1));
}

struct Saved {
  Tensor logits, targets, row_max, row_sum;
  Tensor valid;  // f64: number of targets that are not ignored
  CrossEntropyOptions options;
  std::shared_ptr<Gradient> dloss;
};

template <class T>
void forward(KernelTable<T>& device, const Saved& saved, const Tensor& loss) {
  const kernels::CrossEntropyForward<T> args{saved.logits.data<T>(),
                                             saved.targets.data<std::int32_t>(),
                                             size(saved.targets.count()),
                                             classes_of(saved.logits, saved.options),
                                             saved.options.ignore_index,
                                             data_or_null<OpMath<T>>(saved.row_max),
                                             data_or_null<OpMath<T>>(saved.row_sum),
                                             size(saved.logits.dim(-1))};
  device.cross_entropy_forward(loss.context().stream(), {args, loss.data<double>(), saved.valid.data<double>()});
}

template <class T>
void backward(KernelTable<T>& device, Stream& stream, const Saved& saved) {
  Gradient& slot = *saved.logits.gradient();
  const bool over = saved.options.overwrite_logits && !slot.written() && !slot.bound();
  const GradientTarget target = over ? GradientTarget{saved.logits, false} : slot.write();
  kernels::CrossEntropyBackward<T> args;
  args.logits = saved.logits.data<T>();
  args.targets = saved.targets.data<std::int32_t>();
  args.rows = size(saved.targets.count());
  args.vocabulary = classes_of(saved.logits, saved.options);
  args.stride = size(saved.logits.dim(-1));
  args.ignore_index = saved.options.ignore_index;
  args.row_max = saved.row_max.data<OpMath<T>>();
  args.row_sum = saved.row_sum.data<OpMath<T>>();
  args.dlogits = target.tensor.data<T>();
  args.accumulate = target.accumulate;
  device.cross_entropy_backward(stream, {args, saved.dloss->value().data<double>(), saved.valid.data<double>()});
  if (over) slot.accumulate(saved.logits);
}

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, CrossEntropyOptions options) {
  require_dtype("cross_entropy", "targets", targets, DType::i32);
  if (logits.shape().empty() || targets.count() != rows_of(logits))
    throw InvalidUsage("cross_entropy: logits have shape " + to_string(logits.shape()) + " and targets " +
                       to_string(targets.shape()) + "; needs one target for each row of logits");
  if (options.vocabulary < 0 || options.vocabulary > logits.dim(-1))
    throw InvalidUsage("cross_entropy: rows of logits have " + std::to_string(logits.dim(-1)) +
                       " elements, less than " + std::to_string(options.vocabulary) + " classes");
  Context& context = logits.context();
  Tensor loss = Tensor::empty(context, {}, DType::f64);
  Saved saved{logits, targets, {}, {}, Tensor::empty(context, {}, DType::f64), options, nullptr};
  Tape* tape = recording({logits}, loss);
  if (tape != nullptr) {
    const DType opmath = kernels::opmath_dtype(logits.dtype());
    saved.row_max = Tensor::empty(context, {targets.count()}, opmath);
    saved.row_sum = Tensor::empty(context, {targets.count()}, opmath);
  }
  with_kernels("cross_entropy", logits, [&](auto& device, Stream&) { forward(device, saved, loss); });
  if (tape != nullptr) {
    saved.dloss = loss.gradient();
    tape->record("cross_entropy", loss, [saved = std::move(saved)] {
      with_kernels("cross_entropy", saved.logits,
                   [&](auto& device, Stream& stream) { backward(device, stream, saved); });
    });
  }
  return loss;
}

}  // namespace tessera::nn::ops
