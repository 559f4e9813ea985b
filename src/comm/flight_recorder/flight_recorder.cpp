#include "tessera/comm/flight_recorder.h"

#include <unistd.h>

#include <array>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/process.h"
#include "tessera/comm/core/decorator.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/flight_recorder/recorder.h"
#include "tessera/comm/host_collectives.h"

namespace tessera::comm {
namespace {

using flight::State;

std::string text_of(const Error& error) { return std::string(error.kind()) + ": " + error.what(); }

/// An operation whose states the recorder notes.
class RecordedWork final : public WorkState {
 public:
  RecordedWork(Work inner, std::shared_ptr<FlightRecorder> recorder, FlightRecorder::Calls calls)
      : inner_(std::move(inner)), recorder_(std::move(recorder)), calls_(calls) {}

  bool done() noexcept override {
    if (!inner_.done()) return false;
    try {
      wait();
    } catch (const std::exception&) {  // which waiting throws again
    }
    return true;
  }

  bool wait_until(std::chrono::steady_clock::time_point until) override {
    return watch([&] { return inner_.wait_until(until); });
  }

  void wait() override {
    watch([&] {
      inner_.wait();
      return true;
    });
  }

  void wait_on(Stream& stream) override {
    if (stream.device().type == DeviceType::cpu) return WorkState::wait_on(stream);
    inner_.wait_on(stream);
    note(State::handed);
  }

  void on_done(WorkCallback callback) override {
    inner_.on_done([ref = WorkRef(*this), callback = std::move(callback)](const std::exception_ptr& error) {
      ref->done();  // notes the end
      if (callback) callback(error);
    });
  }

 private:
  ~RecordedWork() override = default;
  void recycle() noexcept override { delete this; }

  /// Calls `wait`, which returns whether the operation has ended, or throws its error.
  template <class Wait>
  bool watch(Wait wait) {
    note(State::waiting);
    bool ended = false;
    try {
      ended = wait();
    } catch (const Error& error) {
      note(State::failed, text_of(error));
      throw;
    }
    note(ended ? State::done : State::started);
    return ended;
  }

  /// Notes a state, unless the end is noted: a waiting thread and a callback may both see it.
  void note(State state, const std::string& failure = {}) {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    ended_ = state >= State::done;
    if (state == State::failed)
      recorder_->fail(calls_, failure);
    else
      recorder_->set_state(calls_, state);
  }

  Work inner_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const FlightRecorder::Calls calls_;
  std::mutex mutex_;
  bool ended_ = false;  // and its end is noted; guarded by mutex_
};

/// What the communicators of a rank share.
struct RecordedRank {
  std::shared_ptr<FlightRecorder> recorder;
  std::shared_ptr<base::DeviceRuntime> device;
  std::uint64_t rank = 0;  // in the world
};

class RecordedCommunicator final : public Decorator {
 public:
  /// `name`: the same on all ranks, from the splits that led to it.
  RecordedCommunicator(std::unique_ptr<Communicator> inner, RecordedRank rank, std::string name)
      : Decorator(std::move(inner)),
        rank_(std::move(rank)),
        name_(std::move(name)),
        number_(rank_.recorder->add_communicator()) {
    std::string members;
    std::uint64_t run = 0;  // rank 0's; a process may be in several
    const std::uint64_t own = base::this_process()[0] ^ static_cast<std::uint64_t>(host_time_ns());
    HostCollectives control(this->inner(), *rank_.device);
    for (const auto& member : control.gather_all(std::vector<std::uint64_t>{rank_.rank, own})) {
      if (members.empty()) run = member[1];
      members += (members.empty() ? "" : ",") + std::to_string(member[0]);
    }
    forget_traffic();
    if (number_ == 0) add_world_lines(run);
    rank_.recorder->add_line("communicator", std::to_string(number_) + " " + name_ + " " + members);
  }
  ~RecordedCommunicator() override { close_inner(); }  // before the recorder notes the end
  FlightRecorder& recorder() { return *rank_.recorder; }

