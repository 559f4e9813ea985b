// Assignment 2: what you write in ddp.cpp.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "tessera/comm/communicator.h"
#include "tessera/nn/module.h"

namespace assignment {

/// Replicated data parallelism: after each backward every rank has the mean of the gradients.
class Ddp {
 public:
  virtual ~Ddp() = default;
  /// Call after a backward: reduces what is not reduced yet, and waits. Then gradient() may be read, and another
  /// forward and backward follow.
  virtual void finish() = 0;
  /// The mean gradient of the parameter with this index in model.parameters().
  virtual std::span<const float> gradient(std::size_t parameter) const = 0;
};

/// Sets the hooks of the children of `model`, whose parameters have memory. `model` and `world` outlive the result.
/// `bucket_bytes`: see the handout.
std::unique_ptr<Ddp> data_parallel(tessera::nn::Module& model, tessera::comm::Communicator& world,
                                   std::size_t bucket_bytes);

}  // namespace assignment
