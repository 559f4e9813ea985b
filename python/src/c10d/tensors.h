// Tensors as the memory that operations read and write.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/types.h"

namespace tessera::c10d_backend {

/// What an operation needs until it has ended: tensors that it uses, and what then copies its result out of temporary
/// ones.
struct Holding {
  std::vector<at::Tensor> tensors;
  std::vector<std::function<void()>> at_end;
  std::shared_ptr<int> source;  ///< of a receive: where its sender's rank is written
};

/// The library's type of such elements; none for complex numbers and others that it does not have.
std::optional<base::DType> dtype_of(at::ScalarType type);

/// Throws PyTorch's error unless the tensor is dense and on a device that the library has.
void check_tensor(const at::Tensor& tensor);

/// Elements to move, not to compute with: of a dtype that the library does not have, bytes. `tensor` is contiguous.
comm::View moved(const at::Tensor& tensor);
/// The number of moved() elements for each one of the tensor.
std::size_t moved_per_element(const at::Tensor& tensor);

/// A contiguous tensor with the values of `tensor`, which is that one if it is contiguous.
at::Tensor readable(const at::Tensor& tensor, Holding& holding);
/// A contiguous tensor whose values `tensor` gets at the end. `current`: it begins with those of `tensor`.
at::Tensor writable(const at::Tensor& tensor, Holding& holding, bool current);

/// One contiguous tensor with the elements of all, one after another: a view if they lie so in memory.
at::Tensor joined(const std::vector<at::Tensor>& tensors, Holding& holding);
/// One whose parts the tensors get at the end.
at::Tensor to_be_split(const std::vector<at::Tensor>& tensors, Holding& holding);

/// Whether all have the same number of elements.
bool equal_sizes(const std::vector<at::Tensor>& tensors);
/// moved() elements of each.
std::vector<std::size_t> counts_of(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::c10d_backend
