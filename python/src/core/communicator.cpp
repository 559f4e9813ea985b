#include "core/communicator.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <set>
#include <span>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/thread.h"

namespace tessera::python {
namespace {

comm::ReduceOp op_of(const std::string& name, double factor) { return {comm::parse_reduce_op(name), factor}; }

std::span<const std::size_t> span_of(const std::optional<Counts>& counts) {
  return counts ? std::span<const std::size_t>(*counts) : std::span<const std::size_t>();
}

/// Guarded by the GIL.
std::set<PyCommunicator*>& open_ones() {
  static std::set<PyCommunicator*> all;
  return all;
}

/// For keeping it alive only.
nb::ndarray<nb::ro> held(const OutputArray& array) { return nb::ndarray<nb::ro>(array); }
nb::ndarray<nb::ro> held(const InputArray& array) { return nb::ndarray<nb::ro>(array); }

/// Throws InvalidUsage.
std::optional<std::chrono::milliseconds> milliseconds_of(std::optional<double> seconds) {
  if (!seconds) return std::nullopt;
  if (!(*seconds > 0)) throw base::InvalidUsage("timeout is " + std::to_string(*seconds) + " s, needs more than 0");
  return std::chrono::milliseconds(
      std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(*seconds * 1e3, 1e15))));
}

}  // namespace

PyCommunicator::PyCommunicator(std::shared_ptr<comm::Communicator> world) : world_(std::move(world)) {
  open_ones().insert(this);
}

PyCommunicator::~PyCommunicator() {
  open_ones().erase(this);
  close();
}

comm::Communicator& PyCommunicator::world() const {
  if (world_ == nullptr) throw base::InvalidUsage("the communicator is closed");
  return *world_;
}

void PyCommunicator::close() {
  const nb::gil_scoped_release without_gil;  // callbacks in flight need it
  world_.reset();
}

void PyCommunicator::leave_all(double seconds) {
  const std::set<PyCommunicator*> open = open_ones();
  for (PyCommunicator* one : open) {
    if (one->world_ == nullptr) continue;
    // Works may own it, too, and wait when they are destroyed. The thread ends with the process.
    base::start_thread([left = std::weak_ptr(one->world_), seconds] {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
      if (const auto world = left.lock()) world->abort("its process ends while an operation is in flight");
    }).detach();
  }
  for (PyCommunicator* one : open) one->close();
}

template <class Issue>
PyCommunicator::Work PyCommunicator::issue(std::vector<nb::ndarray<nb::ro>> arrays, Seconds timeout, const Issue& call,
                                           std::shared_ptr<int> source) {
  comm::OpOptions options;
  options.source = source.get();
  options.timeout = milliseconds_of(timeout);
  comm::Communicator& all = world();
  comm::Work work;
  {
    const nb::gil_scoped_release without_gil;
    work = call(all, options);
  }
  return std::make_unique<PyWork>(world_, std::move(work), std::move(arrays), std::move(source));
}

PyCommunicator::Work PyCommunicator::all_reduce(OutputArray x, std::optional<OutputArray> out, Op op, double factor,
                                                Seconds timeout) {
  const comm::View in = view_of(x);
  const comm::View to = out ? view_of(*out) : in;
  return issue({held(x), held(out.value_or(x))}, timeout,
               [&](auto& all, auto& how) { return all.all_reduce(in, to, op_of(op, factor), how); });
}

PyCommunicator::Work PyCommunicator::reduce(InputArray x, int root, std::optional<OutputArray> out, Op op,
                                            double factor, Seconds timeout) {
  const comm::ConstView in = view_of(x);
  const comm::View to = out ? view_of(*out) : comm::View{nullptr, 0, in.dtype, {}};
  return issue({held(x), out ? held(*out) : held(x)}, timeout,
               [&](auto& all, auto& how) { return all.reduce(in, to, op_of(op, factor), root, how); });
}

PyCommunicator::Work PyCommunicator::broadcast(OutputArray x, int root, Seconds timeout) {
  const comm::View data = view_of(x);
  return issue({held(x)}, timeout, [&](auto& all, auto& how) { return all.broadcast(data, data, root, how); });
}

PyCommunicator::Work PyCommunicator::all_gather(OutputArray out, InputArray x, std::optional<Counts> counts,
                                                Seconds timeout) {
  return issue({held(out), held(x)}, timeout, [&, in = view_of(x), to = view_of(out)](auto& all, auto& how) {
    return counts ? all.all_gather_v(in, to, *counts, how) : all.all_gather(in, to, how);
  });
}

PyCommunicator::Work PyCommunicator::reduce_scatter(OutputArray out, InputArray x, Op op, double factor,
                                                    std::optional<Counts> counts, Seconds timeout) {
  return issue({held(out), held(x)}, timeout, [&, in = view_of(x), to = view_of(out)](auto& all, auto& how) {
    const comm::ReduceOp by = op_of(op, factor);
    return counts ? all.reduce_scatter_v(in, to, *counts, by, how) : all.reduce_scatter(in, to, by, how);
  });
}

PyCommunicator::Work PyCommunicator::gather(InputArray x, int root, std::optional<OutputArray> out,
                                            std::optional<Counts> counts, Seconds timeout) {
  const comm::ConstView in = view_of(x);
  const comm::View to = out ? view_of(*out) : comm::View{nullptr, 0, in.dtype, {}};
  return issue({held(x), out ? held(*out) : held(x)}, timeout, [&](auto& all, auto& how) {
    return counts ? all.gather_v(in, to, *counts, root, how) : all.gather(in, to, root, how);
  });
}

