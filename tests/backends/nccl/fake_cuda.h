// Streams and events of the fake.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/backends/nccl/fake_nccl.h"

namespace tessera::nccl_test {

struct FakeStream;

/// A point in a stream's order.
struct Mark {
  std::shared_ptr<FakeStream> stream;
  bool reached = false;
};

struct FakeStream : std::enable_shared_from_this<FakeStream> {
  using Task = std::function<bool()>;  ///< false: not ready, retry later
  int device = 0;
  std::deque<Task> tasks;
  bool running = false;
  void run();
};

/// A gather by copy engines. It waits for its peers in the stream, where an abort does not reach it.
struct CopyEngineCall {
  int device = 0;
  std::shared_ptr<bool> aborted;
  bool done = false;
  bool never_ends() const { return *aborted && !done; }
};

struct FakeEvent {
  int device = 0;
  std::shared_ptr<Mark> mark;
};

/// All state of the fake, under one lock.
struct FakeState {
  std::recursive_mutex mutex;
  FakeOptions options;
  FakeCounts counts;
  std::set<std::string> environment;   ///< "NAME=VALUE" of the variables set
  std::multiset<const void*> windows;  ///< memory that is a window of a communicator
  std::set<int> broken;                ///< world ranks
  ncclResult_t break_error = ncclSuccess;
  std::vector<std::shared_ptr<CopyEngineCall>> copy_engine_calls;
  void complain(const std::string& what);
};
FakeState& fake_state();
inline std::lock_guard<std::recursive_mutex> fake_lock() {
  return std::lock_guard<std::recursive_mutex>(fake_state().mutex);
}

/// Handle 0 is the default stream of the thread's device.
FakeStream& stream_of(cudaStream_t stream);
FakeStream& default_stream(int device);
int current_device();
/// Creates the context of the thread's device, as all calls that work on a device do.
void enter_context();
void add_cuda(comm::nccl::NcclApi& api);
void add_nccl(comm::nccl::NcclApi& api);

}  // namespace tessera::nccl_test
