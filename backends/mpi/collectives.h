// Collectives that run as MPI's own non-blocking ones. They can't be cancelled: once one is abandoned, this process
// makes no further MPI calls, and without such calls MPI moves no data.
#pragma once

#include <mpi.h>

#include <functional>
#include <memory>
#include <vector>

#include "backends/mpi/library.h"
#include "backends/mpi/reduce_ops.h"
#include "tessera/comm/native_collectives.h"

namespace tessera::comm::mpi {

/// Maximum of one MPI call, in bytes of the larger buffer: counts of MPI are int, and some of its collectives compute
/// with int internally.
inline constexpr std::size_t kMaxChunk = std::size_t{1} << 30;

class MpiCollectives final : public NativeCollectives {
 public:
  struct Settings {
    const Ranks* ranks = nullptr;
    int rank = 0;
    std::size_t max_chunk = kMaxChunk;
    std::function<bool(int code)> good;  ///< called with what MPI returns; false: MPI has failed permanently
    std::function<void(const std::string& why)> failed;
    std::function<void()> abandoned;  ///< MPI must not be called from now on
  };
  explicit MpiCollectives(Settings settings);
  ~MpiCollectives() = default;
  MpiCollectives(const MpiCollectives&) = delete;
  MpiCollectives& operator=(const MpiCollectives&) = delete;

  std::unique_ptr<NativeCommunicator> whole_world() override;
  bool prefers(const CollectiveSpec& spec) const noexcept override;
  void start(NativeRequest& collective) noexcept override;
  void cancel(NativeRequest& collective) noexcept override;

  /// True: a collective has completed.
  bool poll() noexcept;
  bool idle() const noexcept { return requests_.empty() && copies_.empty(); }
  /// Makes no further calls. `leave`: MPI may still access its buffers.
  void close(bool leave) noexcept;
  bool closed() const noexcept { return closed_; }

 private:
  class Issue;
  struct Copy {  ///< a communicator that is being created
    MPI_Request request = MPI_REQUEST_NULL;
    int code = MPI_SUCCESS;  ///< of MPI_Comm_idup itself
    NativeRequest* owner = nullptr;
  };
  void start_copy(NativeRequest& collective) noexcept;
  bool poll_copies() noexcept;
  void copy_ended(NativeRequest& collective, int code) noexcept;
  bool poll_requests() noexcept;
  void request_done(std::size_t at) noexcept;

  const Settings settings_;
  MpiReduceOps operations_;
  std::vector<MPI_Request> requests_;
  std::vector<NativeRequest*> owners_;  ///< of `requests_`
  std::vector<Copy> copies_;            ///< separate: a failed one does not fail the others
  std::vector<int> done_;               ///< space for MPI_Testsome
  bool closed_ = false;
};

}  // namespace tessera::comm::mpi
