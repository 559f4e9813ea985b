#include "tessera/base/thread.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include "tessera/base/error.h"

namespace tessera::base {
namespace {

/// Signals that the thread which calls blocks.
bool blocks(int signal) {
  sigset_t blocked;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  return ::sigismember(&blocked, signal) == 1;
}

TEST(Thread, SystemWithoutMoreIsAnErrorWithTheRemedy) {
  pthread_attr_t before, huge;
  ASSERT_EQ(::pthread_getattr_default_np(&before), 0);
  ASSERT_EQ(::pthread_attr_init(&huge), 0);
  ASSERT_EQ(::pthread_attr_setstacksize(&huge, std::size_t{1} << 50), 0);  // more than a process can address
  ASSERT_EQ(::pthread_setattr_default_np(&huge), 0);
  std::string error;
  try {
    start_thread([] {}).join();
  } catch (const SystemError& thrown) {
    error = thrown.what();
  }
  ASSERT_EQ(::pthread_setattr_default_np(&before), 0);
  EXPECT_TRUE(error.starts_with("can't start a thread: ")) << error;
  EXPECT_NE(error.find("ulimit -u"), std::string::npos) << error;
  bool ran = false;
  start_thread([&] { ran = true; }).join();  // the control
  EXPECT_TRUE(ran);
}

TEST(Thread, OfTheLibraryTakesNoSignals) {
  bool ours = false, fault = true, programs = true;
  start_thread([&] { ours = blocks(SIGTERM) && blocks(SIGUSR1), fault = blocks(SIGSEGV); }).join();
  start_program_thread([&] { programs = blocks(SIGTERM); }).join();
  EXPECT_TRUE(ours);
  EXPECT_FALSE(fault);
  EXPECT_FALSE(programs);  // as the caller's
  EXPECT_FALSE(blocks(SIGTERM));
}

}  // namespace
}  // namespace tessera::base
