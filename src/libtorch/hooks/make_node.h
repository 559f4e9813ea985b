// Makes nodes of autograd's graph.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace tessera::libtorch {

/// From Torch 2.14 on nodes count their own references.
using NodePointer = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// A template, since each Torch can compile one of the two ways only.
template <class Made, class Pointer = NodePointer, class... Arguments>
Pointer make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Made>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
}

/// Makes `tensor` the next result of `node`: an alias, which shares the memory, and the count of changes in place.
inline void put_behind(at::Tensor& tensor, const NodePointer& node) {
  at::Tensor alias = tensor.detach();
  torch::autograd::set_history(alias, node);
  tensor = std::move(alias);
}

}  // namespace tessera::libtorch
