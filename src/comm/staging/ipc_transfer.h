// A call whose memory the ranks of a host read from each other: a state machine, as Part is.
//
// Every rank tells every other where its memory is. If all of it is in windows that the readers could open, each reads
// what it needs on a stream of its own, and all meet when they have: no event of a device crosses a process. Otherwise
// all of them know that the call has to be staged.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/stream.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/staging/ipc_state.h"
#include "tessera/comm/staging/read_plan.h"

namespace tessera::comm::staging {

class StagedOperation;

class IpcTransfer {
 public:
  /// Stays valid: `call`.
  IpcTransfer(StagedOperation& operation, const OpDesc& call);

  /// Moves what can be. `may_begin`: the calls before it have told their peers all that they have to.
  bool advance(bool may_begin);
  /// After a failure: true when nothing of it is under way any more.
  bool drained();

  bool staged() const noexcept { return stage_ == Stage::staged; }  ///< by the ranks' agreement
  bool told() const noexcept { return stage_ >= Stage::parting; }   ///< all that the peers have to know
  bool done() const noexcept { return stage_ == Stage::done; }
  /// Waits for the other ranks, by an operation that has the deadline.
  bool talking() const noexcept { return talking_; }

 private:
  enum class Stage : std::uint8_t { waiting, offering, voting, reading, meeting, collecting, staged, parting, done };

  /// What a rank tells another of a call. Travels between processes as it is.
  struct IpcDescriptor {
    std::uint64_t call = 0;  ///< what is called, as a number
    WindowLocation in;       ///< what the other reads
    std::uint64_t bytes = 0;
    WindowLocation out;  ///< of the second round
    double factor = 0;
    bool usable = true;
    bool fresh = false;  ///< somebody may have to open a window for the first time
  };

  bool step();
  void offer();
  IpcDescriptor offer_to(int reader);
  void place(IpcDescriptor& offer, WindowLocation& where, const void* data, std::size_t bytes, int reader);
  void decide();
  void check(const IpcDescriptor& offer, int owner) const;
  void open_all();
  void read();
  void add_up();
  void collect();
  void count_bytes();
  void give_up();
  void talk(OpKind kind, ConstView in, View out, Stage stage);
  std::byte* out_at(std::size_t element) const;

  StagedOperation& operation_;
  const OpDesc& call_;
  IpcState& sharing_;
  const int rank_;
  const int ranks_;
  const ReadPlan reads_;
  const std::size_t size_;  ///< of an element
  const std::string name_;  ///< of the call, in errors and as the label of what is told
  Stage stage_ = Stage::waiting;
  std::vector<IpcDescriptor> mine_;    ///< to each rank
  std::vector<IpcDescriptor> theirs_;  ///< of each rank
  std::vector<const std::byte*> sources_;
  std::vector<const std::byte*> sums_;  ///< where each rank has its slice of the result
  std::vector<std::uint8_t> votes_;
  std::uint8_t vote_ = 1;
  Work work_;
  bool talking_ = false;
  struct Told {
    OpKind kind = OpKind::barrier;
    std::size_t bytes = 0;  ///< to each rank
  } told_;                  ///< by work_
  Event event_;
};

}  // namespace tessera::comm::staging
