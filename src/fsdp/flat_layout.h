// Flat parameters: the parameters of a unit laid end to end in one buffer, which every rank cuts the same way.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tessera/fsdp/types.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// Every parameter starts at a multiple of this many elements, and every shard is a multiple of it.
inline constexpr std::int64_t kFlatAlignment = 8;

/// Elements [begin, end) of a flat parameter.
using nn::ElementRange;

/// Where one parameter lies.
struct FlatEntry {
  std::shared_ptr<nn::Parameter> parameter;
  std::int64_t offset = 0;  ///< in elements
  std::int64_t end() const { return offset + parameter->count(); }
};

/// One dtype and one trainability. The layout depends on the parameters and the world size only, never on the strategy.
struct TESSERA_API FlatLayout {
  DType dtype = DType::f32;
  bool trainable = true;
  std::vector<FlatEntry> entries;  ///< in order of registration
  std::int64_t elements = 0;       ///< of the parameters
  std::int64_t padded = 0;         ///< length of the buffer: a multiple of kFlatAlignment x world
  std::int64_t padding() const { return padded - elements; }
  std::size_t bytes() const { return static_cast<std::size_t>(padded) * size_of(dtype); }
  /// The holes: between parameters and at the end.
  std::vector<ElementRange> gaps() const;
};

/// Groups by dtype and trainability, in order of first appearance.
TESSERA_API std::vector<FlatLayout> make_layouts(std::span<const std::shared_ptr<nn::Parameter>> parameters, int world);

/// The part of `entry` inside `range`, as a range of the parameter's own elements; empty where they don't meet.
TESSERA_API ElementRange within(const FlatEntry& entry, ElementRange range);

}  // namespace tessera::fsdp
