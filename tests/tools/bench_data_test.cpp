// Expected values of `bench --check` against a brute-force evaluation of every operation: element by element, rounded
// at each addition, in both orders. For each, a wrong value must be counted as wrong.
#include "tools/bench/operations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

namespace tessera::tools {
namespace {

using base::DType;
using Kind = comm::ReduceOp::Kind;
using comm::OpKind;

template <class T>
double number(T value) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<double>(value);
  else
    return static_cast<double>(static_cast<float>(value));
}

template <class T>
T rounded(double value) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<T>(value);
  else
    return T(static_cast<float>(value));
}

template <class T>
using Inputs = std::vector<std::vector<T>>;

/// Element i over all ranks, in the given order, rounded to T after every step.
template <class T>
T combine(const Inputs<T>& inputs, Kind kind, std::size_t i, bool backwards) {
  const int n = static_cast<int>(inputs.size());
  const auto value = [&](int turn) {
    const int rank = backwards ? n - 1 - turn : turn;
    const double factor = kind == Kind::premul_sum ? bench_reduce_op(kind, rank).scalar : 1;
    return rounded<T>(number(inputs[static_cast<std::size_t>(rank)][i]) * factor);
  };
  T result = value(0);
  for (int turn = 1; turn < n; ++turn) {
    const double a = number(result);
    const double b = number(value(turn));
    if constexpr (std::is_integral_v<T>) {
      const auto x = static_cast<T>(a);
      const auto y = static_cast<T>(b);
      if (kind >= Kind::bit_and) {
        result = static_cast<T>(kind == Kind::bit_and ? x & y : kind == Kind::bit_or ? x | y : x ^ y);
        continue;
      }
    }
    result = rounded<T>(kind == Kind::prod  ? a * b
                        : kind == Kind::min ? std::min(a, b)
                        : kind == Kind::max ? std::max(a, b)
                                            : a + b);
  }
  return kind == Kind::avg ? rounded<T>(number(result) / n) : result;
}

template <class T>
std::vector<T> reduced(const Inputs<T>& inputs, Kind kind, std::size_t begin, std::size_t count, bool backwards) {
  std::vector<T> out;
  for (std::size_t i = begin; i < begin + count; ++i) out.push_back(combine(inputs, kind, i, backwards));
  return out;
}

template <class T>
std::vector<T> brute_force(const BenchData& data, const BenchShape& shape, const Inputs<T>& inputs, int rank,
                           bool backwards) {
  std::vector<std::size_t> counts(static_cast<std::size_t>(data.ranks), shape.count);
  if (data.op->unequal) counts = shape.counts;
  const std::size_t mine = counts[static_cast<std::size_t>(rank)];
  std::size_t own = 0;
  for (int k = 0; k < rank; ++k) own += counts[static_cast<std::size_t>(k)];
  const bool root = rank == data.root;
  std::vector<T> out;
  const auto append = [&](int from, std::size_t begin, std::size_t count) {
    const auto start = inputs[static_cast<std::size_t>(from)].begin() + static_cast<std::ptrdiff_t>(begin);
    out.insert(out.end(), start, start + static_cast<std::ptrdiff_t>(count));
  };
  switch (data.op->kind) {
    case OpKind::all_reduce:
      return reduced(inputs, data.redop, 0, shape.count, backwards);
    case OpKind::reduce:
      return root ? reduced(inputs, data.redop, 0, shape.count, backwards) : out;
    case OpKind::reduce_scatter:
      return reduced(inputs, data.redop, own, mine, backwards);
    case OpKind::broadcast:
      append(data.root, 0, shape.count);
      break;
    case OpKind::scatter:
      append(data.root, own, mine);
      break;
    case OpKind::send: {
      const int half = data.ranks / 2;
      if (data.op->exchange == Exchange::ring)
        append(rank == 0 ? data.ranks - 1 : rank - 1, 0, shape.count);
      else if (data.op->exchange == Exchange::window ? rank >= half  // only the upper half receives windows
               : data.op->exchange == Exchange::get  ? rank < half
                                                     : true)
        append(rank < half ? rank + half : rank - half, 0, shape.count);
      break;
    }
    case OpKind::gather:
      if (!root) break;
      [[fallthrough]];
    case OpKind::all_gather:
      for (int k = 0; k < data.ranks; ++k) append(k, 0, counts[static_cast<std::size_t>(k)]);
      break;
    case OpKind::all_to_all:
      for (int k = 0; k < data.ranks; ++k) append(k, own, mine);
      break;
    default:
      break;
  }
  return out;
}

