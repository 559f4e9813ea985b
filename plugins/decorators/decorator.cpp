#include "plugins/decorators/decorator.h"

#include <algorithm>
#include <vector>

namespace tessera::decorators {
namespace {

Work issue(Communicator& comm, const OpDesc& c, const OpOptions& options) {
  const bool equal_parts = c.in_counts.empty() && c.out_counts.empty();
  switch (c.kind) {
    case OpKind::all_reduce:
      return comm.all_reduce(c.in, c.out, c.op, options);
    case OpKind::all_gather:
      return equal_parts ? comm.all_gather(c.in, c.out, options)
                         : comm.all_gather_v(c.in, c.out, c.out_counts, options);
    case OpKind::reduce_scatter:
      return equal_parts ? comm.reduce_scatter(c.in, c.out, c.op, options)
                         : comm.reduce_scatter_v(c.in, c.out, c.in_counts, c.op, options);
    case OpKind::broadcast:
      return comm.broadcast(c.in, c.out, c.root, options);
    case OpKind::reduce:
      return comm.reduce(c.in, c.out, c.op, c.root, options);
    case OpKind::gather:
      return equal_parts ? comm.gather(c.in, c.out, c.root, options)
                         : comm.gather_v(c.in, c.out, c.out_counts, c.root, options);
    case OpKind::scatter:
      return equal_parts ? comm.scatter(c.in, c.out, c.root, options)
                         : comm.scatter_v(c.in, c.out, c.in_counts, c.root, options);
    case OpKind::all_to_all:
      return equal_parts ? comm.all_to_all(c.in, c.out, options)
                         : comm.all_to_all_v(c.in, c.in_counts, c.out, c.out_counts, options);
    case OpKind::send:
      return comm.send(c.in, c.root, options);
    case OpKind::recv:
      return comm.recv(c.out, c.root, options);
    case OpKind::barrier:
      break;
  }
  return comm.barrier(options);
}

std::shared_ptr<Family> family_of(std::shared_ptr<Family> family, const Communicator& inner) {
  return family != nullptr ? std::move(family) : std::make_shared<Family>(inner.rank());
}

}  // namespace

Decorator::Decorator(std::unique_ptr<Communicator> inner, std::shared_ptr<Family> family)
    : Communicator(inner->rank(), inner->size(), {inner->timeout(), inner->logger(), inner->memory_tracker()}),
      inner_(std::move(inner)),
      family_(family_of(std::move(family), *inner_)),
      index_(family_->communicators.fetch_add(1)) {}

Work Decorator::forward(std::span<const OpDesc> calls, bool batch) {
  OpOptions options{.after = after_};
  if (!calls.empty()) {
    options.timeout = calls.front().timeout;
    options.label = calls.front().label;
    options.tag = calls.front().tag;
    options.source = calls.front().source;
  }
  if (!batch) return issue(*inner_, calls.front(), options);
  std::vector<P2POp> parts;
  for (const OpDesc& call : calls)
    parts.push_back(call.kind == OpKind::send ? P2POp::send(call.in, call.root, call.tag)
                                              : P2POp::recv(call.out, call.root, call.tag));
  return inner_->batch(parts, options);
}

Work Decorator::run(std::span<const OpDesc> calls, bool batch) {
  struct Reset {  // also if the call throws
    Stream*& stream;
    ~Reset() { stream = nullptr; }
  } const reset{after_};
  return do_call(calls, batch, family_->calls.fetch_add(1) + 1);
}

Work Decorator::do_start(const OpDesc& call) { return run({&call, 1}, false); }
Work Decorator::do_batch(std::span<const OpDesc> parts) { return run(parts, true); }

std::unique_ptr<Communicator> Decorator::do_split(int color, int key, const SplitOptions& options) {
  std::unique_ptr<Communicator> child = inner_->split(color, key, options);
  return child == nullptr ? nullptr : decorate_child(std::move(child));
}

std::unique_ptr<Communicator> Decorator::do_create_group(std::span<const int> members, const OpOptions& options) {
  return decorate_child(inner_->create_group(members, options));
}

Buffer Decorator::do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  return inner_->allocate(bytes, kind, use);
}

Buffer Decorator::do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  return inner_->allocate_symmetric(bytes, kind, use);
}

void Decorator::do_abort(std::string_view reason) noexcept { inner_->abort(std::string(reason)); }

std::uint64_t bytes_of(std::span<const OpDesc> calls) {
  std::uint64_t bytes = 0;
  for (const OpDesc& call : calls) bytes += std::max(call.in.bytes(), call.out.bytes());
  return bytes;
}

std::string_view name_of(std::span<const OpDesc> calls, bool batch) {
  return batch ? "batch" : comm::name_of(calls.front().kind);
}

std::string describe(std::span<const OpDesc> calls, bool batch, std::uint64_t number) {
  std::string text = std::string(name_of(calls, batch)) + " #" + std::to_string(number);
  if (!calls.empty() && !calls.front().label.empty()) text += " (" + std::string(calls.front().label) + ")";
  return text;
}

}  // namespace tessera::decorators
