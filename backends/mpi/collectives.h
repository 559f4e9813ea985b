// Collectives that run as MPI's own non-blocking ones. They can't be cancelled: once one is abandoned, this process
// makes no further MPI calls, and without such calls MPI moves no data.
#pragma once

#include <mpi.h>

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "backends/mpi/library.h"
#include "tessera/comm/native_collectives.h"
#include "tessera/comm/types.h"

namespace tessera::comm::mpi {

/// f16, bf16 and bool are transferred as integers of their size: only this library's operations compute with them.
MPI_Datatype mpi_type(DType dtype) noexcept;

/// Reduce operations, nearly all implemented by this library: MPI has no 16-bit floats, and its minimum and maximum may
/// lose a NaN; MPICH 4.0 compares unsigned integers as signed ones, and Open MPI 4.1 adds bytes without wrapping.
/// Created on first use, under the engine's lock.
class MpiReduceOps {
 public:
  /// `kind`: sum, prod, min, max or one of the bits.
  MPI_Op of(ReduceOp::Kind kind, DType dtype) noexcept;
  /// Frees the created operations.
  void free() noexcept;

 private:
  std::array<std::array<MPI_Op, kReduceKinds>, kDTypes.size()> own_ = [] {  // by type and kind
    decltype(own_) none;
    for (auto& row : none) row.fill(MPI_OP_NULL);
    return none;
  }();
};

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
  explicit MpiCollectives(Settings settings) : settings_(std::move(settings)) {}
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
