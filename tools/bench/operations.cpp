#include "tools/bench/operations.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "tessera/base/error.h"

namespace tessera::tools {
namespace {

using base::DType;
using comm::OpKind;
using Id = BenchOp::Id;
using Kind = comm::ReduceOp::Kind;

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
  switch (dtype) {
    case DType::i8:
    case DType::u8:
      return 7;
    case DType::bf16:
      return 8;
    case DType::f16:
      return 11;
    case DType::i16:
      return 15;
    default:
      return 24;
  }
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
  std::int64_t result = draw(0, i) * (data.redop == Kind::premul_sum ? premul_factor(0) : 1);
  for (int rank = 1; rank < data.ranks; ++rank) {
    const std::int64_t value = draw(rank, i);
    switch (data.redop) {
      case Kind::prod:
        result *= value;
        break;
      case Kind::min:
        result = std::min(result, value);
        break;
      case Kind::max:
        result = std::max(result, value);
        break;
      case Kind::premul_sum:
        result += value * premul_factor(rank);
        break;
      case Kind::bit_and:
        result &= value;
        break;
      case Kind::bit_or:
        result |= value;
        break;
      case Kind::bit_xor:
        result ^= value;
        break;
      default:
        result += value;
    }
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

std::span<const BenchOp> bench_ops() { return kOps; }

const BenchOp& bench_op(std::string_view name) {
  std::string known;
  for (const BenchOp& op : kOps) {
    if (op.name == name) return op;
    known += " " + std::string(op.name);
  }
  throw base::InvalidUsage("unknown operation '" + std::string(name) + "'; known:" + known);
}

BenchShape bench_shape(const BenchOp& op, std::uint64_t bytes, DType dtype, int ranks) {
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
  const auto own = static_cast<std::size_t>(rank) * shape.count;
  const bool root = rank == data.root;
  std::vector<ExpectedPart> parts;
  switch (data.op->id) {
    case Id::all_reduce:
      return {{0, ExpectedPart::kAll, 0, shape.count}};
    case Id::reduce_scatter:
      return {{0, ExpectedPart::kAll, own, shape.count}};
    case Id::broadcast:
      return {{0, data.root, 0, shape.count}};
    case Id::scatter:
      return {{0, data.root, own, shape.count}};
    case Id::send_recv:
      return {{0, (rank + data.ranks - 1) % data.ranks, 0, shape.count}};
    case Id::barrier:
      return {};
    case Id::reduce:
      if (root) parts.push_back({0, ExpectedPart::kAll, 0, shape.count});
      return parts;
    case Id::gather:
      if (!root) return parts;
      [[fallthrough]];
    case Id::all_gather:
    case Id::all_to_all:
      for (int k = 0; k < data.ranks; ++k)
        parts.push_back(
            {static_cast<std::size_t>(k) * shape.count, k, data.op->id == Id::all_to_all ? own : 0, shape.count});
  }
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
