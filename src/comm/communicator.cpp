#include "tessera/comm/communicator.h"

#include <numeric>

#include "tessera/comm/core/argument_checker.h"

namespace tessera::comm {
namespace {

std::size_t offset_of(std::span<const std::size_t> counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
}

}  // namespace

Communicator::Communicator(int rank, int size, CommunicatorOptions options)
    : rank_(rank), size_(size), options_(std::move(options)) {}
Communicator::~Communicator() = default;

void Communicator::do_after(Stream& stream) {
  if (!stream.immediate()) stream.record().wait();
}

Work Communicator::start(OpDesc& call, const OpOptions& options) {
  call.timeout = options.timeout.value_or(options_.timeout);
  call.label = options.label;
  if (call.op.kind == ReduceOp::Kind::avg && call.op.scalar == 0) call.op.scalar = size_;
  if (options.after != nullptr) do_after(*options.after);
  ++calls_[static_cast<std::size_t>(call.kind)];
  last_ = call.kind;
  return do_start(call);
}

Work Communicator::forward_to(Communicator& inner, const OpDesc& call) {
  ++inner.calls_[static_cast<std::size_t>(call.kind)];
  inner.last_ = call.kind;
  return inner.do_start(call);
}

Work Communicator::forward_to(Communicator& inner, std::span<const OpDesc> parts) {
  for (const OpDesc& call : parts) ++inner.calls_[static_cast<std::size_t>(call.kind)];
  if (!parts.empty()) inner.last_ = parts.back().kind;
  return inner.do_batch(parts);
}

Work Communicator::all_reduce(ConstView in, View out, ReduceOp op, OpOptions options) {
  OpDesc call{.kind = OpKind::all_reduce, .in = in, .out = out, .op = op};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.reduce_op();
  check.views();
  check.out_count(in.count, "as many as in");
  check.overlap_same_start();
  return start(call, options);
}

Work Communicator::all_gather(ConstView in, View out, OpOptions options) {
  OpDesc call{.kind = OpKind::all_gather, .in = in, .out = out};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.views();
  check.out_parts(in.count);
  check.overlap_in_is_part_of_out(static_cast<std::size_t>(rank_) * in.count);
  return start(call, options);
}

Work Communicator::reduce_scatter(ConstView in, View out, ReduceOp op, OpOptions options) {
  OpDesc call{.kind = OpKind::reduce_scatter, .in = in, .out = out, .op = op};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.reduce_op();
  check.views();
  check.in_parts(out.count);
  check.overlap_out_is_part_of_in(static_cast<std::size_t>(rank_) * out.count);
  return start(call, options);
}

Work Communicator::broadcast(ConstView in, View out, int root, OpOptions options) {
  OpDesc call{.kind = OpKind::broadcast, .in = in, .out = out, .root = root};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.root();
  if (rank_ != root) call.in = ConstView{nullptr, 0, out.dtype, out.device};
  check.views();
  if (rank_ == root) {
    check.out_count(in.count, "as many as in");
    check.overlap_same_start();
  }
  return start(call, options);
}

Work Communicator::reduce(ConstView in, View out, ReduceOp op, int root, OpOptions options) {
  OpDesc call{.kind = OpKind::reduce, .in = in, .out = out, .op = op, .root = root};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.root();
  check.reduce_op();
  if (rank_ != root) call.out = View{nullptr, 0, in.dtype, in.device};
  check.views();
  if (rank_ == root) {
    check.out_count(in.count, "as many as in");
    check.overlap_same_start();
  }
  return start(call, options);
}

Work Communicator::gather(ConstView in, View out, int root, OpOptions options) {
  OpDesc call{.kind = OpKind::gather, .in = in, .out = out, .root = root};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.root();
  if (rank_ != root) call.out = View{nullptr, 0, in.dtype, in.device};
  check.views();
  if (rank_ == root) {
    check.out_parts(in.count);
    check.overlap_in_is_part_of_out(static_cast<std::size_t>(rank_) * in.count);
  }
  return start(call, options);
}

Work Communicator::scatter(ConstView in, View out, int root, OpOptions options) {
  OpDesc call{.kind = OpKind::scatter, .in = in, .out = out, .root = root};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.root();
  if (rank_ != root) call.in = ConstView{nullptr, 0, out.dtype, out.device};
  check.views();
  if (rank_ == root) {
    check.in_parts(out.count);
    check.overlap_out_is_part_of_in(static_cast<std::size_t>(rank_) * out.count);
  }
  return start(call, options);
}

Work Communicator::all_to_all(ConstView in, View out, OpOptions options) {
  OpDesc call{.kind = OpKind::all_to_all, .in = in, .out = out};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.views();
  check.out_count(in.count, "as many as in");
  check.multiple_of_size(in.count);
  check.overlap_never();
  return start(call, options);
}

Work Communicator::send(ConstView data, int peer, OpOptions options) {
  OpDesc call{.kind = OpKind::send, .in = data, .out = View{nullptr, 0, data.dtype, data.device}, .root = peer};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.peer();
  check.views();
  return start(call, options);
}

Work Communicator::recv(View data, int peer, OpOptions options) {
  OpDesc call{.kind = OpKind::recv, .in = ConstView{nullptr, 0, data.dtype, data.device}, .out = data, .root = peer};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.peer();
  check.views();
  return start(call, options);
}

Work Communicator::batch(std::span<const P2POp> parts, OpOptions options) {
  std::vector<OpDesc> calls;
  calls.reserve(parts.size());
  for (const P2POp& part : parts) {
    OpDesc call{.kind = part.sends ? OpKind::send : OpKind::recv, .in = part.in, .out = part.out, .root = part.peer};
    if (part.sends) {
      call.out = View{nullptr, 0, part.in.dtype, part.in.device};
    } else {
      call.in = ConstView{nullptr, 0, part.out.dtype, part.out.device};
    }
    const ArgumentChecker check(call, capabilities(), rank_, size_);
    check.peer();
    check.views();
    call.timeout = options.timeout.value_or(options_.timeout);
    call.label = options.label;
    calls.push_back(call);
  }
  if (options.after != nullptr) do_after(*options.after);
  for (const OpDesc& call : calls) ++calls_[static_cast<std::size_t>(call.kind)];
  if (!calls.empty()) last_ = calls.back().kind;
  return do_batch(calls);
}

// The operations whose parts have different lengths.
Work Communicator::all_gather_v(ConstView in, View out, std::span<const std::size_t> counts, OpOptions options) {
  OpDesc call{.kind = OpKind::all_gather, .in = in, .out = out, .out_counts = counts};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.views();
  check.counts(counts, out.count, "out");
  check.own_part(counts, in.count, "in");
  check.overlap_in_is_part_of_out(offset_of(counts, rank_));
  return start(call, options);
}

Work Communicator::reduce_scatter_v(ConstView in, View out, std::span<const std::size_t> counts, ReduceOp op,
                                    OpOptions options) {
  OpDesc call{.kind = OpKind::reduce_scatter, .in = in, .out = out, .op = op, .in_counts = counts};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.reduce_op();
  check.views();
  check.counts(counts, in.count, "in");
  check.own_part(counts, out.count, "out");
  check.overlap_out_is_part_of_in(offset_of(counts, rank_));
  return start(call, options);
}

Work Communicator::gather_v(ConstView in, View out, std::span<const std::size_t> counts, int root, OpOptions options) {
  OpDesc call{.kind = OpKind::gather, .in = in, .out = out, .root = root, .out_counts = counts};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.root();
  if (rank_ != root) call.out = View{nullptr, 0, in.dtype, in.device};
  check.views();
  check.counts(counts, rank_ == root ? out.count : offset_of(counts, static_cast<int>(counts.size())), "out");
  check.own_part(counts, in.count, "in");
  if (rank_ == root) check.overlap_in_is_part_of_out(offset_of(counts, rank_));
  return start(call, options);
}

Work Communicator::scatter_v(ConstView in, View out, std::span<const std::size_t> counts, int root, OpOptions options) {
  OpDesc call{.kind = OpKind::scatter, .in = in, .out = out, .root = root, .in_counts = counts};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.root();
  if (rank_ != root) call.in = ConstView{nullptr, 0, out.dtype, out.device};
  check.views();
  check.counts(counts, rank_ == root ? in.count : offset_of(counts, static_cast<int>(counts.size())), "in");
  check.own_part(counts, out.count, "out");
  if (rank_ == root) check.overlap_out_is_part_of_in(offset_of(counts, rank_));
  return start(call, options);
}

Work Communicator::all_to_all_v(ConstView in, std::span<const std::size_t> in_counts, View out,
                                std::span<const std::size_t> out_counts, OpOptions options) {
  OpDesc call{.kind = OpKind::all_to_all, .in = in, .out = out, .in_counts = in_counts, .out_counts = out_counts};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.views();
  check.counts(in_counts, in.count, "in");
  check.counts(out_counts, out.count, "out");
  const auto own = static_cast<std::size_t>(rank_);
  if (in_counts[own] != out_counts[own])
    throw InvalidUsage("all_to_all: in_counts[" + std::to_string(own) + "] is " + std::to_string(in_counts[own]) +
                       " but out_counts of the same rank is " + std::to_string(out_counts[own]));
  check.overlap_never();
  return start(call, options);
}

Work Communicator::barrier(OpOptions options) {
  OpDesc call{.kind = OpKind::barrier};
  return start(call, options);
}

std::unique_ptr<Communicator> Communicator::split(int color, int key) { return do_split(color, key); }

Buffer Communicator::allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  return do_allocate(bytes, kind, use);
}

std::string_view Communicator::last_algorithm() const noexcept {
  if (!last_) return {};
  if (const std::string_view said = do_last_algorithm(); !said.empty()) return said;
  const std::string_view kind = name_of(*last_);
  for (const std::string_view known : capabilities().algorithms)
    if (known.size() > kind.size() && known.starts_with(kind) && known[kind.size()] == '=')
      return known.substr(kind.size() + 1);
  return {};
}

std::string_view Communicator::do_last_algorithm() const noexcept { return {}; }

void Communicator::abort(std::string reason) noexcept { do_abort(reason); }

TrafficStats Communicator::traffic() const {
  TrafficStats snapshot;
  snapshot.bytes_to_peer.assign(static_cast<std::size_t>(size_), 0);
  for (std::size_t i = 0; i < kOpKinds; ++i) snapshot.by_kind[i].calls = calls_[i];
  do_traffic(snapshot);
  return snapshot;
}

}  // namespace tessera::comm
