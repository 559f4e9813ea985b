// The buffers of one flat parameter.
#pragma once

#include <vector>

#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/lease.h"
#include "tessera/fsdp/precision.h"
#include "tessera/fsdp/sharding_plan.h"

namespace tessera::fsdp {

struct EngineResources;

/// Values, gradient, and optimizer state with master weights: each in device memory, or in host memory
/// (ShardingPlan::offloaded). `x_at(element)` is the address of an element of the whole flat parameter, which must be
/// in the range that the buffer holds.
struct FlatParameter {
  /// Allocates zeroed state for what the plan keeps on this rank.
  FlatParameter(EngineResources& resources, const ShardingPlan& plan, FlatLayout layout, int optimizer_slots);

  FlatLayout layout;
  Precision precision;
  ElementRange rest, kept, optimized;  // that this rank holds of values, of gradients, of the optimizer's state
  Buffer values;                       // at rest: this rank's shard, or all where replicated
  Buffer gradient;                     // kept: this rank's shard, or all
  std::vector<Buffer> state;           // optimizer state: this rank's shard
  Buffer master_weights;               // f32 master weights of half-precision values: the optimizer's shard
  Buffer anchor;                       // f32, with a sync period: the anchor, the optimizer's shard
  Buffer outer_momentum;               // the outer optimizer's momentum, if any
  Buffer full_values;                  // in f32, or an encoding's bytes, between gather_full() and release_full()
  Lease unsharded;                     // parameters, between unshard() and reshard()
  Lease secondary;                     // secondary shard, between forward and backward
  void* written_at = nullptr;          // where the backward writes, since bind_gradients()
  Lease written_gradient;              // what a backward writes, if it is converted for reduction
  Lease full_gradient;                 // between the backward and the end of the first reduction stage
  Lease delta;                         // between start_sync() and finish_sync()

  bool quantized() const { return layout.dtype == DType::u8; }
  bool trainable() const { return layout.trainable; }
  static std::byte* at(void* base, DType dtype, std::int64_t element) {
    return static_cast<std::byte*>(base) + element * static_cast<std::int64_t>(size_of(dtype));
  }
  static float* f32_at(const Buffer& buffer, std::int64_t element) {
    return static_cast<float*>(buffer.data()) + element;
  }
  void* value_at(std::int64_t element) const { return at(values.data(), layout.dtype, element - rest.begin); }
  float* master_at(std::int64_t element) const { return f32_at(master_weights, element - optimized.begin); }
  float* state_at(std::size_t slot, std::int64_t element) const {
    return f32_at(state[slot], element - optimized.begin);
  }
  /// Kept gradients, in the reduce dtype.
  void* gradient_at(std::int64_t element) const { return at(gradient.data(), precision.reduce, element - kept.begin); }
  void* leased_gradient_at(std::int64_t element) const { return at(full_gradient.data(), precision.reduce, element); }
  /// The leased gradient if there is one, else the kept one.
  void* reduced_gradient_at(std::int64_t element) const {
    return full_gradient ? leased_gradient_at(element) : gradient_at(element);
  }
  /// The values that the optimizer updates.
  float* optimized_values() const {
    return master_weights ? master_at(optimized.begin) : static_cast<float*>(value_at(optimized.begin));
  }
  std::size_t reduced_bytes() const { return static_cast<std::size_t>(layout.padded) * size_of(precision.reduce); }
  std::size_t leased_bytes() const;  ///< of parameters and gradients

  /// Makes the parameters' tensors refer to the whole flat parameter at `base`; likewise their gradients. `keep`: the
  /// backward adds to what is there.
  void bind_parameters(void* base);
  void bind_gradients(void* base, bool keep);
};

}  // namespace tessera::fsdp
