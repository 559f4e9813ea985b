#include "tests/conformance/cases.h"

#include <algorithm>
#include <sstream>

namespace tessera::conformance {

std::string Case::name(int ranks) const {
  std::ostringstream text;
  text << name_of(kind) << " " << name_of(dtype) << " " << name_of(reduce) << " count " << count << " ranks " << ranks
       << (in_place ? " in place" : "") << (window_in ? " window" : " ordinary")
       << (window_out ? " window" : " ordinary");
  return text.str();
}

namespace {

constexpr std::size_t kCounts[] = {0, 1, 3, 17, 1000, 1021, 4099, 70001, 300007};
constexpr OpKind kKinds[] = {OpKind::all_reduce, OpKind::all_gather, OpKind::reduce_scatter, OpKind::broadcast,
                             OpKind::reduce,     OpKind::gather,     OpKind::scatter,        OpKind::all_to_all};

bool reduces(OpKind kind) {
  return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::reduce;
}

/// Memory for `count` elements at an odd offset, so that no code can rely on alignment.
class Place {
 public:
  Place(Communicator& comm, bool window, std::size_t bytes, std::size_t skew, const OnDevice* device)
      : skew_(skew), device_(device) {
    const std::size_t whole = bytes + skew;
    if (window) {
      buffer_ = comm.allocate(whole, device == nullptr ? MemoryKind::host : MemoryKind::device, MemoryCategory::other);
    } else if (device == nullptr) {
      ordinary_.resize(whole);
    } else {
      buffer_ = {device->runtime.allocate(whole), whole,
                 [device](void* p, std::size_t n) { device->runtime.free(p, n); }};
    }
  }
  std::byte* data() { return (buffer_ ? buffer_.bytes_at(0) : ordinary_.data()) + skew_; }
  void write(std::byte* at, const Bytes& bytes) {
    if (device_ == nullptr) {
      std::copy(bytes.begin(), bytes.end(), at);
    } else {
      device_->runtime.copy(device_->stream, CopyDirection::host_to_device, at, bytes.data(), bytes.size());
    }
  }
  Bytes read(const std::byte* at, std::size_t bytes) {
    Bytes read(bytes);
    if (device_ == nullptr) {
      std::copy(at, at + bytes, read.begin());
    } else {
      device_->runtime.copy(device_->stream, CopyDirection::device_to_host, read.data(), at, bytes);
      device_->stream.synchronize();
    }
    return read;
  }

