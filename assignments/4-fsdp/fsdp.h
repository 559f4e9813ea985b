// Assignment 4: what you write in fsdp.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "tessera/comm/communicator.h"
#include "tessera/nn/module.h"

namespace assignment {

/// A sharded model: each child of the model is a unit.
class Fsdp {
 public:
  virtual ~Fsdp() = default;
  /// Writes the initial values of this rank's shards, without communication.
  virtual void initialize(std::uint64_t seed) = 0;
  /// After a backward: updates this rank's shards by SGD.
  virtual void step(float learning_rate) = 0;
  /// This rank's shard of a unit's flat parameter, with padding.
  virtual std::span<const float> shard(std::size_t unit) const = 0;
};

/// Makes each child of `model` a unit and sets its hooks. `model` and `world` outlive the result.
std::unique_ptr<Fsdp> fully_shard(tessera::nn::Module& model, tessera::comm::Communicator& world);

}  // namespace assignment
