// The mesh: ranks as an N-dimensional grid with named axes, and the communicators along each axis.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/fsdp/strategy.h"

namespace tessera::fsdp {

/// One dimension of a mesh.
struct MeshAxis {
  Axis name;     ///< unique in the mesh
  int size = 1;  ///< number of ranks along it
};

/// Outermost axis first. rank = r * S + s for replicas x shards.
struct TESSERA_API MeshShape {
  std::vector<MeshAxis> axes;           ///< axes of length 1 may be listed
  int size() const;                     ///< number of ranks: the product of the axes
  int size_of(const Axis& axis) const;  ///< 1 for an axis that is not in the mesh
  /// A mesh of replicas x shards.
  static MeshShape grid(int replicas, int shards);
};

/// Parses "RxS", the format of --mesh. Throws InvalidUsage.
TESSERA_API MeshShape parse_mesh(std::string_view text);

/// The default of --mesh. One-axis strategies: 1 x ranks. Otherwise 2 x ranks/2 on one host, hosts x ranks per host on
/// several hosts, and ranks x 1 for replicas with a sync period. One rank is 1 x 1. Throws InvalidUsage if the ranks
/// cannot be divided that way.
TESSERA_API MeshShape default_mesh(const Strategy& strategy, int ranks, int ranks_per_host);

/// The mesh with its shard axis divided into groups of `shards` neighboring ranks: replicate x group x shard. `shards`
/// must divide the shard axis.
TESSERA_API MeshShape in_groups(const MeshShape& mesh, int shards);

/// The communicators of one axis. All-gathers and reductions have a communicator each, so that neither queues behind
/// the other; each has one issue order, the same on every rank. `control` is for norms and votes.
struct AxisCommunicators {
  std::unique_ptr<comm::Communicator> gather;   ///< all-gathers of parameters
  std::unique_ptr<comm::Communicator> reduce;   ///< reductions of gradients
  std::unique_ptr<comm::Communicator> control;  ///< norms and votes
};

/// Number of communicators of a rank that trains over `shape`: the world, those of every axis, and the engine's for its
/// check of the order of calls. A model with buffers (Module::buffers()) has one more.
TESSERA_API int communicator_count(const MeshShape& shape);

/// A mesh over the ranks of `world`, which outlives it. The constructor is collective. Axes of length 1 have no
/// communicators, because nothing is ever called on them.
class TESSERA_API Mesh {
 public:
  /// Splits `world`. Throws InvalidUsage unless its size is the shape's.
  Mesh(comm::Communicator& world, MeshShape shape);

  const MeshShape& shape() const { return shape_; }     ///< shape given to the constructor
  comm::Communicator& world() const { return world_; }  ///< the communicator given to the constructor
  int rank() const { return world_.rank(); }            ///< rank in `world`
  int size() const { return world_.size(); }            ///< number of ranks
  /// This rank's coordinate on the axis.
  int coordinate(const Axis& axis) const;
  /// Throws InvalidUsage for an axis of length 1.
  AxisCommunicators& channels(const Axis& axis);
  /// The communicators of the innermost axis longer than 1, whose ranks are neighbors; null if there is one rank.
  const AxisCommunicators* innermost() const { return channels_.empty() ? nullptr : &channels_.back().second; }
  /// The communicators of every axis longer than 1, outermost first.
  const std::vector<std::pair<Axis, AxisCommunicators>>& all_channels() const { return channels_; }

 private:
  comm::Communicator& world_;
  const MeshShape shape_;
  std::vector<std::pair<Axis, AxisCommunicators>> channels_;
};

}  // namespace tessera::fsdp
