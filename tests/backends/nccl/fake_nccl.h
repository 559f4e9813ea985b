// The vendor's functions on ordinary memory, for ranks that are threads: what a real device may do at the latest, this
// one does only then. Its streams are lazy: nothing runs until somebody asks for an event behind it. Communicators are
// non-blocking: each call is in progress until that was asked for a few times, and only then on the stream.
//
// Reductions add like the reference. It complains (an error, of which the tests learn) about what the vendor forbids:
// a call on a communicator that is still in progress, a reduce operation that is gone, a stream of another device,
// blocking communicators.
#pragma once

#include <cstdint>
#include <string>

#include "backends/nccl/api.h"

namespace tessera::nccl_test {

struct FakeOptions {
  int devices = 8;
  int polls = 3;             ///< how often a call is asked for before it is not in progress any more
  bool init_hangs = false;   ///< communicators never get ready
  bool abort_hangs = false;  ///< until the options change
  int driver_error = 0;      ///< what cudaGetDeviceCount says
  int version = 22809;
};

/// What exists now, and how often something was done.
struct FakeCounts {
  int communicators = 0;
  int streams = 0;
  int events = 0;
  int blocks = 0;         ///< of device and pinned memory
  int registrations = 0;  ///< of memory with a communicator
  int reduce_ops = 0;
  std::uint64_t queries = 0;  ///< of events: each time the host waits for a device it asks at least once
  int complaints = 0;
  std::string complaint;  ///< the first one
  bool nothing_left() const {
    return communicators == 0 && streams == 0 && events == 0 && blocks == 0 && registrations == 0 && reduce_ops == 0;
  }
};

/// All functions. One fake exists in a process.
const comm::nccl::NcclApi& fake_api();
/// Forgets the counts and sets the options.
void reset_fake(const FakeOptions& options = {});
void change_fake(const FakeOptions& options);
FakeCounts fake_counts();
/// From now on the communicators of this world rank report an asynchronous error, and their kernels don't move.
void break_link(int rank, ncclResult_t error);

}  // namespace tessera::nccl_test