 private:
  const std::size_t skew_;
  const OnDevice* const device_;
  Buffer buffer_;
  std::vector<std::byte> ordinary_;
};

Bytes part_of(const Bytes& bytes, std::size_t part, int index) {
  const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(part) * index;
  return {begin, begin + static_cast<std::ptrdiff_t>(part)};
}

struct Shape {
  std::size_t in;  ///< in elements
  std::size_t out;
  bool in_counts;  ///< whether this rank's in and out are checked
  bool out_counts;
  std::size_t in_place_in;  ///< in place: offsets within the shared memory, in elements
  std::size_t in_place_out;
};

Shape shape_of(const Case& c, int ranks, int rank, int root) {
  const auto n = static_cast<std::size_t>(ranks);
  const auto r = static_cast<std::size_t>(rank);
  const bool at_root = rank == root;
  switch (c.kind) {
    case OpKind::all_gather:
      return {c.count, c.count * n, true, true, r * c.count, 0};
    case OpKind::reduce_scatter:
      return {c.count * n, c.count, true, true, 0, r * c.count};
    case OpKind::broadcast:
      return {c.count, c.count, at_root, true, 0, 0};
    case OpKind::reduce:
      return {c.count, c.count, true, at_root, 0, 0};
    case OpKind::gather:
      return {c.count, c.count * n, true, at_root, at_root ? r * c.count : 0, 0};
    case OpKind::scatter:
      return {c.count * n, c.count, at_root, true, 0, at_root ? r * c.count : 0};
    case OpKind::all_to_all:
      return {c.count * n, c.count * n, true, true, 0, 0};
    default:
      return {c.count, c.count, true, true, 0, 0};
  }
}

Bytes expected(const Case& c, ReduceOp op, int ranks, int rank, int root, const std::vector<Bytes>& inputs) {
  const std::size_t part = c.count * size_of(c.dtype);
  Bytes out;
  const auto append = [&](const Bytes& more) { out.insert(out.end(), more.begin(), more.end()); };
  switch (c.kind) {
    case OpKind::all_reduce:
    case OpKind::reduce:
      return reduce(c.dtype, op, inputs);
    case OpKind::reduce_scatter:
      return part_of(reduce(c.dtype, op, inputs), part, rank);
    case OpKind::broadcast:
      return inputs[static_cast<std::size_t>(root)];
    case OpKind::scatter:
      return part_of(inputs[static_cast<std::size_t>(root)], part, rank);
    case OpKind::all_to_all:
      for (int k = 0; k < ranks; ++k) append(part_of(inputs[static_cast<std::size_t>(k)], part, rank));
      return out;
    default:
      for (const Bytes& input : inputs) append(input);
      return out;
  }
}

}  // namespace

Work issue(Communicator& comm, const Case& c, ConstView in, View out, ReduceOp op, int root, OpOptions options) {
  switch (c.kind) {
    case OpKind::all_reduce:
      return comm.all_reduce(in, out, op, options);
    case OpKind::all_gather:
      return comm.all_gather(in, out, options);
    case OpKind::reduce_scatter:
      return comm.reduce_scatter(in, out, op, options);
    case OpKind::broadcast:
      return comm.broadcast(in, out, root, options);
    case OpKind::reduce:
      return comm.reduce(in, out, op, root, options);
    case OpKind::gather:
      return comm.gather(in, out, root, options);
    case OpKind::scatter:
      return comm.scatter(in, out, root, options);
    default:
      return comm.all_to_all(in, out, options);
  }
}

std::string run_case(Communicator& comm, const Case& c, const OnDevice* device) {
  const int ranks = comm.size();
  const int rank = comm.rank();
  const int root = static_cast<int>(c.seed % static_cast<std::uint64_t>(ranks));
  const std::size_t size = size_of(c.dtype);
  const Shape shape = shape_of(c, ranks, rank, root);
  const bool in_place = c.in_place && c.kind != OpKind::all_to_all && shape.in_counts && shape.out_counts;
  ReduceOp op{c.reduce, 0};
  if (c.reduce == ReduceOp::Kind::premul_sum) op.scalar = factor(rank);
  std::vector<Bytes> inputs;
  for (int r = 0; r < ranks; ++r) inputs.push_back(make_input(c.dtype, c.seed, r, shape.in));

  const std::size_t skew = (c.seed % 5) * size;
  Place in_place_place(comm, c.window_in, std::max(shape.in, shape.out) * size, skew, device);
  Place out_place(comm, c.window_out, shape.out * size, size, device);
  std::byte* in = in_place_place.data() + (in_place ? shape.in_place_in * size : 0);
  std::byte* out = in_place ? in_place_place.data() + shape.in_place_out * size : out_place.data();
  const Bytes& given = inputs[static_cast<std::size_t>(rank)];
  in_place_place.write(in, given);
  const Device where = device == nullptr ? Device{} : device->runtime.device();
  Work work = issue(comm, c, {in, shape.in, c.dtype, where}, {out, shape.out, c.dtype, where}, op, root,
                    {.after = device == nullptr ? nullptr : &device->stream});
  if (device != nullptr) {
    work.wait_on(device->stream);
    device->stream.synchronize();
  }
  work.wait();
  if (!shape.out_counts) return {};
  const Bytes want = expected(c, op, ranks, rank, root, inputs);
  const Bytes have = (in_place ? in_place_place : out_place).read(out, shape.out * size);
  std::ptrdiff_t wrong =
      want.size() == have.size() ? first_difference(c.dtype, have.data(), want.data(), shape.out) : 0;
  if (wrong >= 0 && reduces(c.kind) && !comm.capabilities().deterministic)
    wrong = first_outside(c.dtype, op, inputs, comm.capabilities().rounding_ulps, have.data(), want,
                          c.kind == OpKind::reduce_scatter ? static_cast<std::size_t>(rank) * shape.out : 0);
  if (wrong >= 0)
    return c.name(ranks) + ": wrong on rank " + std::to_string(rank) + ", first at element " + std::to_string(wrong);
  if (in_place || !shape.in_counts) return {};
  if (in_place_place.read(in, given.size()) != given) return c.name(ranks) + ": the input was changed";
  return {};
}

/// The reduction of a case: the n-th of those that the elements have.
ReduceOp::Kind reduction(DType dtype, std::size_t n) {
  std::vector<ReduceOp::Kind> defined;
  for (std::size_t i = 0; i < kReduceKinds; ++i)
    if (const auto kind = static_cast<ReduceOp::Kind>(i); is_defined(kind, dtype)) defined.push_back(kind);
  return defined[n % defined.size()];
}

std::vector<OpKind> all_kinds() { return {std::begin(kKinds), std::end(kKinds)}; }

std::vector<Case> cases_for(OpKind kind, bool full, std::size_t stride) {
  std::vector<Case> cases;
  std::uint64_t seed = static_cast<std::uint64_t>(kind) * 1000;
  for (const DType dtype : kDTypes)
    for (const std::size_t count : kCounts) {
      const std::uint64_t from = scramble(++seed);
      for (std::size_t variant = 0; variant < (full ? 48u : (count > 60000 ? 1u : 6u)); ++variant) {
        const std::uint64_t v = variant + from;
        const std::size_t places = full ? variant / 6 : static_cast<std::size_t>(v % 8);
        cases.push_back({kind, dtype, reduction(dtype, static_cast<std::size_t>(full ? variant : v)), count,
                         places % 2 == 1, places / 2 % 2 == 1, places / 4 % 2 == 1, seed * 100 + variant});
        if (!reduces(kind) && !full && variant == 2) break;
      }
    }
  if (full || stride == 1) return cases;
  std::vector<Case> some;
  for (std::size_t i = scramble(seed) % stride; i < cases.size(); i += stride) some.push_back(cases[i]);
  return some;
}

}  // namespace tessera::conformance
