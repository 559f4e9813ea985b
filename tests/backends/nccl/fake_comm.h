// The fake's communicators: creation, calls in progress, and end.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/backends/nccl/fake_clique.h"

namespace tessera::nccl_test {

struct FakeComm {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  int world_rank = 0;
  int device = 0;
  std::uint64_t rounds = 0;
  std::uint64_t splits = 0;
  std::uint64_t window_rounds = 0;
  /// A window's place in the rank's own table, which NCCL takes for the other ranks' place, too.
  struct Window {
    std::size_t bytes = 0;
    std::size_t offset = 0;
  };
  std::map<const std::byte*, Window> windows;  ///< by address
  int registrations = 0;
  bool zero_policy = false;
  int polls_left = 0;
  std::function<bool()> ready;  ///< further condition beside the polls; null: none
  std::vector<std::pair<cudaStream_t, FakeStream::Task>> held;
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);  ///< one for all that share resources
  bool shares = false;
  bool blocking = true;
  int calls = 0;  ///< that have not returned
  bool revoked = false;
  bool created = false;  ///< until then its creation waits for the other ranks, and an abort frees nothing
  bool finalized = false;
  std::vector<std::pair<ReduceOp, bool>> ops;  ///< created ops, and whether they still exist

  bool in_progress() const { return polls_left > 0 || (ready != nullptr && !ready()); }
  ncclResult_t start() {
    polls_left = fake_state().options.polls;
    return polls_left > 0 || ready != nullptr ? ncclInProgress : ncclSuccess;
  }
};

inline FakeComm& comm_of(ncclComm_t comm) { return *reinterpret_cast<FakeComm*>(comm); }
inline ncclComm_t handle_of(FakeComm* comm) { return reinterpret_cast<ncclComm_t>(comm); }

/// The result of a call that has begun with `begun`: of a blocking communicator when it has ended.
ncclResult_t finish(FakeComm& comm, ncclResult_t begun);
/// Complains.
ncclResult_t refuse(const std::string& why);
void forget_worlds();
/// The offset of the memory in the rank's table; none: it is in no window of the communicator.
std::optional<std::size_t> find_offset(const FakeComm& comm, const void* data, std::size_t bytes);
void add_windows(comm::nccl::NcclApi& api);
void add_communicators(comm::nccl::NcclApi& api);

}  // namespace tessera::nccl_test
