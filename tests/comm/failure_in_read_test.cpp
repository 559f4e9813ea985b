// A peer that fails while its data are being read: the read must not count as valid.
#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <thread>

#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

/// A page whose first access stops the thread that makes it, until go_on() is called.
class StoppingPage {
 public:
  StoppingPage() {
    page_ = ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page_ == MAP_FAILED) throw std::runtime_error("mmap");
    the_ = this;
    struct sigaction action {};
    action.sa_sigaction = [](int, siginfo_t* info, void*) { the_->stop(info->si_addr); };
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGSEGV, &action, &before_);
  }
  ~StoppingPage() {
    ::sigaction(SIGSEGV, &before_, nullptr);
    ::munmap(page_, kBytes);
  }
  StoppingPage(const StoppingPage&) = delete;
  StoppingPage& operator=(const StoppingPage&) = delete;

  float* data() const { return static_cast<float*>(page_); }
  bool wait_until_stopped() const {
    for (int i = 0; i < 10'000 && !stopped_; ++i) std::this_thread::sleep_for(1ms);
    return stopped_;
  }
  void go_on() { goes_on_ = true; }

 private:
  static constexpr std::size_t kBytes = std::size_t{1} << 21;
  static inline StoppingPage* the_ = nullptr;

  /// In the handler of a fault: atomics and system calls only.
  void stop(const void* at) {
    if (at < page_ || at >= static_cast<const std::byte*>(page_) + kBytes) ::_exit(139);
    stopped_ = true;
    const timespec a_while{0, 1'000'000};
    for (int i = 0; i < 10'000 && !goes_on_; ++i) ::nanosleep(&a_while, nullptr);
    ::mprotect(page_, kBytes, PROT_READ | PROT_WRITE);
  }

  void* page_ = nullptr;
  struct sigaction before_ {};
  std::atomic<bool> stopped_ = false, goes_on_ = false;
};

/// The error of a rank that receives `count` elements of a broadcast, whose root aborts or not in the middle.
std::string error_of_reader(std::size_t count, bool aborts) {
  StoppingPage out;
  std::string error = "did not run";
  run_ranks(2, [&](Communicator& comm) {
    if (comm.rank() == 0) {
      std::vector<float> x(count, 7);
      Work work = comm.broadcast(view_of(x.data(), count), view_of(x.data(), count), 0);
      EXPECT_TRUE(out.wait_until_stopped());
      if (aborts) comm.abort("enough");
      out.go_on();
      if (!aborts) work.wait();
    } else {
      error = error_of([&] { comm.broadcast(view_of(out.data(), count), view_of(out.data(), count), 0).wait(); });
      if (error.empty()) {
        EXPECT_EQ(out.data()[count - 1], 7);
      }
    }
  });
  return error;
}

TEST(FailureInRead, IsTheErrorOfTheReader) {
  for (const std::size_t count : {4u, 30'000u, 300'000u}) {
    EXPECT_EQ(error_of_reader(count, true), "Aborted: rank 0 aborted: enough") << count;
    EXPECT_EQ(error_of_reader(count, false), "") << count << ": the control";
  }
}

}  // namespace
}  // namespace tessera::comm_test
