#include "tessera/comm/communicator.h"

#include "tessera/comm/core/argument_checker.h"
#include "tessera/comm/core/op_traits.h"

namespace tessera::comm {

Communicator::Communicator(int rank, int size, CommunicatorOptions options)
    : rank_(rank), size_(size), options_(std::move(options)) {}
Communicator::~Communicator() = default;

void Communicator::do_after(Stream& stream) {
  if (!stream.immediate()) stream.record().wait();
}

void Communicator::require_own_process(std::string_view call) const {
  if (is_parents())
    throw InvalidUsage(
        std::string(call) +
        ": this process is a fork of the rank, and only the rank itself can use its communicators; create "
        "another world here, or start the program anew (exec)");
}

void Communicator::prepare(OpDesc& call, const OpOptions& options, bool by_counts) const {
  require_own_process(name_of(call.kind));
  const bool other_root = has_root(call.kind) && rank_ != call.root;
  if (call.kind == OpKind::recv || (other_root && reads_root(call.kind)))
    call.in = ConstView{nullptr, 0, call.out.dtype, call.out.device};
  if (call.kind == OpKind::send || (other_root && writes_root(call.kind)))
    call.out = View{nullptr, 0, call.in.dtype, call.in.device};
  ArgumentChecker(call, capabilities(), rank_, size_).check(by_counts);
  call.timeout = options.timeout ? checked_timeout(name_of(call.kind), *options.timeout) : options_.timeout;
  call.label = options.label;
  call.source = options.source;
  if (call.op.kind == ReduceOp::Kind::avg && call.op.scalar == 0) call.op.scalar = size_;
}

Work Communicator::start(OpDesc call, const OpOptions& options, bool by_counts) {
  prepare(call, options, by_counts);
  if (options.after != nullptr) do_after(*options.after);
  ++calls_[static_cast<std::size_t>(call.kind)];
  last_ = call.kind;
  return do_start(call);
}

Work Communicator::forward_to(Communicator& inner, const OpDesc& call) {
  forwarded_to_.store(&inner, std::memory_order_relaxed);
  ++inner.calls_[static_cast<std::size_t>(call.kind)];
  inner.last_ = call.kind;
  return inner.do_start(call);
}

Work Communicator::forward_to(Communicator& inner, std::span<const OpDesc> parts) {
  forwarded_to_.store(&inner, std::memory_order_relaxed);
  for (const OpDesc& call : parts) ++inner.calls_[static_cast<std::size_t>(call.kind)];
  if (!parts.empty()) inner.last_ = parts.back().kind;
  return inner.do_batch(parts);
}

Work Communicator::all_reduce(ConstView in, View out, ReduceOp op, OpOptions options) {
  return start({.kind = OpKind::all_reduce, .in = in, .out = out, .op = op}, options);
}

Work Communicator::all_gather(ConstView in, View out, OpOptions options) {
  return start({.kind = OpKind::all_gather, .in = in, .out = out}, options);
}

Work Communicator::reduce_scatter(ConstView in, View out, ReduceOp op, OpOptions options) {
  return start({.kind = OpKind::reduce_scatter, .in = in, .out = out, .op = op}, options);
}

Work Communicator::broadcast(ConstView in, View out, int root, OpOptions options) {
  return start({.kind = OpKind::broadcast, .in = in, .out = out, .root = root}, options);
}

Work Communicator::reduce(ConstView in, View out, ReduceOp op, int root, OpOptions options) {
  return start({.kind = OpKind::reduce, .in = in, .out = out, .op = op, .root = root}, options);
}

Work Communicator::gather(ConstView in, View out, int root, OpOptions options) {
  return start({.kind = OpKind::gather, .in = in, .out = out, .root = root}, options);
}

Work Communicator::scatter(ConstView in, View out, int root, OpOptions options) {
  return start({.kind = OpKind::scatter, .in = in, .out = out, .root = root}, options);
}

Work Communicator::all_to_all(ConstView in, View out, OpOptions options) {
  return start({.kind = OpKind::all_to_all, .in = in, .out = out}, options);
}

Work Communicator::send(ConstView data, int peer, OpOptions options) {
  return start({.kind = OpKind::send, .in = data, .root = peer, .tag = options.tag}, options);
}

Work Communicator::recv(View data, int peer, OpOptions options) {
  return start({.kind = OpKind::recv, .out = data, .root = peer, .tag = options.tag}, options);
}

Work Communicator::batch(std::span<const P2POp> parts, OpOptions options) {
  std::vector<OpDesc> calls;
  calls.reserve(parts.size());
  for (const P2POp& part : parts) {
    calls.push_back({.kind = part.sends ? OpKind::send : OpKind::recv,
                     .in = part.in,
                     .out = part.out,
                     .root = part.peer,
                     .tag = part.tag});
    prepare(calls.back(), options, false);
  }
  if (options.after != nullptr) do_after(*options.after);
  for (const OpDesc& call : calls) ++calls_[static_cast<std::size_t>(call.kind)];
  if (!calls.empty()) last_ = calls.back().kind;
  return do_batch(calls);
}

// The operations whose parts have different lengths.
Work Communicator::all_gather_v(ConstView in, View out, std::span<const std::size_t> counts, OpOptions options) {
  return start({.kind = OpKind::all_gather, .in = in, .out = out, .out_counts = counts}, options, true);
}

Work Communicator::reduce_scatter_v(ConstView in, View out, std::span<const std::size_t> counts, ReduceOp op,
                                    OpOptions options) {
  return start({.kind = OpKind::reduce_scatter, .in = in, .out = out, .op = op, .in_counts = counts}, options, true);
}

Work Communicator::gather_v(ConstView in, View out, std::span<const std::size_t> counts, int root, OpOptions options) {
  return start({.kind = OpKind::gather, .in = in, .out = out, .root = root, .out_counts = counts}, options, true);
}

Work Communicator::scatter_v(ConstView in, View out, std::span<const std::size_t> counts, int root, OpOptions options) {
  return start({.kind = OpKind::scatter, .in = in, .out = out, .root = root, .in_counts = counts}, options, true);
}

Work Communicator::all_to_all_v(ConstView in, std::span<const std::size_t> in_counts, View out,
                                std::span<const std::size_t> out_counts, OpOptions options) {
  return start({.kind = OpKind::all_to_all, .in = in, .out = out, .in_counts = in_counts, .out_counts = out_counts},
               options, true);
}

Work Communicator::barrier(OpOptions options) { return start({.kind = OpKind::barrier}, options); }

std::unique_ptr<Communicator> Communicator::split(int color, int key, SplitOptions options) {
  require_own_process("split");
  return do_split(color, key, options);
}

std::unique_ptr<Communicator> Communicator::create_group(std::span<const int> members, OpOptions options) {
  require_own_process("create_group");
  check_group(members, options, rank_, size_);
  options.timeout = options.timeout ? checked_timeout("create_group", *options.timeout) : options_.timeout;
  if (options.label.empty()) options.label = "create_group";
  return do_create_group(members, options);
}

std::unique_ptr<Communicator> Communicator::do_create_group(std::span<const int>, const OpOptions&) {
  throw Unsupported("create_group: backend " + capabilities().backend + " does not support it; use split");
}

Buffer Communicator::allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  check_bytes("allocate", bytes);
  return do_allocate(bytes, kind, use);
}

