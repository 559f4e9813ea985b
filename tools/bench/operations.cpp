#include "tools/bench/operations.h"

#include <algorithm>
#include <array>

#include "tessera/base/error.h"

namespace tessera::tools {
namespace {

using comm::OpKind;
using Id = BenchOp::Id;

constexpr std::array<BenchOp, 10> kOps = {{
    {.id = Id::all_reduce, .name = "all_reduce", .kind = OpKind::all_reduce, .reduces = true, .in_place = true},
    {.id = Id::all_gather, .name = "all_gather", .kind = OpKind::all_gather, .in_place = true},
    {.id = Id::reduce_scatter,
     .name = "reduce_scatter",
     .kind = OpKind::reduce_scatter,
     .reduces = true,
     .in_place = true},
    {.id = Id::broadcast, .name = "broadcast", .kind = OpKind::broadcast, .rooted = true, .in_place = true},
    {.id = Id::reduce, .name = "reduce", .kind = OpKind::reduce, .reduces = true, .rooted = true, .in_place = true},
    {.id = Id::gather, .name = "gather", .kind = OpKind::gather, .rooted = true, .in_place = true},
    {.id = Id::scatter, .name = "scatter", .kind = OpKind::scatter, .rooted = true, .in_place = true},
    {.id = Id::all_to_all, .name = "all_to_all", .kind = OpKind::all_to_all},
    {.id = Id::send_recv, .name = "send_recv", .kind = OpKind::send},
    {.id = Id::barrier, .name = "barrier", .kind = OpKind::barrier},
}};

}  // namespace

std::span<const BenchOp> bench_ops() { return kOps; }

const BenchOp& bench_op(std::string_view name) {
  std::string known;
  for (const BenchOp& op : kOps) {
    if (op.name == name) return op;
    known += " " + std::string(op.name);
  }
  throw base::InvalidUsage("unknown operation '" + std::string(name) + "'; known:" + known);
}

BenchShape bench_shape(const BenchOp& op, std::uint64_t bytes, base::DType dtype, int ranks) {
  const std::size_t element = base::size_of(dtype);
  const auto n = static_cast<std::size_t>(ranks);
  const std::size_t all = static_cast<std::size_t>(bytes) / element;
  const std::size_t part = all / n;
  switch (op.id) {
    case Id::all_gather:
    case Id::gather:
      return {part * n * element, part, part, part * n};
    case Id::reduce_scatter:
    case Id::scatter:
      return {part * n * element, part, part * n, part};
    case Id::all_to_all:
      return {part * n * element, part, part * n, part * n};
    case Id::barrier:
      return {};
    default:
      return {all * element, all, all, all};
  }
}

double bus_factor(const BenchOp& op, int ranks) {
  const double others = static_cast<double>(ranks - 1) / ranks;
  switch (op.id) {
    case Id::all_reduce:
      return 2 * others;
    case Id::all_gather:
    case Id::reduce_scatter:
    case Id::gather:
    case Id::scatter:
    case Id::all_to_all:
      return others;
    default:
      return 1;
  }
}

MemoryTraffic bench_traffic(const BenchOp& op, const BenchShape& shape, const BenchPlace& place, bool in_place) {
  const bool root = place.rank == place.root;
  const auto n = static_cast<std::size_t>(place.ranks);
  if (place.ranks == 1) return {0, 0, in_place ? 0 : shape.bytes};
  const std::size_t part = shape.bytes / n;
  switch (op.id) {
    case Id::all_reduce: {  // slices differ by at most one element, the longer ones first
      if (shape.count == 0) return {};
      const std::size_t longer = static_cast<std::size_t>(place.rank) < shape.count % n ? 1 : 0;
      const std::size_t slice = (shape.count / n + longer) * (shape.bytes / shape.count);
      return {place.ranks, slice, shape.bytes - slice};
    }
    case Id::reduce_scatter:
      return {place.ranks, part, 0};
    case Id::reduce:
      return root ? MemoryTraffic{place.ranks, shape.bytes, 0} : MemoryTraffic{};
    case Id::all_gather:
      return {0, 0, in_place ? shape.bytes - part : shape.bytes};
    case Id::gather:
      return {0, 0, !root ? 0 : (in_place ? shape.bytes - part : shape.bytes)};
    case Id::broadcast:
      return {0, 0, root && in_place ? 0 : shape.bytes};
    case Id::scatter:
      return {0, 0, root && in_place ? 0 : part};
    default:
      return {0, 0, shape.bytes};
  }
}

}  // namespace tessera::tools
