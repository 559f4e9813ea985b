// Reading the memory of another process: the data arrives, and a dead process is distinguished from unmapped memory.
#include "tessera/comm/transport/cma.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/bootstrap/thread_bootstrap.h"

namespace tessera::comm_test {
namespace {

using namespace comm;

/// A child that fills `memory` with 7, 8, ... after the fork, reports it, and waits to be killed.
class Child {
 public:
  explicit Child(std::vector<std::byte>& memory) {
    int ends[2];
    if (::pipe(ends) != 0) std::abort();
    pid_ = ::fork();
    if (pid_ == 0) {
      for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i + 7);
      [[maybe_unused]] const ssize_t n = ::write(ends[1], "x", 1);
      for (;;) ::pause();
    }
    char ready = 0;
    [[maybe_unused]] const ssize_t n = ::read(ends[0], &ready, 1);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~Child() { end(); }
  void end() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    gone_ = std::exchange(pid_, 0);
  }
  pid_t pid() const { return pid_ > 0 ? pid_ : gone_; }

 private:
  pid_t pid_ = 0;
  pid_t gone_ = 0;
};

TEST(Cma, ReadsMemoryOfOwner) {
  std::vector<std::byte> memory(300'001, std::byte{1});
  const Child child(memory);
  std::vector<std::byte> copy(memory.size() - 3);
  ASSERT_TRUE(cma_read(child.pid(), 1, memory.data() + 3, copy.data(), copy.size()));
  for (std::size_t i = 0; i < copy.size(); ++i) ASSERT_EQ(copy[i], static_cast<std::byte>(i + 3 + 7)) << i;
  EXPECT_EQ(memory[5], std::byte{1});
}

TEST(Cma, DistinguishesDeadProcessFromUnmappedMemory) {
  std::vector<std::byte> memory(100);
  Child child(memory);
  std::byte to[100];
  void* nowhere = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  try {
    cma_read(child.pid(), 1, static_cast<std::byte*>(nowhere), to, sizeof(to));
    ADD_FAILURE() << "memory that nobody may read was read";
  } catch (const SystemError& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("rank 1 (process "),
                                             testing::HasSubstr("set TESSERA_CMA=0 on all ranks")));
  }
  ::munmap(nowhere, 4096);
  child.end();
  EXPECT_FALSE(cma_read(child.pid(), 1, memory.data(), to, sizeof(to)));
}

/// Each rank's result, where the ranks are threads.
std::vector<std::vector<int>> neighbours(int ranks) {
  std::vector<std::vector<int>> all(static_cast<std::size_t>(ranks));
  auto bootstraps = make_thread_bootstraps(ranks, std::chrono::seconds(20));
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < all.size(); ++r) threads.emplace_back([&, r] { all[r] = cma_processes(*bootstraps[r]); });
  for (std::thread& thread : threads) thread.join();
  return all;
}

TEST(Cma, ReachesOtherRanksOfHostUnlessDisabled) {
  const pid_t me = ::getpid();
  EXPECT_THAT(neighbours(3), testing::ElementsAre(testing::ElementsAre(0, me, me), testing::ElementsAre(me, 0, me),
                                                  testing::ElementsAre(me, me, 0)));
  ::setenv("TESSERA_CMA", "0", 1);
  EXPECT_THAT(neighbours(3), testing::Each(testing::Each(0)));
  ::setenv("TESSERA_CMA", "2", 1);
  EXPECT_THROW(cma_processes(*make_thread_bootstraps(1, std::chrono::seconds(1)).front()), InvalidUsage);
  ::unsetenv("TESSERA_CMA");
}

}  // namespace
}  // namespace tessera::comm_test