 private:
  void add_world_lines(std::uint64_t run) {
    std::array<char, 256> host{};
    ::gethostname(host.data(), host.size() - 1);
    const std::int64_t now = host_time_ns();
    const auto since_1970 = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
    FlightRecorder& file = recorder();
    file.add_line("rank", std::to_string(rank()) + " of " + std::to_string(size()));
    file.add_line("run", std::to_string(run));
    file.add_line("host", host.data());
    file.add_line("process", std::to_string(::getpid()));
    file.add_line("backend", backend());
    file.add_line("clock", std::to_string(now) + " " + std::to_string(since_1970));
  }

  /// Issues calls on the inner communicator, as one work.
  template <class Forward>
  Work record(std::span<const OpDesc> parts, Forward forward) {
    const FlightRecorder::Calls calls = recorder().begin(parts.size());
    for (std::size_t i = 0; i < parts.size(); ++i) {
      // The constructor's own collective counts, as it does in the errors of the backend.
      const std::uint64_t sequence = is_message(parts[i].kind) ? 0 : ++collectives_;
      recorder().issue(calls.first + i, parts[i], {.communicator = number_, .sequence = sequence, .ranks = size()});
    }
    try {
      Work work = forward();
      recorder().set_state(calls, State::started);
      return Work(new RecordedWork(std::move(work), rank_.recorder, calls));
    } catch (const Error& error) {
      recorder().fail(calls, text_of(error));
      throw;
    }
  }
  Work do_start(const OpDesc& call) override {
    return record({&call, 1}, [&] { return Decorator::do_start(call); });
  }
  Work do_batch(std::span<const OpDesc> parts) override {
    if (parts.empty()) return Decorator::do_batch(parts);
    return record(parts, [&] { return Decorator::do_batch(parts); });
  }

  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) override {
    std::string name = name_ + "." + std::to_string(++splits_);
    ++collectives_;  // the backend exchanges the colors by one
    auto child = inner().split(color, key, options);
    if (child == nullptr) return nullptr;
    return std::make_unique<RecordedCommunicator>(std::move(child), rank_, std::move(name));
  }
  /// The others don't know of this group, so its name counts only those of the same members and tag.
  std::unique_ptr<Communicator> do_create_group(std::span<const int> members, const OpOptions& options) override {
    auto group = inner().create_group(members, options);
    std::vector<int> key(members.begin(), members.end());
    key.push_back(options.tag);
    std::string name = name_ + ".group" + std::to_string(options.tag) + ".";
    {
      const std::lock_guard lock(groups_mutex_);
      name += std::to_string(++groups_[key]);
    }
    return std::make_unique<RecordedCommunicator>(std::move(group), rank_, std::move(name));
  }

  const RecordedRank rank_;
  const std::string name_;
  const std::uint32_t number_;
  std::uint64_t collectives_ = 1;
  int splits_ = 0;
  std::mutex groups_mutex_;
  std::map<std::vector<int>, int> groups_;  // made so far, by members and tag
};

FlightRecorder* recorder_of(Communicator& communicator) {
  auto* recorded = dynamic_cast<RecordedCommunicator*>(&communicator);
  return recorded == nullptr ? nullptr : &recorded->recorder();
}

}  // namespace

std::unique_ptr<Communicator> record_flight(std::unique_ptr<Communicator> world, const std::string& directory,
                                            std::shared_ptr<base::DeviceRuntime> device) {
  if (device == nullptr) device = base::open_device({});
  const int rank = world->rank();
  return std::make_unique<RecordedCommunicator>(std::move(world),
                                                RecordedRank{std::make_shared<FlightRecorder>(directory, rank),
                                                             std::move(device), static_cast<std::uint64_t>(rank)},
                                                "world");
}

void record_step(Communicator& communicator, std::int64_t step) {
  if (FlightRecorder* const recorder = recorder_of(communicator)) recorder->set_step(step);
}

void record_failure(Communicator& communicator, std::string_view reason) {
  if (FlightRecorder* const recorder = recorder_of(communicator)) recorder->fail({}, reason);
}

}  // namespace tessera::comm
