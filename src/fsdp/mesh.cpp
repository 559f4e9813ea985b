#include "tessera/fsdp/mesh.h"

#include "tessera/base/parse.h"

namespace tessera::fsdp {

int MeshShape::size() const {
  int product = 1;
  for (const MeshAxis& axis : axes) product *= axis.size;
  return product;
}

int MeshShape::size_of(const Axis& name) const {
  for (const MeshAxis& axis : axes)
    if (axis.name == name) return axis.size;
  return 1;
}

MeshShape MeshShape::grid(int replicas, int shards) { return {{{kReplicateAxis, replicas}, {kShardAxis, shards}}}; }

MeshShape parse_mesh(std::string_view text) {
  const std::size_t cross = text.find('x');
  if (cross == std::string_view::npos)
    throw InvalidUsage("mesh '" + std::string(text) + "': write replicas x shards, such as 2x4");
  constexpr int kMax = 1 << 20;
  const auto replicas = parse_integer(text.substr(0, cross), "mesh replicas", 1, kMax);
  const auto shards = parse_integer(text.substr(cross + 1), "mesh shards", 1, kMax);
  if (replicas * shards > kMax)
    throw InvalidUsage("mesh " + std::string(text) + " has " + std::to_string(replicas * shards) +
                       " positions; at most " + std::to_string(kMax) + " are supported");
  return MeshShape::grid(static_cast<int>(replicas), static_cast<int>(shards));
}

MeshShape default_mesh(const Strategy& strategy, int ranks, int ranks_per_host) {
  if (!strategy.two_axes || ranks == 1) return MeshShape::grid(1, ranks);
  if (!periodic_axis(strategy).empty()) return MeshShape::grid(ranks, 1);
  if (ranks_per_host >= 1 && ranks_per_host < ranks) {
    if (ranks % ranks_per_host == 0) return MeshShape::grid(ranks / ranks_per_host, ranks_per_host);
    throw InvalidUsage(strategy.name + ": " + std::to_string(ranks) + " ranks are not a multiple of the " +
                       std::to_string(ranks_per_host) + " on each host; give a mesh RxS");
  }
  if (ranks % 2 == 0) return MeshShape::grid(2, ranks / 2);
  throw InvalidUsage(strategy.name + ": " + std::to_string(ranks) +
                     " ranks don't divide into 2 replicas; use an even number or give a mesh RxS");
}

Mesh::Mesh(comm::Communicator& world, MeshShape shape) : world_(world), shape_(std::move(shape)) {
  if (shape_.size() != world.size()) {
    std::string text;
    for (const MeshAxis& axis : shape_.axes) text += (text.empty() ? "" : "x") + std::to_string(axis.size);
    throw InvalidUsage("mesh " + text + " has " + std::to_string(shape_.size()) + " positions for " +
                       std::to_string(world.size()) + " ranks; replicas x shards must equal the number of ranks");
  }
  for (const MeshAxis& axis : shape_.axes) {
    if (axis.size == 1) continue;
    // Ranks that differ only in this axis share a color: the rank with this coordinate set to zero.
    int stride = 1;
    for (auto it = shape_.axes.rbegin(); it != shape_.axes.rend() && it->name != axis.name; ++it) stride *= it->size;
    const int mine = coordinate(axis.name);
    const int color = rank() - mine * stride;
    AxisCommunicators channels;
    channels.control = world.split(color, mine);
    // Duplicates, which a backend may make at little cost.
    channels.gather = channels.control->split(0, mine, {.for_gathers = true});
    channels.reduce = channels.control->split(0, mine);
    channels_.emplace_back(axis.name, std::move(channels));
  }
}

int communicator_count(const MeshShape& shape) {
  int axes = 0;
  for (const MeshAxis& axis : shape.axes) axes += axis.size > 1 ? 1 : 0;
  return 2 + 3 * axes;
}

MeshShape in_groups(const MeshShape& mesh, int shards) {
  MeshShape grouped;
  for (const MeshAxis& axis : mesh.axes) {
    if (axis.name == kShardAxis) grouped.axes.push_back({kGroupAxis, axis.size / shards});
    grouped.axes.push_back({axis.name, axis.name == kShardAxis ? shards : axis.size});
  }
  return grouped;
}

int Mesh::coordinate(const Axis& name) const {
  int rest = rank();
  for (auto it = shape_.axes.rbegin(); it != shape_.axes.rend(); ++it) {
    if (it->name == name) return rest % it->size;
    rest /= it->size;
  }
  return 0;
}

AxisCommunicators& Mesh::channels(const Axis& name) {
  for (auto& [axis, channels] : channels_)
    if (axis == name) return channels;
  throw InvalidUsage("mesh: axis " + name + " has length 1 and no communicator");
}

}  // namespace tessera::fsdp