Buffer Communicator::allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  require_own_process("allocate_symmetric");
  check_bytes("allocate_symmetric", bytes);
  return do_allocate_symmetric(bytes, kind, use);
}

Buffer Communicator::do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  return do_allocate(bytes, kind, use);
}

std::string_view Communicator::last_algorithm() const noexcept {
  if (!last_) return {};
  if (const std::string_view said = do_last_algorithm(); !said.empty()) return said;
  if (const Communicator* const inner = forwarded_to_.load(std::memory_order_relaxed)) return inner->last_algorithm();
  const std::string_view kind = name_of(*last_);
  for (const std::string_view known : capabilities().algorithms)
    if (known.size() > kind.size() && known.starts_with(kind) && known[kind.size()] == '=')
      return known.substr(kind.size() + 1);
  return {};
}

std::string_view Communicator::do_last_algorithm() const noexcept { return {}; }

void Communicator::abort(std::string reason) noexcept {
  if (!is_parents()) do_abort(reason);
}

TrafficStats Communicator::traffic() const {
  TrafficStats snapshot;
  snapshot.bytes_to_peer.assign(static_cast<std::size_t>(size_), 0);
  for (std::size_t i = 0; i < kOpKinds; ++i) snapshot.by_kind[i].calls = calls_[i];
  do_traffic(snapshot);
  return snapshot;
}

}  // namespace tessera::comm
