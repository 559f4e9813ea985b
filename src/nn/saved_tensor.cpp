#include "tessera/nn/saved_tensor.h"

namespace tessera::nn {

const Tensor& Recomputation::result() {
  if (!result_) result_ = compute_();
  return result_;
}

SavedTensor::SavedTensor(const Tensor& x) {
  if (!x) return;
  again_ = x.recomputation();
  if (again_ == nullptr) kept_ = x;
}

}  // namespace tessera::nn
