#include "backends/nccl/runtime.h"

#include <algorithm>

#include "backends/nccl/nccl_group.h"

namespace tessera::comm::nccl {
namespace {

using namespace std::chrono_literals;
constexpr auto kWatchEvery = 50ms;
constexpr auto kAnswerTime = 1s;  ///< a live rank answers within microseconds, on a busy machine within this time
constexpr std::size_t kMostEarly = 1024;

}  // namespace

NcclRuntime::NcclRuntime(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options, const NcclApi& api,
                         int device)
    : bootstrap_(std::move(bootstrap)),
      options_(options),
      api_(api),
      device_(device),
      memory_(std::make_shared<RegisteredMemory>(api, device)),
      dead_(static_cast<std::size_t>(bootstrap_->size())),
      answers_(static_cast<std::size_t>(bootstrap_->size())) {}

void NcclRuntime::open() {
  channel_ = bootstrap_->open_channel("nccl", {.lost = [this](int who) { lost(who); },
                                               .message = [this](int from, std::string_view text) { hear(from, text); },
                                               .damaged = [this](int from) { damaged(from); }});
  speaks_.store(channel_.get());
  if (options_.progress_thread) watcher_ = std::thread([this] { watch(); });
}

NcclRuntime::~NcclRuntime() {
  channel_.reset();  // its thread uses the members below
  {
    const std::lock_guard lock(watch_mutex_);
    stop_ = true;
  }
  watch_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

void NcclRuntime::add(NcclGroup& group) {
  {
    const std::lock_guard lock(questions_mutex_);
    called_[group.id()] = group.called();
  }
  const std::unique_lock lock(groups_mutex_);
  groups_.push_back(&group);
  std::vector<std::pair<int, ControlMessage>> early;
  early.swap(early_);
  for (const auto& [from, notice] : early) deliver(from, notice);
  for (std::size_t r = 0; r < dead_.size(); ++r)
    if (dead_[r]) group.lose(static_cast<int>(r));
}

void NcclRuntime::remove(NcclGroup& group) noexcept {
  {
    const std::lock_guard lock(questions_mutex_);
    called_.erase(group.id());
  }
  const std::unique_lock lock(groups_mutex_);
  std::erase(groups_, &group);
  closed_.insert(group.id());
}

void NcclRuntime::tell(const NcclGroup& group, const ControlMessage& notice) noexcept {
  ControlChannel* const channel = speaks_.load();
  if (channel == nullptr) return;
  const std::string text = format_notice(notice);
  for (const int member : group.members())
    if (member != rank()) channel->tell(member, text);
}

void NcclRuntime::deliver(int from, const ControlMessage& notice) noexcept {
  const auto found =
      std::find_if(groups_.begin(), groups_.end(), [&](const NcclGroup* g) { return g->id() == notice.communicator; });
  if (found == groups_.end()) {
    const std::lock_guard news(news_mutex_);
    if (early_.size() < kMostEarly && !closed_.contains(notice.communicator)) early_.emplace_back(from, notice);
  } else if (notice.kind == ControlMessage::Kind::failure) {
    (*found)->fail({static_cast<FailureKind>(notice.number), notice.text}, false);
  } else if (notice.kind == ControlMessage::Kind::call) {
    (*found)->hear_call(from, notice.number, notice.text);
  } else {
    (*found)->hear_closing(from, notice.value);
  }
}

void NcclRuntime::hear(int from, std::string_view text) noexcept {
  const std::optional<ControlMessage> notice = parse_notice(text);
  if (!notice) return;
  if (notice->kind == ControlMessage::Kind::question) {
    ControlMessage answer{
        .kind = ControlMessage::Kind::answer, .communicator = notice->communicator, .number = notice->number};
    {
      const std::lock_guard lock(questions_mutex_);
      const auto found = called_.find(notice->communicator);
      if (found != called_.end()) answer.value = found->second->load();
    }
    if (ControlChannel* const channel = speaks_.load()) channel->tell(from, format_notice(answer));
  } else if (notice->kind == ControlMessage::Kind::answer) {
    const std::lock_guard lock(questions_mutex_);
    if (notice->number == question_) answers_[static_cast<std::size_t>(from)] = notice->value;
    answered_.notify_all();
  } else {
    const std::shared_lock lock(groups_mutex_);
    deliver(from, *notice);
  }
}

void NcclRuntime::lost(int rank) noexcept {
  const std::shared_lock lock(groups_mutex_);
  {
    const std::lock_guard news(news_mutex_);
    dead_[static_cast<std::size_t>(rank)] = true;
  }
  for (NcclGroup* group : groups_) group->lose(rank);
}

void NcclRuntime::damaged(int from) noexcept {
  const std::string why = "nccl: a message of the control channel from rank " + std::to_string(from) +
                          " came damaged: its authentication code is wrong; check the network between the hosts";
  const std::shared_lock lock(groups_mutex_);
  for (NcclGroup* group : groups_) group->fail({FailureKind::backend, why}, true);
}

std::vector<std::optional<std::uint64_t>> NcclRuntime::ask(const NcclGroup& group) noexcept {
  const std::lock_guard one_at_a_time(asking_mutex_);
  std::unique_lock lock(questions_mutex_);
  const std::uint64_t question = ++question_;
  std::fill(answers_.begin(), answers_.end(), std::nullopt);
  lock.unlock();
  tell(group, {.kind = ControlMessage::Kind::question, .communicator = group.id(), .number = question});
  lock.lock();
  const auto of = [&](int member) { return answers_[static_cast<std::size_t>(member)]; };
  answered_.wait_for(lock, kAnswerTime, [&] {
    return std::all_of(group.members().begin(), group.members().end(),
                       [&](int member) { return member == rank() || of(member); });
  });
  std::vector<std::optional<std::uint64_t>> answers;
  for (const int member : group.members()) answers.push_back(of(member));
  return answers;
}

void NcclRuntime::begin_operation() noexcept {
  if (outstanding_.fetch_add(1) > 0) return;
  { const std::lock_guard lock(watch_mutex_); }  // the thread has yet to read the count, or sleeps
  watch_.notify_all();
}

void NcclRuntime::watch() noexcept {
  std::unique_lock lock(watch_mutex_);
  while (!stop_) {
    watch_.wait(lock, [this] { return stop_ || outstanding_.load() > 0; });
    watch_.wait_for(lock, kWatchEvery, [this] { return stop_; });
    if (stop_) return;
    lock.unlock();
    {
      const std::shared_lock groups(groups_mutex_);
      for (NcclGroup* group : groups_) group->check_health();
    }
    lock.lock();
  }
}

}  // namespace tessera::comm::nccl
