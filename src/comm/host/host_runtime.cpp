#include "tessera/comm/host/host_runtime.h"

#include <algorithm>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/host/host_group.h"
#include "tessera/comm/schedule.h"

namespace tessera::comm::host {
namespace {

constexpr std::size_t kComputeBytes = std::size_t{4} << 20;  ///< copied and reduced in one poll of one operation
constexpr std::size_t kMostEarly = 1024;
constexpr std::uint64_t kNoCommunicator = kMostCommunicators;  ///< of a question that only probes rank 0

/// Deterministic mode requires the tree's order, which such libraries don't keep.
std::vector<std::string> algorithms_of(bool deterministic, std::span<const OpKind> native) {
  std::vector<std::string> names = known_algorithms(deterministic);
  if (deterministic) return names;
  for (const OpKind kind : native) names.push_back(std::string(name_of(kind)).append("=").append(kNativeAlgorithm));
  return names;
}

Capabilities make_capabilities(const std::string& name, bool deterministic, int ranks, std::span<const OpKind> native) {
  Capabilities all;
  all.backend = name;
  all.dtypes = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8,
                DType::u8,  DType::i32, DType::i64, DType::u32,  DType::u64};
  all.memory = {MemoryKind::host};
  all.deterministic = deterministic;
  all.algorithms = algorithms_of(deterministic, native);
  if (!deterministic) all.rounding_ulps = 0.5 * std::max(1, ranks - 1);  // a ring rounds at every step
  if (!deterministic && !native.empty())
    all.rounding_ulps += 0.5;  // premul_sum before the first, or avg after the last
  return all;
}

AlgorithmTable make_table(const BackendOptions& options, std::span<const OpKind> native) {
  try {
    return {options.algorithms, algorithms_of(options.deterministic, native)};
  } catch (const InvalidUsage&) {
    if (!options.deterministic) throw;
    [[maybe_unused]] const AlgorithmTable exists(options.algorithms, algorithms_of(false, native));
    throw InvalidUsage("TESSERA_ALGO: '" + options.algorithms +
                       "' names an algorithm that adds in an order of its own; it needs TESSERA_DETERMINISTIC=0");
  }
}

std::shared_ptr<MemoryTracker> memory_tracker_of(const BackendOptions& options) {
  return options.communicator.memory_tracker != nullptr ? options.communicator.memory_tracker
                                                        : std::make_shared<MemoryTracker>();
}

}  // namespace

HostRuntime::HostRuntime(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options, std::string name,
                         std::span<const OpKind> native)
    : bootstrap_(std::move(bootstrap)),
      options_(options),
      capabilities_(make_capabilities(name, options.deterministic, bootstrap_->size(), native)),
      algorithms_(make_table(options, native)),
      memory_(memory_tracker_of(options)),
      unbooked_memory_(std::make_shared<MemoryTracker>()),
      taken_(kMostCommunicators),
      peers_(static_cast<std::size_t>(size())),
      answers_(static_cast<std::size_t>(size())) {}

void HostRuntime::connect(const TransportFactory& make_transport) {
  transport_ = make_transport(*bootstrap_, *this, options_);
  const auto& hosts = bootstrap_->hosts();
  const auto here = std::count(hosts.begin(), hosts.end(), hosts[static_cast<std::size_t>(rank())]);
  const auto cores = std::max(1U, std::thread::hardware_concurrency());
  engine_ = std::make_unique<ProgressEngine>(
      bell_, ProgressOptions{.thread = options_.progress_thread && size() > 1,
                             .oversubscribed = here > static_cast<std::ptrdiff_t>(cores),
                             .waiter = &transport_->waiter()});
  engine_->add(*this);
  channel_ = bootstrap_->open_channel(
      capabilities_.backend,
      {.lost = [this](int who) { receive({.kind = ControlMessage::Kind::lost, .from = who}); },
       .message =
           [this](int from, std::string_view text) {
             if (auto notice = parse_notice(text)) {
               notice->from = from;
               receive(std::move(*notice));
             }
           },
       .damaged = [this](int who) { receive({.kind = ControlMessage::Kind::damaged, .from = who}); }});
  voice_.store(channel_.get());
}

