// Executes one operation in flight: a schedule or a single message.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/memory_pool.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/core/driven_work.h"
#include "tessera/comm/native_collectives.h"
#include "tessera/comm/schedule.h"
#include "tessera/comm/transport.h"

namespace tessera::comm::host {

class HostGroup;

inline constexpr std::string_view kMessageAlgorithm = "direct";  ///< of sends and receives

class ScheduleExecutor final : public DrivenWork, public MessageOwner, public NativeOwner {
 public:
  /// Called on the caller's thread, before submission.
  void prepare(std::shared_ptr<HostGroup> owner, const OpDesc& what, std::uint64_t number);
  void take(std::shared_ptr<const Schedule> what);

  // Under the engine's lock:
  void begin();
  /// Executes the steps that are ready, with at most about `budget` bytes of copying and reducing. True: it progressed.
  bool run(std::size_t budget);
  /// No longer in use: frees scratch memory above `keep` bytes.
  void rest(std::size_t keep) noexcept;
  bool ready() const noexcept { return next_ready_ < ready_.size(); }
  bool complete() const noexcept { return left_ == 0; }
  /// Whether anything remains to be sent to or received from this rank of the group.
  bool needs(int member) const noexcept;
  void cancel() noexcept;
  void message_done(Message& message, std::size_t bytes) noexcept override;
  void native_done(NativeRequest& collective) noexcept override;

  std::shared_ptr<HostGroup> group;  ///< while in use
  OpDesc call;
  std::uint64_t sequence = 0;  ///< number of a collective in its group, or of a message between the two ranks
  Clock::time_point deadline;
  bool internal = false;     ///< not counted in traffic
  bool runnable = false;     ///< is in its world's list
  std::string called;        ///< checked mode: the signature that must be equal on all members
  bool agreed = true;        ///< checked mode: all members are known to have made the same call
  std::size_t surprise = 0;  ///< bytes of a message whose length differs from this rank's
  int surprise_peer = -1;
  std::uint64_t turn = 0;  ///< position among the native operations of its group; 0: not native
  std::unique_ptr<NativeCommunicator>* copy = nullptr;  ///< not null: this native operation creates a group
  ScheduleExecutor* parent = nullptr;                   ///< the batch of which this is a part
  std::uint32_t parts_left = 0;
  ScheduleExecutor* next = nullptr;

 protected:
  ProgressEngine& engine() const noexcept override;
  [[noreturn]] void throw_failure() const override;
  void recycle() noexcept override;

 private:
  std::byte* at(const BufferRegion& region) const noexcept;
  void start_message(std::uint32_t step);
  bool start_native(std::uint32_t step);
  void give_up(std::uint32_t step) noexcept;
  std::size_t compute(const ScheduleStep& step);
  void step_done(std::uint32_t step) noexcept;
  bool is_message() const { return call.kind == OpKind::send || call.kind == OpKind::recv; }

  std::shared_ptr<const Schedule> schedule_;
  std::shared_ptr<Schedule> message_;  ///< the schedule of a send or receive, reused
  double factor_ = 1;
  Buffer scratch_;
  std::vector<std::uint32_t> waits_;  ///< by step: how many steps it still waits for
  std::vector<std::uint32_t> ready_;
  std::size_t next_ready_ = 0;
  std::size_t left_ = 0;           ///< steps that are not done
  std::vector<Message> messages_;  ///< by step
  NativeRequest native_;
  std::vector<std::uint8_t> state_;  ///< by step: kIdle, kUnderWay, kDone
  std::vector<const void*> sources_;
};

}  // namespace tessera::comm::host
