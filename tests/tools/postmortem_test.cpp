// The flight recorder on ranks as threads, and what report --postmortem finds in its files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <latch>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/flight_recorder.h"
#include "tessera/comm/init.h"
#include "tests/nn/temporary_directory.h"
#include "tools/report/flight_log.h"

namespace tessera::tools {
namespace {

using comm::Communicator;
using comm::Work;
using testing::ElementsAre;

class PostmortemTest : public testing::Test {
 protected:
  /// Runs ranks that may fail, and returns their files.
  std::vector<FlightLog> record(int ranks, const std::function<void(Communicator&)>& body, bool check = false) {
    comm::InitOptions config{.backend = "shm", .timeout = std::chrono::milliseconds(800), .check = check};
    config.flight_recorder = directory_.path("flight");
    try {
      comm::run_threads(ranks, config, body);
    } catch (const base::Error&) {
    }
    std::vector<std::string> ignored;
    return read_flight_logs(*config.flight_recorder, ignored);
  }

  /// Of three ranks, the second of which leaves when the others have made one call more.
  std::vector<FlightLog> record_departure_of_rank_1();

  nn::test::TemporaryDirectory directory_;
};

void all_gather(Communicator& world, std::size_t bytes, std::string_view label = "h.1") {
  const std::vector<std::uint8_t> in(bytes);
  std::vector<std::uint8_t> out(bytes * static_cast<std::size_t>(world.size()));
  world.all_gather(comm::view_of(in.data(), in.size()), comm::view_of(out.data(), out.size()), {.label = label}).wait();
}

/// Issues it, counts `issued` down and waits: a rank that waits for `issued` leaves after the others have called.
void all_gather(Communicator& world, std::size_t bytes, std::string_view label, std::latch& issued) {
  const std::vector<std::uint8_t> in(bytes);
  std::vector<std::uint8_t> out(bytes * static_cast<std::size_t>(world.size()));
  Work work =
      world.all_gather(comm::view_of(in.data(), in.size()), comm::view_of(out.data(), out.size()), {.label = label});
  issued.count_down();
  work.wait();
}

std::vector<FlightLog> PostmortemTest::record_departure_of_rank_1() {
  std::latch issued(2);
  return record(3, [&](Communicator& world) {
    all_gather(world, 8);
    if (world.rank() == 1) return issued.wait();
    all_gather(world, 8, "h.2", issued);
  });
}

TEST_F(PostmortemTest, HealthyRanksDoNotDiverge) {
  std::atomic<int> hashes{0};
  const auto logs = record(4, [&](Communicator& world) {
    const auto pair = world.split(world.rank() / 2, world.rank());
    for (int step = 1; step <= 3; ++step) {
      comm::record_step(world, step);
      all_gather(world, 100);
      all_gather(*pair, 50, "pair");
      world.barrier().wait();
    }
    hashes += static_cast<int>(world.traffic().calls());
  });
  ASSERT_EQ(logs.size(), 4U);
  EXPECT_EQ(find_first_divergence(logs), std::nullopt);
  EXPECT_EQ(hashes, 4 * 6);  // the recorder's own collective is not counted
  for (const FlightLog& log : logs) {
    EXPECT_EQ(log.end, FlightEnd::closed);
    EXPECT_EQ(log.ranks, 4);
    EXPECT_EQ(log.backend, "shm");
    ASSERT_EQ(log.calls.size(), 9U);
    EXPECT_EQ(log.calls[0].label, "h.1");
    EXPECT_EQ(log.calls[0].bytes, 400U);
    EXPECT_EQ(log.calls[3].step, 2);
    EXPECT_EQ(log.calls[1].state, comm::flight::State::done);
    EXPECT_GE(log.calls[1].ended_ns, log.calls[1].issued_ns);
    EXPECT_EQ(log.groups.at(0).name, "world");
    EXPECT_THAT(log.groups.at(0).members, ElementsAre(0, 1, 2, 3));
    EXPECT_EQ(log.groups.at(1).name, "world.1");
    EXPECT_EQ(log.groups.at(1).members, log.rank < 2 ? std::vector<int>({0, 1}) : std::vector<int>({2, 3}));
  }
}

/// The file numbers calls as the errors of the backend do, also after a split.
TEST_F(PostmortemTest, NumbersAreThoseOfErrors) {
  std::string error;
  const auto logs = record(2, [&](Communicator& world) {
    const auto part = world.split(0, world.rank());
    const auto part_of_part = part->split(0, world.rank());
    all_gather(*part, 10);
    all_gather(world, 10);
    if (world.rank() == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    try {
      all_gather(*part, 10, "late");
    } catch (const base::Timeout& late) {
      error = late.what();
    }
  });
  ASSERT_EQ(logs.size(), 2U);
  ASSERT_EQ(logs[0].calls.size(), 3U);
  EXPECT_EQ(logs[0].calls.back().label, "late");
  EXPECT_NE(error.find("all_gather #" + std::to_string(logs[0].calls.back().sequence) + " (late)"), std::string::npos)
      << error;
  EXPECT_LT(logs[0].calls[0].sequence, logs[0].calls.back().sequence);
}

TEST_F(PostmortemTest, NamesRankThatCallsAnotherSize) {
  for (const bool check : {false, true}) {
    const auto logs = record(
        4,
        [](Communicator& world) {
          comm::record_step(world, 7);
          all_gather(world, 64);
          all_gather(world, world.rank() == 1 ? 32 : 64);
        },
        check);
    const auto found = find_first_divergence(logs);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->kind, FirstDivergence::Kind::differs);
    EXPECT_THAT(found->ranks, ElementsAre(1));
    EXPECT_EQ(found->sequence, 3U);  // the first one was the recorder's own
    EXPECT_EQ(found->calls.at(1).bytes, 128U);
    EXPECT_EQ(found->calls.at(0).bytes, 256U);
    EXPECT_EQ(found->calls.at(0).step, 7);
    EXPECT_FALSE(logs[0].failures.empty());
  }
}

TEST_F(PostmortemTest, NamesRankThatCallsAnotherOperation) {
  const auto logs = record(3, [](Communicator& world) {
    if (world.rank() == 2)
      world.barrier().wait();
    else
      all_gather(world, 8);
  });
  const auto found = find_first_divergence(logs);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FirstDivergence::Kind::differs);
  EXPECT_THAT(found->ranks, ElementsAre(2));
  EXPECT_EQ(found->calls.at(2).kind, comm::OpKind::barrier);
}

TEST_F(PostmortemTest, DetectsAnotherUnitOfTheSameSize) {
  const auto logs = record(3, [](Communicator& world) { all_gather(world, 8, world.rank() == 0 ? "h.2" : "h.1"); });
  const auto found = find_first_divergence(logs);
  ASSERT_TRUE(found);
  EXPECT_THAT(found->ranks, ElementsAre(0));
}

/// Rank 1 leaves; rank 0 waits for it, and ranks 2 and 3 wait for rank 0 in other communicators.
TEST_F(PostmortemTest, NamesRankThatWaitsForNoOther) {
  const auto logs = record(4, [](Communicator& world) {
    const auto low = world.split(world.rank() < 2 ? 0 : 1, world.rank());
    all_gather(world, 8);
    if (world.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      throw base::SystemError("the disk is full");
    }
    if (world.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      all_gather(*low, 8, "below");
    } else {
      all_gather(world, 8, "above");
    }
  });
  const auto found = find_first_divergence(logs);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FirstDivergence::Kind::never_called);
  EXPECT_THAT(found->ranks, ElementsAre(1));
  EXPECT_EQ(logs[1].failures.back().text, "the disk is full");
}

