#include "backends/nccl/runtime.h"

#include <algorithm>

#include "backends/nccl/stream_group.h"
#include "tessera/base/thread.h"

namespace tessera::comm::nccl {
namespace {

using namespace std::chrono_literals;
constexpr auto kWatchEvery = 50ms;
constexpr std::size_t kMaxEarly = 1024;

}  // namespace

NcclRuntime::NcclRuntime(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options, const NcclApi& api,
                         RankDevice device)
    : bootstrap_(std::move(bootstrap)),
      options_(options),
      api_(api),
      device_(std::move(device)),
      abandoned_(std::make_shared<AbandonedStreams>(options.communicator.logger)),
      memory_(std::make_shared<RegisteredMemory>(api, device_.index, abandoned_)),
      dead_(static_cast<std::size_t>(bootstrap_->size())),
      calls_([&api, index = device_.index] { check_cuda(api, api.cudaSetDevice(index), "cudaSetDevice"); }),
      monitor_(*bootstrap_) {}

void NcclRuntime::open() {
  monitor_.open("nccl", [this](const ControlMessage& message) { receive(message); });
  if (options_.progress_thread) watcher_ = base::start_thread([this] { watch(); });
}

NcclRuntime::~NcclRuntime() {
  monitor_.close();  // its thread uses the members below
  {
    const std::lock_guard lock(watch_mutex_);
    stop_ = true;
  }
  watch_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

void NcclRuntime::add(StreamGroup& group) {
  monitor_.add(group.id(), group.called());
  const std::unique_lock lock(groups_mutex_);
  groups_.push_back(&group);
  std::vector<ControlMessage> early;
  early.swap(early_);
  for (const ControlMessage& message : early) deliver(message);
  for (std::size_t r = 0; r < dead_.size(); ++r)
    if (dead_[r]) group.on_peer_lost(static_cast<int>(r));
}

void NcclRuntime::remove(StreamGroup& group) noexcept {
  monitor_.remove(group.id());
  const std::unique_lock lock(groups_mutex_);
  std::erase(groups_, &group);
  closed_.insert(group.id());
}

void NcclRuntime::report_no_windows(const std::string& why) noexcept {
  if (rank() != 0 || reported_no_windows_.exchange(true)) return;
  if (const auto& logger = options_.communicator.logger; logger != nullptr)
    logger->write(LogLevel::info, "nccl: memory is not symmetric: " + why);
}

/// Handles a message about one communicator.
void NcclRuntime::deliver(const ControlMessage& message) noexcept {
  const auto found =
      std::ranges::find_if(groups_, [&](const StreamGroup* g) { return g->id() == message.communicator; });
  if (found == groups_.end()) {
    const std::lock_guard news(news_mutex_);
    if (early_.size() < kMaxEarly && !closed_.contains(message.communicator)) early_.push_back(message);
  } else if (message.kind == ControlMessage::Kind::failure) {
    (*found)->fail({static_cast<FailureKind>(message.number), message.text}, false);
  } else if (message.kind == ControlMessage::Kind::op_signature) {
    (*found)->on_op_signature(message);
  } else if (message.kind == ControlMessage::Kind::group_key) {
    (*found)->on_group_key(message);
  } else if (message.kind == ControlMessage::Kind::symmetric) {
    (*found)->on_symmetric_vote(message);
  } else {
    (*found)->on_departure(message.from, message.value);
  }
}

void NcclRuntime::receive(const ControlMessage& message) noexcept {
  const std::shared_lock lock(groups_mutex_);
  if (message.kind == ControlMessage::Kind::peer_lost) {
    {
      const std::lock_guard news(news_mutex_);
      dead_[static_cast<std::size_t>(message.from)] = true;
    }
    for (StreamGroup* group : groups_) group->on_peer_lost(message.from);
  } else if (message.kind == ControlMessage::Kind::damaged) {
    const std::string why = "nccl: a message of the control channel from rank " + std::to_string(message.from) +
                            " is damaged: its authentication code is wrong; check the network between the hosts";
    for (StreamGroup* group : groups_) group->fail({FailureKind::backend, why}, true);
  } else {
    deliver(message);
  }
}

void NcclRuntime::begin_operation() noexcept {
  if (outstanding_.fetch_add(1) > 0) return;
  { const std::lock_guard lock(watch_mutex_); }  // the thread has yet to read the count, or sleeps
  watch_.notify_all();
}

void NcclRuntime::watch() noexcept {
  api_.cudaSetDevice(device());
  std::unique_lock lock(watch_mutex_);
  while (!stop_) {
    watch_.wait(lock, [this] { return stop_ || outstanding_.load() > 0; });
    watch_.wait_for(lock, kWatchEvery, [this] { return stop_; });
    if (stop_) return;
    lock.unlock();
    {
      const std::shared_lock groups(groups_mutex_);
      for (StreamGroup* group : groups_) group->check_health();
    }
    lock.lock();
  }
}

}  // namespace tessera::comm::nccl
