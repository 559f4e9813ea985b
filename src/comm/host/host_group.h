// One communicator of one rank over a transport: its members, the operations in flight, and how they fail.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "tessera/comm/host/host_runtime.h"
#include "tessera/comm/host/schedule_executor.h"

namespace tessera::comm::host {

class HostGroup final : public std::enable_shared_from_this<HostGroup> {
 public:
  HostGroup(std::shared_ptr<HostRuntime> world, std::uint32_t number, int rank, std::vector<int> members,
            CommunicatorOptions options);
  ~HostGroup();
  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;
  /// Before open(): sets the communicator for native operations. Null: the library has no more of them.
  void use_native(std::unique_ptr<NativeCommunicator> group) noexcept;
  void open();
  /// No more operations follow; waits for those in flight.
  void close() noexcept;

  Work start(const OpDesc& call, bool internal);
  Work start_batch(std::span<const OpDesc> parts);
  /// Collective: creates another native group of the same ranks. `copy` must stay in place until the Work is done.
  Work start_copy(std::unique_ptr<NativeCommunicator>& copy);
  void abort(std::string_view reason) noexcept;
  void read_traffic(TrafficStats& snapshot) const;
  std::string_view last_algorithm() const noexcept { return last_algorithm_; }

  HostRuntime& world() noexcept { return *world_; }
  const std::shared_ptr<HostRuntime>& shared_world() const noexcept { return world_; }
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(members_.size()); }
  std::uint32_t number() const noexcept { return number_; }
  int world_rank(int member) const noexcept { return members_[static_cast<std::size_t>(member)]; }
  int member_of(int world_rank) const noexcept;  ///< -1: not a member
  std::string rank_name(int member) const;
  [[noreturn]] void throw_failure() const;
  void put_back(ScheduleExecutor& op) noexcept;
  /// The counter of bytes that `op` sends to a member; null if they are not counted.
  std::atomic<std::uint64_t>* counter(const ScheduleExecutor& op, int member) noexcept;
  const std::shared_ptr<std::atomic<std::uint64_t>>& called() const noexcept { return called_; }
  NativeCommunicator* native() const noexcept { return native_.get(); }  ///< null: only schedules

  // Under the engine's lock:
  bool submitted() noexcept;                   ///< starts submitted operations
  void settle(ScheduleExecutor& op) noexcept;  ///< ends an operation whose steps are done
  /// Native operations start in call order on all ranks; in checked mode, only once all ranks are known to have made
  /// the same call. True: it starts now; not called again after that.
  bool begin_native_in_order(const ScheduleExecutor& op) noexcept;
  void count_native(const ScheduleExecutor& op) noexcept;
  void check_health() noexcept;
  void fail(Failure failure, bool tell) noexcept;
  void hear_call(int member, std::uint64_t sequence, std::uint64_t fingerprint, const std::string& text) noexcept;

 private:
  struct Tagged {  ///< checked mode: the members' calls of one operation
    std::vector<std::string> texts;
    std::vector<std::uint64_t> fingerprints;
    std::size_t here = 0;
  };
  struct ProblemHash {
    std::size_t operator()(const CollectiveSpec& problem) const noexcept;
  };

  ScheduleExecutor& acquire();
  CollectiveSpec problem_of(const OpDesc& call) const;
  std::string_view algorithm_for(const CollectiveSpec& problem) const;
  std::string native_refusal(const CollectiveSpec& problem) const;
  std::shared_ptr<const Schedule> schedule_for(const OpDesc& call);
  void submit(ScheduleExecutor& op) noexcept;
  Work launch(ScheduleExecutor& op);
  void finish(ScheduleExecutor& op, std::uint32_t how) noexcept;
  void announce(ScheduleExecutor& op) noexcept;
  std::string trouble_with(const ScheduleExecutor& op) const;
  void time_out(const ScheduleExecutor& op) noexcept;
  std::string describe_answers(const ScheduleExecutor& op, const std::vector<std::optional<std::uint64_t>>& at) const;

  const std::shared_ptr<HostRuntime> world_;
  const std::uint32_t number_;
  const int rank_;
  const std::vector<int> members_;
  const CommunicatorOptions options_;
  std::vector<std::atomic<std::uint64_t>> sent_;  ///< by kind and member
  const std::shared_ptr<std::atomic<std::uint64_t>> called_;
  std::unordered_map<CollectiveSpec, std::shared_ptr<const Schedule>, ProblemHash> schedules_;  // the caller's thread
  std::string_view last_algorithm_ = kMessageAlgorithm;  ///< algorithm of the last call
  std::uint64_t sequence_ = 0;
  std::uint64_t native_called_ = 0;
  std::vector<std::uint64_t> messages_to_;
  std::vector<std::uint64_t> messages_from_;

  std::mutex submit_mutex_;
  std::vector<ScheduleExecutor*> submitted_;
  std::vector<std::unique_ptr<ScheduleExecutor>> all_ops_;
  std::vector<ScheduleExecutor*> free_ops_;
  std::atomic<std::uint32_t> in_flight_{0};
  std::atomic<std::uint32_t> idle_{1};

  // Under the engine's lock:
  std::vector<ScheduleExecutor*> running_;
  std::vector<ScheduleExecutor*> fresh_;
  std::map<std::uint64_t, Tagged> calls_;
  std::unique_ptr<NativeCommunicator> native_;
  bool native_used_up_ = false;
  std::uint64_t native_begun_ = 0;
  std::atomic<bool> failed_{false};
  Failure failure_;
};

}  // namespace tessera::comm::host
