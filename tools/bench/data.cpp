#include "tools/bench/data.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace tessera::tools {
namespace {

using base::DType;
using Kind = comm::ReduceOp::Kind;
using Id = BenchOp::Id;

template <class F>
auto with_type(DType dtype, F&& call) {
  switch (dtype) {
    case DType::f32:
      return call(float{});
    case DType::f64:
      return call(double{});
    case DType::f16:
      return call(base::f16{});
    case DType::bf16:
      return call(base::bf16{});
    case DType::i8:
      return call(std::int8_t{});
    case DType::u8:
      return call(std::uint8_t{});
    case DType::i32:
      return call(std::int32_t{});
    case DType::i64:
      return call(std::int64_t{});
    case DType::u32:
      return call(std::uint32_t{});
    case DType::u64:
      break;
  }
  return call(std::uint64_t{});
}

/// The type in which a dtype's values are compared and divided.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
T from_integer(std::int64_t value) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(value);
  else
    return static_cast<T>(static_cast<Wide<T>>(value));
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
    default:
      return 24;
  }
}

constexpr std::int64_t kLargestSum = 126;   // fits i8, and is exact in bf16
constexpr int kMostAddends = 16;            // other ranks have 0 for this element, and a value for others
constexpr int kMostFactors = 6;             // 2^6 fits i8
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
    const int active = std::min(data.ranks, kMostAddends);
    const std::int64_t sum = data.redop == Kind::premul_sum ? kLargestSum / kLargestFactor : kLargestSum;
    return {data.ranks, active, 1, static_cast<std::uint64_t>(sum / active), 0};
  }
  if (data.op->reduces && data.redop == Kind::prod) return {data.ranks, std::min(data.ranks, kMostFactors), 1, 2, 1};
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
    using W = Wide<T>;
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
    return static_cast<T>(static_cast<Wide<T>>(sum) / static_cast<Wide<T>>(ranks));
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

comm::ReduceOp bench_reduce_op(Kind kind, int rank) {
  return {kind, kind == Kind::premul_sum ? static_cast<double>(premul_factor(rank)) : 0};
}

std::int64_t bench_value(const BenchData& data, int rank, std::size_t i) { return draw_of(data)(rank, i); }

void fill_bench_input(const BenchData& data, int rank, void* in, std::size_t count) {
  const Draw draw = draw_of(data);
  with_type(data.dtype, [&](auto zero) {
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
    wrong +=
        with_type(data.dtype, [&](auto zero) { return wrong_in(data, part, static_cast<const decltype(zero)*>(out)); });
  return wrong;
}

}  // namespace tessera::tools
