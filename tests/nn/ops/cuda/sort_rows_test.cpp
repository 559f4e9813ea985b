// The sort of rows by id, emulated, against the standard library's.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/nn/ops/cuda/emulation.h"
//
#include "tessera/nn/kernels/cuda/embedding.cuh"

namespace tessera::nn::cuda {
namespace {

std::vector<KeyedRow> expected(const std::vector<std::int32_t>& ids, std::size_t vocabulary) {
  std::vector<KeyedRow> rows;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const bool known = ids[i] >= 0 && static_cast<std::size_t>(ids[i]) < vocabulary;
    rows.push_back((known ? static_cast<KeyedRow>(ids[i]) : vocabulary) << 32 | i);
  }
  std::stable_sort(rows.begin(), rows.end(), [](KeyedRow a, KeyedRow b) { return key_of(a) < key_of(b); });
  return rows;
}

std::vector<KeyedRow> sorted(const std::vector<std::int32_t>& ids, std::size_t vocabulary) {
  std::vector<KeyedRow> scratch(sort_scratch(ids.size()) / sizeof(KeyedRow) + 1, ~KeyedRow{0});
  const KeyedRow* rows = sort_rows(nullptr, ids.data(), ids.size(), vocabulary, scratch.data());
  EXPECT_EQ(scratch.back(), ~KeyedRow{0}) << "wrote beyond its scratch";
  return {rows, rows + ids.size()};
}

/// Ids of one, two and three digits, some outside of the vocabulary, in one tile, whole tiles, and more.
TEST(SortRows, EqualsStableSortInEveryOrderOfThreads) {
  for (const std::size_t vocabulary : {1U, 200U, 255U, 256U, 50257U, 65536U, 100000U})
    for (const std::size_t count : {1U, 31U, 1024U, 3000U}) {
      std::vector<std::int32_t> ids(count);
      for (std::size_t i = 0; i < count; ++i)
        ids[i] = static_cast<std::int32_t>(i * i * 2654435761U % (vocabulary + vocabulary / 8 + 1)) - 1;
      for (int order = 0; order < emulation::kOrders; ++order) {
        emulation::block().order = static_cast<emulation::Order>(order);
        EXPECT_EQ(sorted(ids, vocabulary), expected(ids, vocabulary)) << vocabulary << " " << count << " " << order;
      }
      emulation::block().order = emulation::Order::ascending;
    }
}

/// The control: the rows of an id in another order are not equal.
TEST(SortRows, ComparisonDetectsUnstableOrder) {
  const std::vector<std::int32_t> ids{7, 7, 3};
  std::vector<KeyedRow> rows = sorted(ids, 10);
  EXPECT_EQ(rows, expected(ids, 10));
  std::swap(rows[1], rows[2]);
  EXPECT_NE(rows, expected(ids, 10));
}

TEST(SortRows, NoRows) { EXPECT_TRUE(sorted({}, 10).empty()); }

}  // namespace
}  // namespace tessera::nn::cuda
