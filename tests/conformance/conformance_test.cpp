// The conformance suite with ranks as threads. TESSERA_TEST_FULL=1 runs the whole matrix; otherwise a seeded subset in
// which every pair of values occurs.
#include <gtest/gtest.h>

#include "tessera/base/env.h"
#include "tessera/comm/init.h"
#include "tessera/comm/schedule.h"
#include "tests/conformance/cases.h"

namespace tessera::conformance {
namespace {

bool full_matrix() { return read_foreign_env("TESSERA_TEST_FULL").has_value(); }

#ifdef __SANITIZE_THREAD__
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

/// Under the thread sanitizer an element costs 20 times as much, and which threads touch it depends on the bytes, not
/// on the dtype: only one dtype has the large sizes there.
bool left_out(const Case& c) { return kSlow && !full_matrix() && c.count > 60000 && c.dtype != DType::f32; }

struct Setting {
  const char* name;
  const char* backend;
  const char* algorithms;
  std::size_t stride;
};
std::ostream& operator<<(std::ostream& out, const Setting& setting) { return out << setting.name; }

class Conformance : public testing::TestWithParam<std::tuple<OpKind, int, Setting>> {};

TEST_P(Conformance, IsBitwiseEqualToSerialReference) {
  const auto& [kind, ranks, setting] = GetParam();
  InitOptions config;
  config.backend = setting.backend;
  config.algorithms = setting.algorithms;
  config.timeout = std::chrono::minutes(2);
  std::vector<Case> cases = cases_for(kind, full_matrix(), setting.stride);
  std::erase_if(cases, left_out);
  run_threads(ranks, config, [&](Communicator& comm) {
    for (const Case& c : cases) ASSERT_EQ(run_case(comm, c), "");
  });
}

class Behaviours : public testing::TestWithParam<std::tuple<int, Setting>> {};

TEST_P(Behaviours, ConformToContract) {
  const auto& [ranks, setting] = GetParam();
  InitOptions config;
  config.backend = setting.backend;
  config.timeout = std::chrono::minutes(1);
  run_threads(ranks, config, [&](Communicator& comm) {
    for (const Behaviour& behaviour : behaviours()) {
      if (comm.size() < behaviour.least_ranks) continue;
      ASSERT_EQ(behaviour.run(comm), "") << behaviour.name;
    }
  });
}

// The check of the cases beyond 2^31 bytes, on less data: it passes, and it detects a wrong byte, and data at the
// position of a wrapped offset.
class Huge : public testing::TestWithParam<OpKind> {};

TEST_P(Huge, IsCheckedEverywhere) {
  InitOptions config;
  config.backend = "shm";
  constexpr std::size_t kBytes = 5'000'011;
  const OpKind kind = GetParam();
  const bool at_root = kind == OpKind::reduce || kind == OpKind::gather;
  run_threads(2, config, [&](Communicator& comm) {
    const bool seen = !at_root || comm.rank() == kHugeRoot;
    EXPECT_EQ(run_huge(comm, kind, kBytes), "");
    EXPECT_NE(
        run_huge(comm, kind, kBytes, [](std::byte* out, std::size_t bytes) { out[bytes - 1] ^= std::byte{4}; }) == "",
        seen);
    EXPECT_NE(run_huge(comm, kind, kBytes,
                       [](std::byte* out, std::size_t bytes) {
                         constexpr std::size_t kWrap = std::size_t{1} << 20;
                         std::copy(out, out + kWrap / 2, out + bytes - kWrap);
                       }) == "",
              seen);
  });
}
INSTANTIATE_TEST_SUITE_P(All, Huge, testing::ValuesIn(all_kinds()),
                         [](const auto& which) { return std::string(name_of(which.param)); });

std::string test_name(const testing::TestParamInfo<Conformance::ParamType>& info) {
  const auto& [kind, ranks, setting] = info.param;
  return std::string(name_of(kind)) + "_" + std::to_string(ranks) + "_" + setting.name;
}
std::string behaviour_name(const testing::TestParamInfo<Behaviours::ParamType>& info) {
  return std::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
}

constexpr Setting kShm{"shm", "shm", "", 1};
constexpr Setting kShmDirect{"shm_direct", "shm", "all_reduce=direct", 1};
constexpr Setting kTcp{"tcp", "tcp", "", 5};

INSTANTIATE_TEST_SUITE_P(Shm, Conformance,
                         testing::Combine(testing::ValuesIn(all_kinds()), testing::Values(1, 2, 3, 4, 5),
                                          testing::Values(kShm)),
                         test_name);
INSTANTIATE_TEST_SUITE_P(ShmDirect, Conformance,
                         testing::Combine(testing::Values(OpKind::all_reduce), testing::Values(2, 3, 4, 8),
                                          testing::Values(kShmDirect)),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Tcp, Conformance,
                         testing::Combine(testing::ValuesIn(all_kinds()), testing::Values(1, 2, 3, 4),
                                          testing::Values(kTcp)),
                         test_name);
INSTANTIATE_TEST_SUITE_P(All, Behaviours, testing::Combine(testing::Values(1, 2, 3, 4), testing::Values(kShm, kTcp)),
                         behaviour_name);

/// Runs every algorithm over a real transport. Sums of 64-bit integers are the same in any order.
TEST(Algorithms, SupportTheirOperation) {
  for (const std::string& name : known_algorithms(false)) {
    const OpKind kind = parse_op_kind(name.substr(0, name.find('=')));
    if (kind == OpKind::barrier || kind == OpKind::send || kind == OpKind::recv) continue;
    InitOptions config;
    config.backend = "tcp";
    config.deterministic = false;
    config.algorithms = name;
    config.timeout = std::chrono::minutes(1);
    for (const int ranks : {2, 5})
      run_threads(ranks, config, [&](Communicator& comm) {
        for (const std::size_t count : {std::size_t{0}, std::size_t{7}, std::size_t{1021}, std::size_t{150'001}})
          for (const bool in_place : {false, true}) {
            const Case c{kind, DType::i64, ReduceOp::Kind::sum, count, in_place, false, false, count + 5};
            ASSERT_EQ(run_case(comm, c), "") << name;
          }
      });
  }
}

/// The reference distinguishes orders: another order of the sum gives other bits.
TEST(Reference, DetectsOtherOrderOfSum) {
  std::vector<Bytes> inputs;
  for (int r = 0; r < 4; ++r) inputs.push_back(make_input(DType::f32, 7, r, 1000));
  const Bytes tree_order = reduce(DType::f32, ReduceOp::sum(), inputs);
  std::swap(inputs[0], inputs[2]);
  const Bytes other_order = reduce(DType::f32, ReduceOp::sum(), inputs);
  EXPECT_GE(first_difference(DType::f32, tree_order.data(), other_order.data(), 1000), 0);
}

}  // namespace
}  // namespace tessera::conformance