/// Groups that only their members know; rank 3 makes fewer of them.
TEST_F(PostmortemTest, NamesRankThatIsMissingInGroup) {
  std::latch issued(2);
  const auto logs = record(4, [&](Communicator& world) {
    if (world.rank() < 2) world.create_group(std::array{0, 1})->barrier().wait();
    if (world.rank() == 0) return;
    const auto group = world.create_group(std::array{3, 1, 2});
    all_gather(*group, 8);
    if (world.rank() == 3) {
      issued.wait();
      throw base::SystemError("the disk is full");
    }
    all_gather(*group, 8, "block.1", issued);
  });
  const auto found = find_first_divergence(logs);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FirstDivergence::Kind::never_called);
  EXPECT_THAT(found->ranks, ElementsAre(3));
  EXPECT_THAT(found->group.members, ElementsAre(3, 1, 2));
  EXPECT_EQ(found->group.name, "world.group0.1");
}

TEST_F(PostmortemTest, RanksWithoutFileAreNamed) {
  auto logs = record_departure_of_rank_1();
  EXPECT_THAT(find_first_divergence(logs)->ranks, ElementsAre(1));
  EXPECT_EQ(find_first_divergence(logs)->kind, FirstDivergence::Kind::never_called);
  logs.erase(logs.begin() + 1);
  const auto found = find_first_divergence(logs);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FirstDivergence::Kind::no_file);
  EXPECT_THAT(found->ranks, ElementsAre(1));
  EXPECT_EQ(found->sequence, 3U);
}

