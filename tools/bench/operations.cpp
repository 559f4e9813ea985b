#include "tools/bench/operations.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "tessera/base/error.h"

namespace tessera::tools {
namespace {

using base::DType;
using comm::OpKind;
using Kind = comm::ReduceOp::Kind;

constexpr std::array<BenchOp, 20> kOps = {{{"all_reduce", OpKind::all_reduce},
                                           {"all_gather", OpKind::all_gather},
                                           {"reduce_scatter", OpKind::reduce_scatter},
                                           {"broadcast", OpKind::broadcast},
                                           {"reduce", OpKind::reduce},
                                           {"gather", OpKind::gather},
                                           {"scatter", OpKind::scatter},
                                           {"all_to_all", OpKind::all_to_all},
                                           {"send_recv", OpKind::send},
                                           {"ping_pong", OpKind::send, Exchange::ping_pong},
                                           {"window", OpKind::send, Exchange::window},
                                           {"bidirectional", OpKind::send, Exchange::bidirectional},
                                           {"put", OpKind::send, Exchange::put},
                                           {"get", OpKind::send, Exchange::get},
                                           {"barrier", OpKind::barrier},
                                           {"all_gather_v", OpKind::all_gather, Exchange::ring, true},
                                           {"reduce_scatter_v", OpKind::reduce_scatter, Exchange::ring, true},
                                           {"gather_v", OpKind::gather, Exchange::ring, true},
                                           {"scatter_v", OpKind::scatter, Exchange::ring, true},
                                           {"all_to_all_v", OpKind::all_to_all, Exchange::ring, true}}};

/// The larger buffer, or both, consists of a part for each rank.
bool has_parts(OpKind kind) { return comm::parts_of_in(kind) || comm::parts_of_out(kind); }

/// The type in which a dtype's values are compared and divided.
template <class T>
using OpMath = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
T from_integer(std::int64_t value) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(value);
  else
    return static_cast<T>(static_cast<OpMath<T>>(value));
}

/// 32 well-mixed bits.
std::uint32_t mix(int rank, std::size_t i) {
  std::uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(rank + 1) * 0xd6e8feb86659fd93u;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
  return static_cast<std::uint32_t>(x >> 32);
}

/// Whole numbers 0 .. 2^bits - 1 are exact in this dtype.
int exact_bits(DType dtype) {
  if (base::size_of(dtype) == 1) return 7;
  return dtype == DType::bf16 ? 8 : dtype == DType::f16 ? 11 : dtype == DType::i16 ? 15 : 24;
}

constexpr std::int64_t kLargestSum = 126;   // fits i8, and is exact in bf16
constexpr int kMaxAddends = 16;             // other ranks have 0 for this element, and a value for others
constexpr int kMaxFactors = 6;              // 2^6 fits i8
constexpr std::int64_t kLargestFactor = 2;  // of premul_sum

/// The distribution of one case's inputs: of n ranks, `active` have a value in low .. low + range - 1 for an element,
/// the others `rest`.
struct Draw {
  int ranks = 1;
  int active = 1;
  std::int64_t low = 0;
  std::uint64_t range = 1;
  std::int64_t rest = 0;

