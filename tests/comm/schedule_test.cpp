// Every algorithm, on every number of ranks, compared with a serial reference.
#include <gmock/gmock.h>

#include "tessera/base/error.h"

#include "tests/comm/schedule_support.h"

namespace tessera::comm_test {
namespace {

using Reduce = ReduceOp::Kind;

constexpr int kRanks[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16};
constexpr Reduce kReduces[] = {Reduce::sum, Reduce::avg, Reduce::prod, Reduce::min, Reduce::max, Reduce::premul_sum};
constexpr DType kDTypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8, DType::i32, DType::u64};
constexpr std::uint32_t kInPlace[] = {0, ~0u, 0xA5A5A5A5u};

/// Samples all combinations cheaply: each call uses the next value of each list. The lengths of the lists are coprime,
/// or the lists advance at different rates.
struct Mixer {
  unsigned at = 0;
  template <class T, std::size_t N>
  T pick(const T (&list)[N], unsigned pace = 1) const {
    return list[at / pace % N];
  }
};

std::vector<std::size_t> counts(OpKind kind, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  if (kind == OpKind::barrier) return {0};
  if (has_equal_parts(kind)) return {0, n, 7 * n, 100 * n};
  return {0, 1, n - 1, n + 1, 100 * n + 3};
}

TEST(Schedules, EveryAlgorithmEqualsReference) {
  Mixer mixer;
  for (const Named& algorithm : algorithms(false))
    for (const int ranks : kRanks)
      for (const std::size_t count : counts(algorithm.kind, ranks))
        for (const std::uint32_t in_place : kInPlace)
          for (int turn = 0; turn < (adds(algorithm.kind) ? 6 : 1); ++turn, ++mixer.at) {
            const CollectiveSpec spec{.kind = algorithm.kind,
                                      .dtype = mixer.pick(kDTypes),
                                      .reduce = kReduces[turn],
                                      .ranks = ranks,
                                      .root = static_cast<int>(mixer.at / 6) % ranks,
                                      .count = count,
                                      .ordered = false};
            const ScheduleWorld world(spec, algorithm.name, in_place);
            ASSERT_EQ(verify(world, true, 2), "") << describe(spec, algorithm.name) << " in place " << in_place;
          }
}

TEST(Schedules, DeterministicSumsAreBitwiseEqualToTree) {
  Mixer mixer;
  int verified = 0;
  for (const Named& algorithm : algorithms(false)) {
    if (!adds(algorithm.kind)) continue;
    for (const int ranks : kRanks)
      for (const DType dtype : kDTypes)
        for (const Reduce reduce : kReduces) {
          ++mixer.at;
          const CollectiveSpec spec{.kind = algorithm.kind,
                                    .dtype = dtype,
                                    .reduce = reduce,
                                    .ranks = ranks,
                                    .root = static_cast<int>(mixer.at) % ranks,
                                    .count = static_cast<std::size_t>(ranks) * 61,
                                    .ordered = true};
          if (!refusal(spec, algorithm.name).empty()) continue;
          const ScheduleWorld world(spec, algorithm.name, mixer.pick(kInPlace));
          ASSERT_EQ(verify(world, false, 1), "") << describe(spec, algorithm.name);
          ++verified;
        }
  }
  EXPECT_GT(verified, 1000);
}

TEST(Schedules, SupportPartsOfAnyLength) {
  int refused = 0;
  for (const Named& algorithm : algorithms(false)) {
    if (!has_equal_parts(algorithm.kind) || algorithm.kind == OpKind::barrier) continue;
    for (const int ranks : kRanks)
      for (std::uint64_t seed = 0; seed < 4; ++seed) {
        const CollectiveSpec spec{.kind = algorithm.kind,
                                  .ranks = ranks,
                                  .root = static_cast<int>(seed) % ranks,
                                  .ordered = algorithm.name == "direct"};
        std::vector<CollectiveSpec> all = with_parts(spec, seed);
        if (!refusal(all[0], algorithm.name).empty()) {
          ++refused;
          EXPECT_THROW(build_schedule(all[0], algorithm.name), InvalidUsage);
          continue;
        }
        if (seed % 2 == 1 && algorithm.kind != OpKind::all_to_all)
          for (CollectiveSpec& own : all)
            own.in_place = algorithm.kind == OpKind::all_gather || algorithm.kind == OpKind::reduce_scatter ||
                           own.rank == own.root;
        const ScheduleWorld world(all, algorithm.name);
        ASSERT_EQ(verify(world, !spec.ordered), "") << describe(all[0], algorithm.name) << " seed " << seed;
      }
  }
  EXPECT_LE(refused, 80);
}

/// Large enough for more segments than buffers, so that buffers are reused.
TEST(Schedules, SplitLargeDataIntoSegments) {
  for (const Named& algorithm : algorithms(false)) {
    if (algorithm.kind == OpKind::barrier) continue;
    for (const int ranks : {2, 3, 4}) {
      const std::uint32_t in_place = ranks == 3 ? ~0u : 0;
      const CollectiveSpec spec{.kind = algorithm.kind,
                                .dtype = DType::f64,
                                .reduce = ranks == 4 ? Reduce::premul_sum : Reduce::sum,
                                .ranks = ranks,
                                .root = ranks - 1,
                                .count = static_cast<std::size_t>(ranks) * 175'003,
                                .ordered = false};
      const ScheduleWorld world(spec, algorithm.name, in_place);
      ASSERT_EQ(verify(world, true, 1), "") << describe(spec, algorithm.name) << " in place " << in_place;
    }
  }
}

TEST(Schedules, BarrierHoldsAllRanks) {
  for (const Named& algorithm : algorithms(false)) {
    if (algorithm.kind != OpKind::barrier) continue;
    for (const int ranks : kRanks) {
      const ScheduleWorld world(CollectiveSpec{.kind = OpKind::barrier, .ranks = ranks}, algorithm.name);
      EXPECT_EQ(world.early_leaver(), "");
    }
  }
}

TEST(Schedules, ErrorsStateRemedy) {
  const CollectiveSpec sum{.kind = OpKind::all_reduce, .dtype = DType::bf16, .ranks = 4, .count = 8};
  EXPECT_THAT(refusal(sum, "best"), ::testing::HasSubstr("known: direct"));
  for (const Named& algorithm : algorithms(false)) {
    CollectiveSpec spec = sum;
    spec.kind = algorithm.kind;
    const std::string why = refusal(spec, algorithm.name);
    if (algorithm.name == "direct") {
      EXPECT_EQ(why, "");
    } else if (!why.empty()) {
      EXPECT_THAT(why, ::testing::HasSubstr("direct"));
    }
  }
}

}  // namespace
}  // namespace tessera::comm_test
