#include "tessera/nn/layers/sequential.h"

namespace tessera::nn {

Sequential& Sequential::append(std::function<Tensor(const Tensor&)> function) {
  calls_.push_back(std::move(function));
  return *this;
}

Tensor Sequential::forward(const Tensor& x) {
  Tensor y = x;
  for (const auto& call : calls_) y = call(y);
  return y;
}

}  // namespace tessera::nn
