// One operation in flight: a schedule that is being carried out, or one message.
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
  /// In the caller's thread, before it is submitted.
  void prepare(std::shared_ptr<HostGroup> owner, const OpDesc& what, std::uint64_t number);
  void take(std::shared_ptr<const Schedule> what);

  // Under the engine's lock:
  void begin();
  /// Carries out what can be: at most about `budget` bytes of copying and adding. True: moved.
  bool run(std::size_t budget);
  /// Nobody uses it any more: gives back scratch memory above `keep` bytes.
  void rest(std::size_t keep) noexcept;
  bool ready() const noexcept { return next_ready_ < ready_.size(); }
  bool complete() const noexcept { return left_ == 0; }
  /// Whether anything is still to be sent to or received from this rank of the group.
  bool needs(int member) const noexcept;
  void cancel() noexcept;
  void message_done(Message& message, std::size_t bytes) noexcept override;
  void native_done(NativeRequest& collective) noexcept override;

  std::shared_ptr<HostGroup> group;  ///< while in use
  OpDesc call;
  std::uint64_t sequence = 0;  ///< of a collective; of a message: its number between the two ranks
  Clock::time_point deadline;
  bool internal = false;     ///< not metered
  bool runnable = false;     ///< is in its world's list
  std::string called;        ///< checked mode: what must be equal on all members
  bool agreed = true;        ///< checked mode: all members are known to have called the same
  std::size_t surprise = 0;  ///< bytes of a message that had another length than ours
  int surprise_peer = -1;
  std::uint64_t turn = 0;                               ///< among the native operations of its group; 0: is none
  std::unique_ptr<NativeCommunicator>* copy = nullptr;  ///< not null: this native operation makes a group
  ScheduleExecutor* parent = nullptr;                   ///< of a part of a batch
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
  std::shared_ptr<Schedule> message_;  ///< the schedule of a send or receive, used again
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