PyCommunicator::Work PyCommunicator::scatter(OutputArray out, int root, std::optional<InputArray> x,
                                             std::optional<Counts> counts, Seconds timeout) {
  const comm::View to = view_of(out);
  const comm::ConstView in = x ? view_of(*x) : comm::ConstView{nullptr, 0, to.dtype, {}};
  return issue({held(out), x ? held(*x) : held(out)}, timeout, [&](auto& all, auto& how) {
    return counts ? all.scatter_v(in, to, *counts, root, how) : all.scatter(in, to, root, how);
  });
}

PyCommunicator::Work PyCommunicator::all_to_all(OutputArray out, InputArray x, std::optional<Counts> out_counts,
                                                std::optional<Counts> counts, Seconds timeout) {
  if (counts.has_value() != out_counts.has_value())
    throw base::InvalidUsage("all_to_all: counts and out_counts go together");
  return issue({held(out), held(x)}, timeout, [&, in = view_of(x), to = view_of(out)](auto& all, auto& how) {
    return counts ? all.all_to_all_v(in, span_of(counts), to, span_of(out_counts), how) : all.all_to_all(in, to, how);
  });
}

PyCommunicator::Work PyCommunicator::send(InputArray x, int peer, int tag, Seconds timeout) {
  return issue({held(x)}, timeout, [&, data = view_of(x)](auto& all, auto& how) {
    how.tag = tag;
    return all.send(data, peer, how);
  });
}

PyCommunicator::Work PyCommunicator::recv(OutputArray x, std::optional<int> peer, int tag, Seconds timeout) {
  const int from = peer.value_or(comm::kAnyRank);
  return issue(
      {held(x)}, timeout,
      [&, data = view_of(x)](auto& all, auto& how) {
        how.tag = tag;
        return all.recv(data, from, how);
      },
      std::make_shared<int>(from));
}

PyCommunicator::Work PyCommunicator::batch(std::vector<Message> sends, std::vector<MessageRoom> receives,
                                           Seconds timeout) {
  std::vector<comm::P2POp> parts;
  std::vector<nb::ndarray<nb::ro>> arrays;
  for (const auto& [array, peer, tag] : sends) {
    parts.push_back(comm::P2POp::send(view_of(array), peer, tag));
    arrays.push_back(held(array));
  }
  for (const auto& [array, peer, tag] : receives) {
    parts.push_back(comm::P2POp::recv(view_of(array), peer, tag));
    arrays.push_back(held(array));
  }
  return issue(std::move(arrays), timeout, [&](auto& all, auto& how) { return all.batch(parts, how); });
}

PyCommunicator::Work PyCommunicator::barrier(Seconds timeout) {
  return issue({}, timeout, [](auto& all, auto& how) { return all.barrier(how); });
}

template <class Make>
std::unique_ptr<PyCommunicator> PyCommunicator::derive(const Make& make) {
  comm::Communicator& all = world();
  std::shared_ptr<comm::Communicator> part;
  {
    const nb::gil_scoped_release without_gil;
    // Its parent must outlive it, and works may outlive both objects of Python.
    part = std::shared_ptr<comm::Communicator>(make(all).release(),
                                               [parent = world_](comm::Communicator* child) { delete child; });
  }
  return part == nullptr ? nullptr : std::make_unique<PyCommunicator>(std::move(part));
}

std::unique_ptr<PyCommunicator> PyCommunicator::split(int color, int key) {
  return derive([&](comm::Communicator& all) { return all.split(color, key); });
}

std::unique_ptr<PyCommunicator> PyCommunicator::create_group(const std::vector<int>& members, int tag,
                                                             Seconds timeout) {
  return derive([&](comm::Communicator& all) {
    return all.create_group(members, {.timeout = milliseconds_of(timeout), .tag = tag});
  });
}

nb::ndarray<nb::array_api> PyCommunicator::allocate(std::size_t count, const std::string& dtype) {
  const base::DType type = base::parse_dtype(dtype);
  if (count > PTRDIFF_MAX / base::size_of(type))
    throw base::InvalidUsage("allocate: " + std::to_string(count) + " " + dtype + " are more than memory can hold");
  return array_of(world().allocate(count * base::size_of(type), comm::MemoryKind::host, std::nullopt), count, type);
}

nb::dict PyCommunicator::capabilities() const {
  const comm::Capabilities& can = world().capabilities();
  nb::dict all;
  nb::list dtypes;
  for (const base::DType dtype : can.dtypes) dtypes.append(std::string(base::name_of(dtype)));
  nb::list algorithms;
  for (const std::string& algorithm : can.algorithms) algorithms.append(algorithm);
  all["backend"] = can.backend;
  all["dtypes"] = dtypes;
  all["algorithms"] = algorithms;
  all["deterministic"] = can.deterministic;
  all["shares_memory"] = can.shares_memory;
  all["message_tags"] = can.message_tags;
  all["any_source"] = can.any_source;
  return all;
}

nb::dict PyCommunicator::traffic() const {
  const comm::TrafficStats stats = world().traffic();
  nb::dict all;
  for (std::size_t i = 0; i < comm::kOpKinds; ++i) {
    if (stats.by_kind[i].calls == 0) continue;
    nb::dict one;
    one["calls"] = stats.by_kind[i].calls;
    one["bytes_sent"] = stats.by_kind[i].bytes_sent;
    all[nb::cast(std::string(comm::name_of(static_cast<comm::OpKind>(i))))] = one;
  }
  return all;
}

}  // namespace tessera::python
