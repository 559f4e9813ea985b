// What a strategy must cost, by arithmetic alone: the reports print it beside what was counted, and the tests compare
// the two.
//
// Source: the volume and memory analysis of ZeRO (Rajbhandari et al., arXiv 1910.02054, sections 5 and 7) with what
// this engine keeps after forward; docs/fsdp.md derives each line.
#pragma once

#include <cstdint>
#include <span>

#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/precision.h"
#include "tessera/fsdp/strategy.h"

namespace tessera::fsdp {

/// A flat parameter whose dtype is not the model's: of modules with one of their own.
struct OtherFlat {
  Precision precision;      ///< where the model's gradients are cast to be reduced, so are these
  std::int64_t padded = 0;  ///< elements
  bool trained = true;
  std::vector<nn::Shape> shapes = {};  ///< of its parameters, where it is trained
};

/// A unit: a flat parameter for what is trained, one for what is frozen, one for what is encoded, and others.
struct UnitSize {
  std::int64_t padded = 0;  ///< elements
  bool kept_after_forward = false;
  bool is_root = false;
  std::int64_t frozen = 0;             ///< of `padded`: those that get no gradients
  std::int64_t bytes = 0;              ///< of `frozen`: those that are one byte each, an encoding's
  std::vector<nn::Shape> shapes = {};  ///< of its parameters that are trained, without those of `others`
  std::vector<OtherFlat> others = {};  ///< in `padded` and `frozen` they are not counted
  std::int64_t trained() const { return padded - frozen; }
};

/// Adds a flat parameter to its unit. `model`: the model's dtype, whose Precision the formulas are told; `reduce` as
/// EngineOptions::reduce_dtype.
TESSERA_API void add_flat(UnitSize& unit, const FlatLayout& flat, DType model, std::optional<DType> reduce = {});

/// The units that an engine makes of a model, which needs no memory for it. Without secondary shards.
TESSERA_API std::vector<UnitSize> planned_units(nn::Module& model, std::string_view wrap, const Strategy& strategy,
                                                const MeshShape& mesh, std::optional<bool> reshard_after_forward = {});

/// Per step (every one after the first) and rank.
struct TrafficVolume {
  std::uint64_t all_gather = 0;
  std::uint64_t reduce_scatter = 0;
  std::uint64_t all_reduce = 0;
  bool operator==(const TrafficVolume&) const = default;
};

/// What of a step's course its cost depends on.
struct StepShape {
  int prefetch = 1;      ///< units gathered ahead
  int microbatches = 1;  ///< the strategy says when each axis reduces their gradients
  bool reshard_after_backward = true;
};

struct CommunicationFormula {
  TrafficVolume calls;
  TrafficVolume bytes;  ///< sent by one rank
};

/// `units` in forward order; the plug-ins that the strategy names are those of `collectives`.
TESSERA_API CommunicationFormula communication_formula(
    const Strategy& strategy, const MeshShape& mesh, std::span<const UnitSize> units, Precision precision = {},
    StepShape course = {}, const CollectiveRegistry& collectives = CollectiveRegistry::built_in());

struct ModelStateBytes {
  std::uint64_t parameter = 0;
  std::uint64_t gradient = 0;
  std::uint64_t optimizer = 0;
  std::uint64_t offloaded = 0;  ///< in the host's memory
};

/// The state of `padded` elements that are trained, from the end of backward to the end of the optimizer step; `slots`
/// is the optimizer's number of f32 values per parameter, to which masters are added where there are some.
TESSERA_API ModelStateBytes model_state_formula(const Strategy& strategy, const MeshShape& mesh, std::int64_t padded,
                                                int slots, Precision precision = {});

/// The same of units with what is frozen in them.
TESSERA_API ModelStateBytes model_state_formula(const Strategy& strategy, const MeshShape& mesh,
                                                std::span<const UnitSize> units, int slots, Precision precision = {});

/// The same with CPU offload: what the strategy shards is with the host.
TESSERA_API ModelStateBytes with_offload(const Strategy& strategy, ModelStateBytes on_device);

/// Bytes between a rank's device and the host per step (every one after the first) with CPU offload.
struct OffloadBytes {
  std::uint64_t to_device = 0;
  std::uint64_t to_host = 0;
  bool operator==(const OffloadBytes&) const = default;
};

/// `units` and `slots` as above; paddings at the end of a flat parameter, which no optimizer updates, are counted too.
TESSERA_API OffloadBytes offload_formula(const Strategy& strategy, const MeshShape& mesh,
                                         std::span<const UnitSize> units, int slots, Precision precision = {});

struct PeakBounds {
  std::uint64_t unsharded_parameter = 0;
  std::uint64_t unsharded_gradient = 0;
};

/// Upper bounds in bytes, without CPU offload: that gathers on one rank, too, and where gradients are reduced in two
/// stages it holds those of one unit longer. Where microbatches wait for the last one, all gradients are held. Where
/// gradients are cast for their reduction, both forms of a unit live at once.
TESSERA_API PeakBounds peak_formula(const Strategy& strategy, const MeshShape& mesh, std::span<const UnitSize> units,
                                    StepShape course, Precision precision = {});

}  // namespace tessera::fsdp
