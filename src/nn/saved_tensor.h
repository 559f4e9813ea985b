// What a backward keeps of a tensor that it reads: the tensor, or the way to compute it again.
#pragma once

#include <functional>
#include <memory>

#include "tessera/nn/tensor.h"

namespace tessera::nn {

/// Computes a tensor a second time, with the same bits, from tensors that other backwards keep anyway. Shared by the
/// backwards that read the tensor: the first computes it, and its memory is free again after the last.
class TESSERA_API Recomputation {
 public:
  /// `compute` records nothing and returns a tensor of the same shape and dtype.
  explicit Recomputation(std::function<Tensor()> compute) : compute_(std::move(compute)) {}
  const Tensor& result();  ///< computed by the first call

 private:
  const std::function<Tensor()> compute_;
  Tensor result_;
};

/// Used by one thread. Copies share the tensor or its recomputation.
class TESSERA_API SavedTensor {
 public:
  SavedTensor() = default;  ///< empty
  /// Keeps x, or, if x has one, only its recomputation.
  explicit SavedTensor(const Tensor& x);
  /// The tensor; empty if x was.
  Tensor get() const { return again_ ? again_->result() : kept_; }

 private:
  Tensor kept_;
  std::shared_ptr<Recomputation> again_;
};

}  // namespace tessera::nn
