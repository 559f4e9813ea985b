// Whole collectives as MPI's own non-blocking ones. They can't be taken back: where one is given up, MPI is not called
// any more in this process, and without a call of ours it moves nothing.
#pragma once

#include <mpi.h>

#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/base_names.h"
#include "backends/mpi/library.h"
#include "backends/mpi/reduce_ops.h"
#include "tessera/comm/native_collectives.h"

namespace tessera::comm::mpi {

/// What one call of MPI moves at most, in bytes of the larger buffer: counts of MPI are int, and so is what some of its
/// collectives calculate inside.
inline constexpr std::size_t kLongestPiece = std::size_t{1} << 30;

class MpiCollectives final : public NativeCollectives {
 public:
  struct Settings {
    const Ranks* ranks = nullptr;
    int rank = 0;
    std::size_t longest_piece = kLongestPiece;
    std::function<bool(int code)> good;  ///< told what MPI returns; false: it has failed, once and for all
    std::function<void(const std::string& why)> failed;
    std::function<void()> given_up;  ///< to be left alone from now on
  };
  explicit MpiCollectives(Settings settings);
  ~MpiCollectives() = default;
  MpiCollectives(const MpiCollectives&) = delete;
  MpiCollectives& operator=(const MpiCollectives&) = delete;

  std::unique_ptr<NativeCommunicator> whole_world() override;
  bool prefers(const CollectiveSpec& problem) const noexcept override;
  void start(NativeRequest& collective) noexcept override;
  void give_up(NativeRequest& collective) noexcept override;

  /// True: one has ended.
  bool poll() noexcept;
  bool idle() const noexcept { return requests_.empty() && copies_.empty(); }
  /// No call any more. `leave`: MPI may still look at what it was given.
  void close(bool leave) noexcept;
  bool closed() const noexcept { return closed_; }

 private:
  class Issue;
  struct Copy {  ///< a communicator that is being made
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
  std::vector<Copy> copies_;            ///< beside them: one that fails is no failure of the others
  std::vector<int> done_;               ///< space for MPI_Testsome
  bool closed_ = false;
};

}  // namespace tessera::comm::mpi