  std::int64_t operator()(int rank, std::size_t i) const {
    if (active < ranks &&
        (static_cast<std::size_t>(rank) + i) % static_cast<std::size_t>(ranks) >= static_cast<std::size_t>(active))
      return rest;
    return low + static_cast<std::int64_t>(mix(rank, i) * range >> 32);
  }
};

Draw draw_of(const BenchData& data) {
  const bool adds = data.redop == Kind::sum || data.redop == Kind::avg || data.redop == Kind::premul_sum;
  if (data.op->reduces && adds) {
    const int active = std::min(data.ranks, kMaxAddends);
    const std::int64_t sum = data.redop == Kind::premul_sum ? kLargestSum / kLargestFactor : kLargestSum;
    return {data.ranks, active, 1, static_cast<std::uint64_t>(sum / active), 0};
  }
  if (data.op->reduces && data.redop == Kind::prod) return {data.ranks, std::min(data.ranks, kMaxFactors), 1, 2, 1};
  return {data.ranks, data.ranks, 0, std::uint64_t{1} << exact_bits(data.dtype), 0};
}

std::int64_t premul_factor(int rank) { return 1 + rank % kLargestFactor; }

/// The exact result over all ranks; for avg the sum.
std::int64_t combined(const BenchData& data, const Draw& draw, std::size_t i) {
  const auto value_of = [&](int rank) {
    return draw(rank, i) * (data.redop == Kind::premul_sum ? premul_factor(rank) : 1);
  };
  std::int64_t result = value_of(0);
  for (int rank = 1; rank < data.ranks; ++rank) {
    const std::int64_t value = value_of(rank);
    result = data.redop == Kind::prod      ? result * value
             : data.redop == Kind::min     ? std::min(result, value)
             : data.redop == Kind::max     ? std::max(result, value)
             : data.redop == Kind::bit_and ? result & value
             : data.redop == Kind::bit_or  ? result | value
             : data.redop == Kind::bit_xor ? result ^ value
                                           : result + value;
  }
  return result;
}

template <class T>
bool same(T got, T expected, bool rounded) {
  if constexpr (std::is_integral_v<T>) {
    return got == expected;
  } else {
    using W = OpMath<T>;
    const auto a = static_cast<W>(got);
    const auto b = static_cast<W>(expected);
    if (a == b) return true;
    // One unit in the last place, relative to the smaller neighbor.
    const double unit = std::is_same_v<T, double>      ? 0x1p-52
                        : std::is_same_v<T, float>     ? 0x1p-23
                        : std::is_same_v<T, base::f16> ? 0x1p-10
                                                       : 0x1p-7;
    return rounded && std::abs(a - b) <= static_cast<W>(unit) * std::abs(b);
  }
}

template <class T>
T divided(std::int64_t sum, int ranks) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(sum / ranks);
  else
    return static_cast<T>(static_cast<OpMath<T>>(sum) / static_cast<OpMath<T>>(ranks));
}

template <class T>
std::uint64_t wrong_in(const BenchData& data, const ExpectedPart& part, const T* out) {
  const Draw draw = draw_of(data);
  const bool averages = data.op->reduces && data.redop == Kind::avg;
  std::uint64_t wrong = 0;
  for (std::size_t k = 0; k < part.count; ++k) {
    const std::size_t i = part.in_offset + k;
    const std::int64_t exact = part.source == ExpectedPart::kAll ? combined(data, draw, i) : draw(part.source, i);
    const T expected = averages ? divided<T>(exact, data.ranks) : from_integer<T>(exact);
    wrong += same(out[part.out_offset + k], expected, averages) ? 0 : 1;
  }
  return wrong;
}

}  // namespace

int messages_of(const BenchOp& op) {
  switch (op.exchange) {
    case Exchange::ring:
      return 1;
    case Exchange::ping_pong:
    case Exchange::put:
      return 2 * kRoundTrips;
    case Exchange::get:
      return kRoundTrips;
    default:
      return kWindow;
  }
}

int partner_of(int rank, int ranks) { return (rank + ranks / 2) % ranks; }

std::span<const BenchOp> bench_ops() { return kOps; }

const BenchOp& bench_op(std::string_view name) {
  std::string known;
  for (const BenchOp& op : kOps) {
    if (op.name == name) return op;
    known += " " + std::string(op.name);
  }
  throw base::InvalidUsage("unknown operation '" + std::string(name) + "'; known:" + known);
}

std::size_t BenchShape::begin(int rank) const {
  if (counts.empty()) return static_cast<std::size_t>(rank) * count;
  return std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
}

BenchShape bench_shape(const BenchOp& op, std::uint64_t bytes, DType dtype, int ranks, int rank) {
  if (op.kind == OpKind::barrier) return {};
  const std::size_t element = base::size_of(dtype);
  const std::size_t all = static_cast<std::size_t>(bytes) / element;
  if (!has_parts(op.kind)) return {all * element, all, all, all};
  const std::size_t part = all / static_cast<std::size_t>(ranks);
  if (op.unequal) {
    BenchShape shape{.bytes = all * element, .count = part};
    const std::size_t n = static_cast<std::size_t>(ranks), shares = n * (n + 1) / 2;
    const auto end = [&](std::size_t parts) {  // without products that overflow
      const std::size_t share = parts * (parts + 1) / 2;
      return all / shares * share + all % shares * share / shares;
    };
    for (std::size_t k = 0; k < n; ++k) shape.counts.push_back(end(k + 1) - end(k));
    const std::size_t own = shape.part(rank), exchanged = op.kind == OpKind::all_to_all ? own * n : all;
    shape.in_count = comm::parts_of_in(op.kind) ? all : own;
    shape.out_count = comm::parts_of_out(op.kind) ? exchanged : own;
    return shape;
  }
  const std::size_t whole = part * static_cast<std::size_t>(ranks);
  return {whole * element, part, comm::parts_of_in(op.kind) ? whole : part, comm::parts_of_out(op.kind) ? whole : part};
}