/// Rank 0 has noticed that rank 1 left before rank 2 saw the end of its last call.
TEST_F(PostmortemTest, RankWhoseCallFailedIsNoCause) {
  auto logs = record_departure_of_rank_1();
  ASSERT_EQ(logs[2].calls.size(), 2U);
  logs[2].calls.pop_back();
  EXPECT_THAT(find_first_divergence(logs)->ranks, ElementsAre(1, 2));  // the negative control
  logs[2].calls.back().state = comm::flight::State::failed;
  EXPECT_THAT(find_first_divergence(logs)->ranks, ElementsAre(1));
}

TEST_F(PostmortemTest, NamesRankThatDiesInCallOfAll) {
  auto logs = record(3, [](Communicator& world) { all_gather(world, 8); });
  EXPECT_EQ(find_first_divergence(logs), std::nullopt);
  for (FlightLog& log : logs) {  // as if rank 2 had been killed: a thread can't be
    log.calls.back().state = log.rank == 2 ? comm::flight::State::waiting : comm::flight::State::failed;
    log.end = log.rank == 2 ? FlightEnd::none : FlightEnd::exception;
    if (log.rank != 2) log.failures.push_back({0, "PeerLost: rank 2 died"});
  }
  const auto found = find_first_divergence(logs);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, FirstDivergence::Kind::died_in);
  EXPECT_THAT(found->ranks, ElementsAre(2));
  logs[2].end = FlightEnd::exception;  // the negative control
  EXPECT_EQ(find_first_divergence(logs), std::nullopt);
}

/// Rank 0 makes one call more, so only rank 1's file still has the first call.
TEST_F(PostmortemTest, OverwrittenCallsAreNoDivergence) {
  const auto logs = record(2, [](Communicator& world) {
    const auto once = world.split(0, world.rank());
    const auto alone = world.split(world.rank() == 0 ? 0 : -1, 0);
    all_gather(*once, 8, "once");
    if (alone != nullptr) alone->barrier().wait();
    for (std::uint32_t i = 1; i < comm::flight::kEntries; ++i) all_gather(world, 8);
  });
  for (const FlightLog& log : logs) {
    EXPECT_EQ(log.calls.size(), comm::flight::kEntries);
    EXPECT_EQ(log.calls.back().sequence, comm::flight::kEntries + 2) << "two splits count";
    EXPECT_EQ(log.calls.front().label == "once", log.rank == 1);
  }
  EXPECT_EQ(find_first_divergence(logs), std::nullopt);
}

/// A run may be looked at while it hangs: a rank that goes on writes entries while they are read.
TEST_F(PostmortemTest, EntriesOfRunningRankAreWhole) {
  comm::InitOptions config{.backend = "shm"};
  config.flight_recorder = directory_.path("flight");
  std::size_t mixed = 0;
  std::size_t calls = 0;
  comm::run_threads(1, config, [&](Communicator& world) {
    std::atomic<bool> read{false};
    std::thread reader([&] {
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
      for (int i = 0; i < 2000 && std::chrono::steady_clock::now() < until; ++i)
        for (const FlightCall& call : read_flight_log(*config.flight_recorder + "/rank-0.flight").calls) {
          ++calls;
          mixed += call.label == std::to_string(call.bytes) ? 0 : 1;
        }
      read = true;
    });
    for (std::size_t bytes = 1; !read; bytes = bytes % 5000 + 1) all_gather(world, bytes, std::to_string(bytes));
    reader.join();
  });
  EXPECT_GT(calls, 1000U);
  EXPECT_EQ(mixed, 0U);
}

TEST_F(PostmortemTest, MessagesAreRecorded) {
  const auto logs = record(2, [](Communicator& world) {
    const float out = 1;
    float in = 0;
    const std::array parts{comm::P2POp::send(comm::view_of(&out, 1), 1 - world.rank()),
                           comm::P2POp::recv(comm::view_of(&in, 1), 1 - world.rank())};
    world.batch(parts).wait();
    world.batch({}).wait();
  });
  ASSERT_EQ(logs[0].calls.size(), 2U);
  EXPECT_EQ(logs[0].calls[0].kind, comm::OpKind::send);
  EXPECT_EQ(logs[0].calls[1].root, 1);
  for (const FlightCall& call : logs[0].calls) {
    EXPECT_EQ(call.state, comm::flight::State::done);
    EXPECT_EQ(call.bytes, 4U);
    EXPECT_EQ(call.sequence, 0U);
  }
}

TEST_F(PostmortemTest, FilesOfAnOlderRunAreIgnored) {
  record(4, [](Communicator& world) { all_gather(world, 8); });
  const auto logs = record(2, [](Communicator& world) { all_gather(world, 8); });
  ASSERT_EQ(logs.size(), 2U);
  EXPECT_EQ(find_first_divergence(logs), std::nullopt);
}

}  // namespace
}  // namespace tessera::tools
