// Layers that are called one after another.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Calls its layers and functions in the order in which they were appended, each with the result of the one before.
/// Layer i is the child "i", where functions count too, as in PyTorch.
class TESSERA_API Sequential : public Layer<Sequential> {
 public:
  using Layer::Layer;
  /// Appends a layer M(context, arguments...), which takes a tensor and returns one.
  template <class M, class... Arguments>
  Sequential& append(Arguments&&... arguments) {
    M& layer = add<M>(std::to_string(calls_.size()), std::forward<Arguments>(arguments)...);
    return append([&layer](const Tensor& x) { return layer(x); });
  }
  /// Appends a function without parameters, such as ops::relu.
  Sequential& append(std::function<Tensor(const Tensor&)> function);
  /// The last one's result; x itself if there is none.
  Tensor forward(const Tensor& x);

 private:
  std::vector<std::function<Tensor(const Tensor&)>> calls_;
};

}  // namespace tessera::nn