double bus_factor(const BenchOp& op, int ranks) {
  if (op.exchange == Exchange::window) return ranks / 2;  // NOLINT(bugprone-integer-division): pairs
  if (op.exchange == Exchange::bidirectional) return ranks;
  if (op.unequal) {
    const double n = ranks;  // the first rank receives most, in all_to_all_v the last one
    return op.kind == OpKind::all_to_all ? 2 * (n - 1) / (n + 1) : 1 - 2 / (n * (n + 1));
  }
  const double others = static_cast<double>(ranks - 1) / ranks;
  return op.kind == OpKind::all_reduce ? 2 * others : has_parts(op.kind) ? others : 1;
}

MemoryTraffic bench_traffic(const BenchData& data, const BenchShape& shape, int rank, bool in_place) {
  const OpKind kind = data.op->kind;
  const bool root = rank == data.root;
  const auto n = static_cast<std::size_t>(data.ranks);
  if (data.ranks == 1) return {0, 0, in_place ? 0 : shape.bytes};
  if (comm::writes_root(kind) && !root) return {};
  if (kind == OpKind::all_reduce) {  // slices differ by at most one element, the longer ones first
    if (shape.count == 0) return {};
    const std::size_t longer = static_cast<std::size_t>(rank) < shape.count % n ? 1 : 0;
    const std::size_t slice = (shape.count / n + longer) * (shape.bytes / shape.count);
    return {data.ranks, slice, shape.bytes - slice};
  }
  const std::size_t part = shape.part(rank) * base::size_of(data.dtype);
  if (data.op->reduces) return {data.ranks, kind == OpKind::reduce ? shape.bytes : part, 0};
  const std::size_t result = kind == OpKind::scatter ? part : kind == OpKind::all_to_all ? n * part : shape.bytes;
  const std::size_t there_in_place = !comm::reads_root(kind) ? part : root ? result : 0;
  return {0, 0, result - (in_place ? there_in_place : 0)};
}

comm::ReduceOp bench_reduce_op(Kind kind, int rank) {
  return {kind, kind == Kind::premul_sum ? static_cast<double>(premul_factor(rank)) : 0};
}

std::int64_t bench_value(const BenchData& data, int rank, std::size_t i) { return draw_of(data)(rank, i); }

void fill_bench_input(const BenchData& data, int rank, void* in, std::size_t count) {
  const Draw draw = draw_of(data);
  base::with_dtype(data.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* values = static_cast<T*>(in);
    for (std::size_t i = 0; i < count; ++i) values[i] = from_integer<T>(draw(rank, i));
  });
}

void poison(void* data, std::size_t bytes) {
  if (bytes != 0) std::memset(data, 0xff, bytes);
}

std::vector<ExpectedPart> expected_parts(const BenchData& data, const BenchShape& shape, int rank) {
  const OpKind kind = data.op->kind;
  const Exchange exchange = data.op->exchange;
  if (kind == OpKind::barrier || (comm::writes_root(kind) && rank != data.root)) return {};
  if (exchange == Exchange::window && rank < data.ranks / 2) return {};
  if (exchange == Exchange::get && rank >= data.ranks / 2) return {};
  const std::size_t begin = comm::parts_of_in(kind) ? shape.begin(rank) : 0;
  if (!comm::parts_of_out(kind)) {
    const int sender = exchange == Exchange::ring ? (rank + data.ranks - 1) % data.ranks : partner_of(rank, data.ranks);
    const int source = data.op->reduces ? ExpectedPart::kAll : data.op->rooted ? data.root : sender;
    return {{0, source, begin, has_parts(kind) ? shape.part(rank) : shape.count}};
  }
  std::vector<ExpectedPart> parts;
  for (int k = 0; k < data.ranks; ++k)
    parts.push_back(kind == OpKind::all_to_all
                        ? ExpectedPart{static_cast<std::size_t>(k) * shape.part(rank), k, begin, shape.part(rank)}
                        : ExpectedPart{shape.begin(k), k, begin, shape.part(k)});
  return parts;
}

std::uint64_t count_wrong(const BenchData& data, const BenchShape& shape, int rank, const void* out) {
  std::uint64_t wrong = 0;
  for (const ExpectedPart& part : expected_parts(data, shape, rank))
    wrong += base::with_dtype(data.dtype,
                              [&](auto zero) { return wrong_in(data, part, static_cast<const decltype(zero)*>(out)); });
  return wrong;
}

}  // namespace tessera::tools