void HostRuntime::leave() noexcept {
  if (channel_ == nullptr || left_) return;
  left_ = true;
  tell(ControlChannel::kAll, {.kind = ControlMessage::Kind::leaving, .text = options_.first_failure_cause()});
  const std::lock_guard lock(engine_->mutex());
  const bool failed = std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.died || p.cut; });
  transport_->close(failed);
  update_transport_polling();
}

HostRuntime::~HostRuntime() {
  leave();
  voice_.store(nullptr);
  channel_.reset();  // its thread uses the members below
  engine_.reset();
  transport_.reset();
}

std::uint32_t HostRuntime::free_number(std::uint32_t from) {
  const std::lock_guard lock(numbers_mutex_);
  for (std::uint32_t i = 0; i < kMostCommunicators; ++i) {
    const std::uint32_t number = (from + i) % kMostCommunicators;
    if (!taken_[number]) return number;
  }
  throw Unsupported("split: this rank has " + std::to_string(kMostCommunicators) + " communicators already");
}

bool HostRuntime::reserve(std::uint32_t number) {
  const std::lock_guard lock(numbers_mutex_);
  if (taken_[number]) return false;
  taken_[number] = true;
  return true;
}

void HostRuntime::give_back(std::uint32_t number) {
  const std::lock_guard lock(numbers_mutex_);
  taken_[number] = false;
}

void HostRuntime::add(HostGroup& group) {
  groups_.push_back(&group);
  {
    const std::lock_guard lock(questions_mutex_);
    called_[group.number()] = group.called();
  }
  std::vector<ControlMessage> early;
  early.swap(early_);
  for (const ControlMessage& notice : early) handle(notice);
}

void HostRuntime::remove(HostGroup& group) {
  std::erase(groups_, &group);
  const std::lock_guard lock(questions_mutex_);
  called_.erase(group.number());
}

void HostRuntime::make_runnable(ScheduleExecutor& op) noexcept {
  if (op.runnable) return;
  op.runnable = true;
  runnable_.push_back(&op);
}

void HostRuntime::forget(ScheduleExecutor& op) noexcept {
  if (op.runnable) std::replace(runnable_.begin(), runnable_.end(), &op, static_cast<ScheduleExecutor*>(nullptr));
  op.runnable = false;
}

bool HostRuntime::poll(bool with_health_check) noexcept {
  if (heard_.load()) hear();
  bool moved = false;
  for (std::size_t i = 0; i < groups_.size(); ++i) moved |= groups_[i]->submitted();
  moved |= run_ready();
  if (transport_->poll(with_health_check)) {
    moved = true;
    stirred_ = true;
  }
  moved |= run_ready();
  if (polls_for_transport_) update_transport_polling();
  if (!with_health_check) return moved;
  if (std::exchange(stirred_, false)) last_moved_ = Clock::now();
  for (std::size_t i = 0; i < groups_.size(); ++i) groups_[i]->check_health();
  blame_transport();
  return moved;
}

void HostRuntime::update_transport_polling() noexcept {
  const bool needed = transport_->needs_polls() || !transport_failure_.empty();
  if (std::exchange(polls_for_transport_, needed) == polls_for_transport_) return;
  polls_for_transport_ ? engine_->begin_operation() : engine_->end_operation();
}

/// Runs what is ready, including what becomes ready by that, but nothing twice: the transport is polled in between.
bool HostRuntime::run_ready() noexcept {
  bool moved = false;
  const std::size_t now = runnable_.size();
  for (std::size_t i = 0; i < now; ++i) {
    ScheduleExecutor* op = std::exchange(runnable_[i], nullptr);
    if (op == nullptr) continue;
    op->runnable = false;
    moved |= op->run(kComputeBytes);
    if (op->ready()) {
      make_runnable(*op);
    } else {
      op->group->settle(*op);
    }
  }
  std::erase(runnable_, nullptr);
  return moved;
}

void HostRuntime::connection_lost(int peer, const std::string& why) noexcept {
  Peer& who = peers_[static_cast<std::size_t>(peer)];
  if (who.cut) return;
  who.cut = true;
  who.since = Clock::now();
  if (!who.left) who.why = why;
  if (rank() == kHub || peer == kHub) return;
  who.asked_hub = ++asked_hub_;
  tell(kHub, {.kind = ControlMessage::Kind::question, .communicator = kNoCommunicator, .number = who.asked_hub});
}

