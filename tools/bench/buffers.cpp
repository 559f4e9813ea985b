#include "tools/bench/buffers.h"

#include <array>

#include "tools/bench/cold.h"

namespace tessera::tools {
namespace {

using Id = BenchOp::Id;

}  // namespace

comm::Work BenchCall::start(comm::Communicator& world) const {
  switch (id) {
    case Id::all_reduce:
      return world.all_reduce(in, out, op);
    case Id::all_gather:
      return world.all_gather(in, out);
    case Id::reduce_scatter:
      return world.reduce_scatter(in, out, op);
    case Id::broadcast:
      return world.broadcast(in, out, root);
    case Id::reduce:
      return world.reduce(in, out, op, root);
    case Id::gather:
      return world.gather(in, out, root);
    case Id::scatter:
      return world.scatter(in, out, root);
    case Id::all_to_all:
      return world.all_to_all(in, out);
    case Id::send_recv: {
      const int n = world.size();
      const std::array parts = {comm::P2POp::send(in, (world.rank() + 1) % n),
                                comm::P2POp::recv(out, (world.rank() + n - 1) % n)};
      return world.batch(parts);
    }
    case Id::barrier:
      break;
  }
  return world.barrier();
}

void BenchCall::evict() const {
  tools::evict({static_cast<const std::byte*>(in.data), in.bytes()});
  tools::evict({static_cast<const std::byte*>(out.data), out.bytes()});
}

BenchBuffers::BenchBuffers(BenchMemory& memory, int rank, const BenchData& data, const BenchShape& largest)
    : memory_(memory),
      data_(data),
      rank_(rank),
      in_(memory.allocate(largest.in_count * base::size_of(data.dtype))),
      out_(memory.allocate(largest.out_count * base::size_of(data.dtype))) {}

BenchBuffers::Pointers BenchBuffers::pointers(const BenchShape& shape, bool in_place, Pointers begin) const {
  const auto [in, out] = begin;
  if (!in_place) return {in, out};
  const std::size_t part = static_cast<std::size_t>(rank_) * shape.count * base::size_of(data_.dtype);
  const bool root = rank_ == data_.root;
  switch (data_.op->id) {
    case Id::all_gather:
      return {out + part, out};
    case Id::gather:
      return {root ? out + part : in, out};
    case Id::reduce_scatter:
      return {in, in + part};
    case Id::scatter:
      return {in, root ? in + part : out};
    case Id::reduce:
      return {root ? out : in, out};
    default:
      return {out, out};
  }
}

void BenchBuffers::fill(const BenchShape& shape, bool in_place) {
  const Pointers at = pointers(shape, in_place, {in_.host(), out_.host()});
  const std::size_t element = base::size_of(data_.dtype);
  poison(in_.host(), shape.in_count * element);
  poison(out_.host(), shape.out_count * element);
  const bool rooted_input = data_.op->id == Id::broadcast || data_.op->id == Id::scatter;
  if (!rooted_input || rank_ == data_.root) fill_bench_input(data_, rank_, at.in, shape.in_count);
  memory_.put(in_, shape.in_count * element);
  memory_.put(out_, shape.out_count * element);
}

comm::View BenchBuffers::output(const BenchShape& shape, bool in_place) {
  const std::size_t element = base::size_of(data_.dtype);
  memory_.get(in_, shape.in_count * element);
  memory_.get(out_, shape.out_count * element);
  return {pointers(shape, in_place, {in_.host(), out_.host()}).out, shape.out_count, data_.dtype, {}};
}

BenchCall BenchBuffers::call(const BenchShape& shape, bool in_place) const {
  const Pointers at = pointers(shape, in_place, {in_.memory.bytes_at(0), out_.memory.bytes_at(0)});
  return {data_.op->id,
          {at.in, shape.in_count, data_.dtype, memory_.device()},
          {at.out, shape.out_count, data_.dtype, memory_.device()},
          bench_reduce_op(data_.redop, rank_),
          data_.root};
}

}  // namespace tessera::tools
