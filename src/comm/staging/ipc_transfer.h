// A call in which ranks of a host read each other's memory: a state machine, as StagedTransfer is.
//
// Every rank sends every other the location of its memory. If all of it is in windows that the readers could open, each
// rank reads what it needs on a stream of its own, and a barrier follows: no device event crosses processes. Otherwise
// all ranks know that the call must be staged.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/stream.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/staging/ipc_windows.h"

namespace tessera::comm::staging {

class StagedOperation;

class IpcTransfer {
 public:
  /// `call` must stay valid.
  IpcTransfer(StagedOperation& operation, const OpDesc& call);

  /// Progresses as far as possible. `may_begin`: earlier calls have sent all their messages to the peers.
  bool advance(bool may_begin);
  /// After a failure: true once nothing of it is in flight.
  bool drained();

  bool staged() const noexcept { return stage_ == Stage::staged; }     ///< as the ranks agreed
  bool all_sent() const noexcept { return stage_ >= Stage::closing; }  ///< all messages to the peers were sent
  bool done() const noexcept { return stage_ == Stage::done; }
  /// Waits for the other ranks, by an operation with the deadline.
  bool talking() const noexcept { return talking_; }

 private:
  enum class Stage : std::uint8_t {
    waiting,
    exchanging,
    voting,
    reading,
    synchronizing,
    collecting,
    staged,
    closing,
    done
  };

  /// A rank's message to another about a call. Sent between processes as raw bytes.
  struct IpcDescriptor {
    std::uint64_t call = 0;  ///< encodes the call
    WindowLocation in;       ///< what the other rank reads
    std::uint64_t bytes = 0;
    WindowLocation out;  ///< of the second round
    double factor = 0;
    bool usable = true;
    bool fresh = false;  ///< a rank may have to open a window for the first time
  };

  bool step();
  void exchange();
  IpcDescriptor descriptor_for(int reader);
  void place(IpcDescriptor& descriptor, WindowLocation& where, const void* data, std::size_t bytes, int reader);
  void decide();
  void check(const IpcDescriptor& descriptor, int owner) const;
  void open_all();
  void read();
  void add_up();
  void collect();
  void count_bytes();
  void fall_back();
  void talk(OpKind kind, ConstView in, View out, Stage stage);
  std::byte* out_at(std::size_t element) const;

  StagedOperation& operation_;
  const OpDesc& call_;
  IpcState& sharing_;
  const int rank_;
  const int ranks_;
  const ReadPlan reads_;
  const std::size_t size_;  ///< of an element
  const std::string name_;  ///< of the call, in errors and as the label of its messages
  Stage stage_ = Stage::waiting;
  std::vector<IpcDescriptor> mine_;    ///< sent to each rank
  std::vector<IpcDescriptor> theirs_;  ///< received from each rank
  std::vector<const std::byte*> sources_;
  std::vector<const std::byte*> sums_;  ///< each rank's slice of the result
  std::vector<std::uint8_t> votes_;
  std::uint8_t vote_ = 1;
  Work work_;
  bool talking_ = false;
  struct Sent {
    OpKind kind = OpKind::barrier;
    std::size_t bytes = 0;  ///< to each rank
  } sent_;                  ///< by work_
  Event event_;
};

}  // namespace tessera::comm::staging
