// The cost of a strategy by closed formulas: reports print it beside the counted values, and tests compare the two.
//
// Source: the volume and memory analysis of ZeRO (Rajbhandari et al., arXiv 1910.02054, sections 5 and 7), extended by
// what this engine keeps after forward; docs/comparison.md derives each line.
#pragma once

#include <cstdint>
#include <span>

#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/precision.h"
#include "tessera/fsdp/strategy.h"

namespace tessera::fsdp {

/// A flat parameter whose dtype differs from the model's: of modules with a dtype of their own.
struct OtherFlat {
  Precision precision;             ///< if the model's gradients are cast for reduction, so are these
  std::int64_t padded = 0;         ///< elements
  bool trained = true;             ///< false: it has no gradients
  std::vector<Shape> shapes = {};  ///< shapes of its parameters, if it is trained
};

/// Sizes of a unit: a flat parameter for trained parameters, one for frozen ones, one for encodings, and others.
struct UnitSize {
  std::int64_t padded = 0;             ///< elements
  bool kept_after_forward = false;     ///< stays unsharded between forward and backward
  bool is_root = false;                ///< UnitSpec::is_root
  std::int64_t frozen = 0;             ///< elements of `padded` without gradients
  std::int64_t bytes = 0;              ///< elements of `frozen` that are one-byte encodings
  std::vector<Shape> shapes = {};      ///< shapes of its trained parameters, without those of `others`
  std::vector<OtherFlat> others = {};  ///< not counted in `padded` and `frozen`
  std::int64_t trained() const { return padded - frozen; }  ///< elements with gradients
};

/// Adds a flat parameter to its unit. `model`: the model's dtype, whose Precision the formulas receive; `reduce` as
/// EngineOptions::reduce_dtype.
TESSERA_API void add_flat(UnitSize& unit, const FlatLayout& flat, DType model, std::optional<DType> reduce = {});

/// The units that an engine would make of a model; allocates no memory for the model. Without secondary shards.
TESSERA_API std::vector<UnitSize> planned_units(Module& model, std::string_view wrap, const Strategy& strategy,
                                                const MeshShape& mesh, std::optional<bool> reshard_after_forward = {});

/// Per rank and step (every step after the first).
struct TrafficVolume {
  std::uint64_t all_gather = 0;                           ///< all-gathers of parameters
  std::uint64_t reduce_scatter = 0;                       ///< reduce-scatters of gradients
  std::uint64_t all_reduce = 0;                           ///< all-reduces of gradients or parameter deltas
  bool operator==(const TrafficVolume&) const = default;  ///< compares all members
};

/// The properties of a step on which its cost depends.
struct StepShape {
  int prefetch = 1;                    ///< units prefetched
  int microbatches = 1;                ///< the strategy says when each axis reduces their gradients
  bool reshard_after_backward = true;  ///< see EngineOptions::reshard_after_backward
};

/// The collectives of one rank in one step.
struct CommunicationFormula {
  TrafficVolume calls;  ///< calls of the communicators
  TrafficVolume bytes;  ///< sent by one rank
};

/// `units` in forward order; `collectives` contains the plug-ins that the strategy names.
TESSERA_API CommunicationFormula communication_formula(
    const Strategy& strategy, const MeshShape& mesh, std::span<const UnitSize> units, Precision precision = {},
    StepShape shape = {}, const CollectiveRegistry& collectives = CollectiveRegistry::built_in());

/// Bytes of a rank's model state, by memory category.
struct ModelStateBytes {
  std::uint64_t parameter = 0;  ///< parameters at rest
  std::uint64_t gradient = 0;   ///< kept gradients
  std::uint64_t optimizer = 0;  ///< optimizer state, master weights, and the anchor and outer momentum of a sync period
  std::uint64_t offloaded = 0;  ///< bytes in host memory
};

/// The model state of `padded` trained elements, from the end of backward to the end of the optimizer step; `slots` is
/// the optimizer's number of f32 values per parameter, to which master weights are added where they exist.
TESSERA_API ModelStateBytes model_state_formula(const Strategy& strategy, const MeshShape& mesh, std::int64_t padded,
                                                int slots, Precision precision = {});

/// The same for units with their frozen parameters.
TESSERA_API ModelStateBytes model_state_formula(const Strategy& strategy, const MeshShape& mesh,
                                                std::span<const UnitSize> units, int slots, Precision precision = {});

/// The same with CPU offload: sharded state is in host memory.
TESSERA_API ModelStateBytes with_offload(const Strategy& strategy, ModelStateBytes on_device);

/// Bytes between a rank's device and the host per step (every step after the first) with CPU offload.
struct OffloadBytes {
  std::uint64_t to_device = 0;                           ///< bytes of Copier::upload()
  std::uint64_t to_host = 0;                             ///< bytes of Copier::download()
  bool operator==(const OffloadBytes&) const = default;  ///< compares all members
};

/// `units` and `slots` as above. The padding at the end of a flat parameter is counted, although no optimizer updates
/// it.
TESSERA_API OffloadBytes offload_formula(const Strategy& strategy, const MeshShape& mesh,
                                         std::span<const UnitSize> units, int slots, Precision precision = {});

/// The result of peak_formula(): bounds of two memory categories.
struct PeakBounds {
  std::uint64_t unsharded_parameter = 0;  ///< leases of unsharded parameters
  std::uint64_t unsharded_gradient = 0;   ///< leases of full gradients
};

/// Upper bounds in bytes, without CPU offload: CPU offload also unshards on a mesh of one rank, and where gradients are
/// reduced in two stages it holds those of one unit longer. Where microbatches wait for the last one, all gradients are
/// held. Where gradients are cast for their reduction, both forms of a unit exist at once.
TESSERA_API PeakBounds peak_formula(const Strategy& strategy, const MeshShape& mesh, std::span<const UnitSize> units,
                                    StepShape shape, Precision precision = {});

}  // namespace tessera::fsdp
