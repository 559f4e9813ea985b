// NCCL's functions on ordinary memory, for ranks that are threads. The fake does everything as late as a real device
// may. Its streams are lazy: nothing runs until a caller queries or waits for a later event. A call of a communicator
// is in progress until it has been polled a few times, and only then runs on the stream; a blocking one polls by
// itself, and returns early with an error when the communicator is aborted.
//
// Reductions add like the reference. The fake reports a complaint (an error that the tests check) for everything that
// NCCL forbids: windows whose sizes or offsets differ between ranks, memory that is freed while it is a window, a call
// on a communicator that is still in progress, an abort beside a call, a communicator that is used after one that it
// shares resources with was aborted, a destroyed reduce operation, a stream of another device.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "backends/nccl/api.h"

namespace tessera::nccl_test {

struct FakeOptions {
  int devices = 8;
  int polls = 3;              ///< number of polls for which a call stays in progress
  int delay_ms = 0;           ///< between the begin of a call and its look at the communicator
  bool non_blocking = false;  ///< as with NCCL_COMM_BLOCKING=0
  bool connects = false;      ///< a rank's first call with another one lasts until that one makes its first call, too
  bool revokes = true;        ///< whether ncclCommRevoke does anything
  bool calls_end = false;     ///< calls in progress end with an error, for the end of a test
  bool close_hangs = false;   ///< ncclCommFinalize lasts until the options change, also after an abort
  bool init_hangs = false;    ///< communicators never become ready
  bool abort_hangs = false;   ///< until the options change
  int driver_error = 0;       ///< result of cudaGetDeviceCount
  int version = 22809;
  int window_fails = -1;      ///< world rank on which making a window ends with an error
  bool fails_early = false;   ///< before it has met the other ranks
  bool windows_hang = false;  ///< making a window lasts until an abort
  bool no_windows = false;    ///< as between devices that have no access to each other: the window is null
};

/// Live objects and event counts.
struct FakeCounts {
  int communicators = 0;
  int streams = 0;
  int events = 0;
  int blocks = 0;         ///< of device and pinned memory
  int registrations = 0;  ///< of memory with a communicator
  int windows = 0;        ///< symmetric ones
  int reduce_ops = 0;
  int kernel_loads = 0;  ///< of the library's own kernels
  int created = 0;       ///< communicators so far, of all ranks
  int shared = 0;        ///< those that share the resources of another one
  int revoked = 0;
  int windows_made = 0;       ///< so far, of all ranks
  int symmetric_calls = 0;    ///< calls of collectives whose buffers are in windows of their communicator
  int copy_engine_calls = 0;  ///< those of them that gather with the policy that uses no multiprocessors
  int zero_policies = 0;      ///< communicators with that policy so far
  std::map<int, std::set<std::thread::id>> callers;  ///< by world rank: threads that called a communicator
  std::set<int> contexts;     ///< devices: made current, or used by a thread, which without a choice uses device 0
  std::uint64_t queries = 0;  ///< of events: at least one for each time the host waits for a device
  int complaints = 0;
  std::string complaint;  ///< the first one
  bool nothing_left() const {
    return communicators == 0 && streams == 0 && events == 0 && blocks == 0 && registrations == 0 && windows == 0 &&
           reduce_ops == 0;
  }
};

/// All functions. A process has one fake.
const comm::nccl::NcclApi& fake_api();
/// Resets the counts and sets the options.
void reset_fake(const FakeOptions& options = {});
void change_fake(const FakeOptions& options);
FakeCounts fake_counts();
/// "NAME=VALUE" of the environment variables that the backend set.
std::set<std::string> fake_environment();
/// From now on the communicators of this world rank report an asynchronous error, and their kernels make no progress.
void break_link(int rank, ncclResult_t error);

}  // namespace tessera::nccl_test
