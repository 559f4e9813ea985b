// Executes one operation in flight: a schedule or a single message.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/memory_pool.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/core/operation.h"
#include "tessera/comm/native_collectives.h"
#include "tessera/comm/schedule.h"
#include "tessera/comm/transport.h"

namespace tessera::comm::host {

class HostGroup;

inline constexpr std::string_view kMessageAlgorithm = "direct";  ///< of sends and receives

class ScheduleExecutor final : public Operation, public MessageOwner, public NativeOwner {
 public:
  explicit ScheduleExecutor(HostGroup& owner) : host_(owner) {}
  // Called on the caller's thread, before the launch:
  void reset(const OpDesc& what, std::uint64_t number);
  void set_schedule(std::shared_ptr<const Schedule> schedule);

  // Under the engine's lock:
  /// A receive from any rank whose message has not come. It must not begin.
  bool awaits_sender() const noexcept { return is_message() && call.root == kAnyRank; }
  /// Of the message `number` of this receive's tag from any one rank.
  MessageTag message_tag(std::uint64_t number) const noexcept;
  void set_sender(int member, std::uint64_t number) noexcept;
  void begin();
  /// Executes the steps that are ready, with at most about `budget` bytes of copying and reducing. True: it progressed.
  bool run(std::size_t budget);
  bool ready() const noexcept { return next_ready_ < ready_.size(); }
  bool complete() const noexcept { return left_ == 0; }
  /// Whether anything remains to be sent to or received from this rank of the group.
  bool needs(int member) const noexcept;
  void cancel() noexcept;
  void message_done(Message& message, std::size_t bytes) noexcept override;
  void native_done(NativeRequest& collective) noexcept override;

  bool runnable = false;     ///< is in its runtime's list
  std::string signature;     ///< checked mode: what must be equal on all members
  bool verified = true;      ///< checked mode: all members are known to have made the same call
  std::size_t surprise = 0;  ///< bytes of a message whose length differs from this rank's
  int surprise_peer = -1;
  std::uint64_t native_position = 0;                    ///< among the native operations of its group; 0: not native
  std::unique_ptr<NativeCommunicator>* copy = nullptr;  ///< not null: this native operation creates a group

 private:
  void recycle() noexcept override;
  std::byte* at(const BufferRegion& region) const noexcept;
  void start_message(std::uint32_t step);
  bool start_native(std::uint32_t step);
  void cancel_step(std::uint32_t step) noexcept;
  std::size_t compute(const ScheduleStep& step);
  void step_done(std::uint32_t step) noexcept;

  HostGroup& host_;
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
