// Failures of communicators that their members make without the others, with ranks as threads.
#include <array>
#include <regex>
#include <thread>

#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

class GroupFailure : public testing::TestWithParam<const char*> {
 protected:
  void run_ranks(int ranks, const std::function<void(Communicator&)>& body) {
    InitOptions config;
    config.backend = GetParam();
    config.timeout = 20s;
    run_threads(ranks, config, body);
  }
};

TEST_P(GroupFailure, NamesTheMemberThatDoesNotCome) {
  const std::regex expected(  // made here: the library's parser of patterns is not safe in several threads
      "Timeout: (send to|recv from) rank 1( #1)? \\(pipeline\\): not done within "
      "300ms; rank 1 has not posted the matching send or receive");
  run_ranks(4, [&](Communicator& comm) {
    if (comm.rank() == 3) {  // no member, but its communicator fails, too
      EXPECT_NE(error_of([&] { comm.recv({}, 0).wait(); }).find("rank 1 has not posted"), std::string::npos);
      return;
    }
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(1500ms);
      return;
    }
    const std::string error = error_of([&] {
      comm.create_group(std::array{0, 1, 2}, {.timeout = 300ms, .label = "pipeline"});
    });
    EXPECT_TRUE(std::regex_match(error, expected)) << error;
    EXPECT_EQ(error_of([&] { comm.barrier().wait(); }), error);
  });
}

TEST_P(GroupFailure, DifferingListsAreMismatch) {
  const auto start = std::chrono::steady_clock::now();
  run_ranks(3, [](Communicator& comm) {
    const std::vector<int> members = comm.rank() == 1 ? std::vector{2, 1, 0} : std::vector{0, 1, 2};
    const std::string error = error_of([&] { comm.create_group(members); });
    EXPECT_TRUE(error.starts_with("Mismatch: create_group: rank ")) << error;
    EXPECT_NE(error.find(" listed other members than this rank's "), std::string::npos) << error;
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

/// The failure of a group is its own.
TEST_P(GroupFailure, ParentSurvivesTheFailureOfAGroup) {
  run_ranks(3, [](Communicator& comm) {
    if (comm.rank() < 2) {
      const auto group = comm.create_group(std::array{0, 1});
      std::vector<float> x(10);
      if (group->rank() == 0) group->abort("enough");
      const std::string error = error_of([&] { group->recv(view_of(x.data(), 10), 1 - group->rank()).wait(); });
      EXPECT_EQ(error, "Aborted: rank 0 aborted: enough");
    }
    comm.barrier().wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, GroupFailure, testing::Values("shm", "tcp"),
                         [](const auto& which) { return std::string(which.param); });

}  // namespace
}  // namespace tessera::comm_test