template <class T>
class BenchDataOf : public testing::Test {};
using Types = testing::Types<float, double, base::f16, base::bf16, std::int8_t, std::uint8_t, std::int32_t,
                             std::uint64_t, std::int16_t>;
TYPED_TEST_SUITE(BenchDataOf, Types);

template <class T>
void check_case(const BenchData& data) {
  Inputs<T> inputs;
  for (int rank = 0; rank < data.ranks; ++rank) {
    inputs.emplace_back(bench_shape(*data.op, 1200, data.dtype, data.ranks, rank).in_count);
    fill_bench_input(data, rank, inputs.back().data(), inputs.back().size());
  }
  for (const int rank : {0, data.ranks - 1}) {
    const BenchShape shape = bench_shape(*data.op, 1200, data.dtype, data.ranks, rank);
    const std::string where = std::string(data.op->name) + " " + std::string(comm::name_of(data.redop)) + " of " +
                              std::to_string(data.ranks) + " ranks on " + std::to_string(rank);
    for (const bool backwards : {false, true}) {
      std::vector<T> out = brute_force(data, shape, inputs, rank, backwards);
      ASSERT_EQ(count_wrong(data, shape, rank, out.data()), 0U) << where;
      if (out.empty()) continue;
      // Negative controls: one element off by about an eighth, and bytes that no rank wrote.
      T& broken = out[out.size() / 2];
      broken = number(broken) == 0 ? rounded<T>(1) : rounded<T>(number(broken) + std::max(1.0, number(broken) / 8));
      ASSERT_EQ(count_wrong(data, shape, rank, out.data()), 1U) << where;
      poison(out.data(), out.size() * sizeof(T));
      ASSERT_EQ(count_wrong(data, shape, rank, out.data()), out.size()) << where;
    }
  }
}

TYPED_TEST(BenchDataOf, ExpectedValuesEqualBruteForceInAnyOrder) {
  for (const BenchOp& op : bench_ops()) {
    for (const int ranks : {1, 2, 3, 5, 20}) {
      if (op.exchange != Exchange::ring && ranks % 2 != 0) continue;
      const BenchData data{&op, base::dtype_of<TypeParam>, Kind::sum, ranks, ranks / 2};
      if (!op.reduces) {
        check_case<TypeParam>(data);
        continue;
      }
      for (std::size_t i = 0; i < comm::kReduceKinds; ++i) {
        const auto kind = static_cast<Kind>(i);
        if (!comm::is_defined(kind, data.dtype)) continue;
        BenchData with = data;
        with.redop = kind;
        check_case<TypeParam>(with);
      }
    }
  }
}

TEST(BenchData, ValuesDifferByRank) {
  const BenchData data{&bench_op("all_gather"), DType::f32, Kind::sum, 2, 0};
  int equal = 0;
  for (std::size_t i = 0; i < 1000; ++i) equal += bench_value(data, 0, i) == bench_value(data, 1, i) ? 1 : 0;
  EXPECT_LT(equal, 5);
}

TEST(BenchData, DetectsMissingAddend) {
  for (const int ranks : {2, 4, 16}) {
    const BenchData data{&bench_op("all_reduce"), DType::bf16, Kind::sum, ranks, 0};
    for (int rank = 0; rank < ranks; ++rank)
      for (std::size_t i = 0; i < 100; ++i) ASSERT_GT(bench_value(data, rank, i), 0);
  }
}

TEST(BenchData, AverageMayDifferByOneUlp) {
  const BenchData data{&bench_op("all_reduce"), DType::f32, Kind::avg, 3, 0};
  const BenchShape shape = bench_shape(*data.op, 4, data.dtype, data.ranks);
  const float sum = static_cast<float>(bench_value(data, 0, 0) + bench_value(data, 1, 0) + bench_value(data, 2, 0));
  float out = sum / 3;
  EXPECT_EQ(count_wrong(data, shape, 0, &out), 0U);
  out = std::nextafter(sum / 3, 1e9F);
  EXPECT_EQ(count_wrong(data, shape, 0, &out), 0U);
  out = sum / 3 * (1 + 0x1p-21F);
  EXPECT_EQ(count_wrong(data, shape, 0, &out), 1U);
}

}  // namespace
}  // namespace tessera::tools