void HostRuntime::tell(int world_rank, const ControlMessage& notice) noexcept {
  if (ControlChannel* const voice = voice_.load()) voice->tell(world_rank, format_notice(notice));
}

void HostRuntime::hear() noexcept {
  std::vector<ControlMessage> heard;
  {
    const std::lock_guard lock(inbox_mutex_);
    heard.swap(inbox_);
    heard_.store(false);
  }
  for (const ControlMessage& notice : heard) handle(notice);
}

void HostRuntime::handle(const ControlMessage& notice) noexcept {
  Peer& sender = peers_[static_cast<std::size_t>(notice.from)];
  if (notice.kind == ControlMessage::Kind::leaving) {
    sender.left = true;
    sender.since = Clock::now();
    sender.why = notice.text;
    return;
  }
  if (notice.kind == ControlMessage::Kind::lost) {
    sender.died = !sender.left;
    for (std::size_t i = 0; i < groups_.size(); ++i) groups_[i]->check_health();
    return;
  }
  if (notice.kind == ControlMessage::Kind::damaged)
    return message_damaged(notice.from, "a message of the control channel");
  const auto found = std::find_if(groups_.begin(), groups_.end(),
                                  [&](const HostGroup* group) { return group->number() == notice.communicator; });
  const int member = found == groups_.end() ? -1 : (*found)->member_of(notice.from);
  if (member < 0) {
    if (early_.size() < kMostEarly) early_.push_back(notice);
    return;
  }
  if (notice.kind == ControlMessage::Kind::failure)
    (*found)->fail({static_cast<FailureKind>(notice.number), notice.text}, false);
  if (notice.kind == ControlMessage::Kind::call) (*found)->hear_call(member, notice.number, notice.value, notice.text);
}

/// On the control thread: answers at once what it can, and leaves the rest to the driving thread.
void HostRuntime::receive(ControlMessage notice) noexcept {
  if (notice.kind == ControlMessage::Kind::question) {
    ControlMessage answer{
        .kind = ControlMessage::Kind::answer, .communicator = notice.communicator, .number = notice.number};
    {
      const std::lock_guard lock(questions_mutex_);
      const auto found = called_.find(notice.communicator);
      if (found != called_.end()) answer.value = found->second->load();
    }
    tell(notice.from, answer);
    return;
  }
  if (notice.kind == ControlMessage::Kind::answer) {
    if (notice.communicator == kNoCommunicator) return heard_from_hub_.store(notice.number);
    const std::lock_guard lock(questions_mutex_);
    if (notice.number == question_) answers_[static_cast<std::size_t>(notice.from)] = notice.value;
    answered_.notify_all();
    return;
  }
  {
    const std::lock_guard lock(inbox_mutex_);
    inbox_.push_back(std::move(notice));
    heard_.store(true);
  }
  engine_->wake_waiters();
  engine_->wake_progress_thread();
}

std::vector<std::optional<std::uint64_t>> HostRuntime::ask(const HostGroup& group) noexcept {
  constexpr auto kAnswerTime = std::chrono::seconds(1);  // a live rank answers within microseconds, if it gets a core
  std::vector<int> asked;
  for (int k = 0; k < group.size(); ++k)
    if (group.world_rank(k) != rank()) asked.push_back(group.world_rank(k));
  if (rank() != kHub && group.member_of(kHub) < 0) asked.push_back(kHub);
  std::unique_lock lock(questions_mutex_);
  const std::uint64_t question = ++question_;
  std::fill(answers_.begin(), answers_.end(), std::nullopt);
  lock.unlock();
  for (const int who : asked)
    tell(who, {.kind = ControlMessage::Kind::question, .communicator = group.number(), .number = question});
  lock.lock();
  answered_.wait_for(lock, kAnswerTime, [&] {
    return std::all_of(asked.begin(), asked.end(),
                       [&](int who) { return answers_[static_cast<std::size_t>(who)].has_value(); });
  });
  return answers_;
}

}  // namespace tessera::comm::host
