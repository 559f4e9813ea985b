// Flat parameters: the parameters of a unit, concatenated in one buffer that every rank shards the same way.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tessera/fsdp/model.h"
#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

/// Every parameter starts at a multiple of this many elements, and the size of every shard is a multiple of it.
inline constexpr std::int64_t kFlatAlignment = 8;

/// The position of one parameter in a flat parameter.
struct FlatEntry {
  std::shared_ptr<Parameter> parameter;                             ///< shared with the model
  std::int64_t offset = 0;                                          ///< offset in elements
  std::int64_t end() const { return offset + parameter->count(); }  ///< the element after its last one, before padding
};

/// The layout of a flat parameter of one dtype, trainable or frozen. It depends on the parameters and the world size
/// only, never on the strategy.
struct TESSERA_API FlatLayout {
  DType dtype = DType::f32;        ///< dtype of all parameters
  bool trainable = true;           ///< false: all parameters are frozen, and there are no gradients
  std::vector<FlatEntry> entries;  ///< entries in order of registration
  std::int64_t elements = 0;       ///< elements of the parameters
  std::int64_t padded = 0;         ///< length of the buffer: a multiple of kFlatAlignment x world
  std::int64_t padding() const { return padded - elements; }  ///< elements between parameters and at the end
  /// Bytes of the whole buffer, with padding.
  std::size_t bytes() const { return static_cast<std::size_t>(padded) * size_of(dtype); }
  /// Padding ranges: between parameters and at the end.
  std::vector<ElementRange> gaps() const;
};

/// Groups by dtype and trainability, in order of first appearance.
TESSERA_API std::vector<FlatLayout> make_layouts(std::span<const std::shared_ptr<Parameter>> parameters, int world);

/// The intersection of `entry` with `range`, as a range of the parameter's own elements; empty if they do not overlap.
TESSERA_API ElementRange within(const FlatEntry& entry, ElementRange range);

}  // namespace tessera::fsdp
