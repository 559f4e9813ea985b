#include "backends/shm/shm_group.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/kernels/reduce.h"

namespace tessera::comm::shm {

std::shared_ptr<ShmGroup> ShmGroup::make(std::shared_ptr<ShmRuntime> host, int rank, int members,
                                         std::shared_ptr<MemoryTracker> memory_tracker) {
  return std::shared_ptr<ShmGroup>(new ShmGroup(std::move(host), rank, members, std::move(memory_tracker)));
}

ShmGroup::ShmGroup(std::shared_ptr<ShmRuntime> host, int rank, int members,
                   std::shared_ptr<MemoryTracker> memory_tracker)
    : host_(std::move(host)), rank_(rank), size_(members), memory_tracker_(std::move(memory_tracker)) {
  head_ = host_->staging().allocate(ControlBlock::head_bytes(members), MemoryCategory::communication, memory_tracker_,
                                    true);
  sent_ = std::vector<ByteCounts>(static_cast<std::size_t>(members));
  slots_ = host_->staging().allocate(sizeof(PortSlots), MemoryCategory::communication, memory_tracker_, true);
}

ShmGroup::~ShmGroup() {
  ShmRuntime::RetiredBlock retired;
  for (ControlBlock& member : ports_) retired.closed.push_back(&member.head().closed.value);
  retired.head = std::move(head_);
  retired.slots = std::move(slots_);
  retired.tiles = std::move(tiles_);
  retired.copies = std::move(copies_);
  host_->retire(std::move(retired));
}

ShmGroup::MemberOffsets ShmGroup::own_place() const {
  return {host_->rank(), host_->staging().offset_of(head_.data()), host_->staging().offset_of(slots_.data())};
}

void ShmGroup::connect(std::vector<MemberOffsets> members) {
  members_ = std::move(members);
  for (const MemberOffsets& member : members_) {
    std::byte* staging = host_->staging(member.world_rank);
    ports_.emplace_back(staging + member.head_offset, staging + member.slots_offset, size_);
  }
  sends_.resize(members_.size());
  receives_.resize(members_.size());
  peers_.resize(members_.size());
  sources_.resize(members_.size());
  factors_.resize(members_.size());
  host_->engine().add(*this);
}

void ShmGroup::close() noexcept {
  // This ends: every operation has a deadline, at which it fails.
  while (!host_->engine().wait(idle_, Clock::now() + std::chrono::hours(1))) {
  }
  host_->engine().remove(*this);
  own().head().closed.value.store(1);
}

ShmOperation& ShmGroup::acquire() {
  const std::lock_guard lock(submit_mutex_);
  if (!free_ops_.empty()) return free_ops_.pop();
  all_ops_.push_back(std::make_unique<ShmOperation>());
  return *all_ops_.back();
}

void ShmGroup::put_back(ShmOperation& op) noexcept {
  const std::lock_guard lock(submit_mutex_);
  free_ops_.push(op);
}

namespace {

/// Up to this size an operation may finish inside its call.
constexpr std::size_t kSmallBytes = std::size_t{1} << 20;

}  // namespace

Work ShmGroup::start(const OpDesc& call, bool internal) {
  if (failed_.load()) throw_failure();
  ShmOperation& op = acquire();
  const WorkRef hold(op);
  op.prepare(shared_from_this(), call);
  op.internal = internal;
  if (!internal) last_algorithm_ = kDirect;
  if (call.kind != OpKind::send && call.kind != OpKind::recv) {
    if (size_ == 1) {
      run_alone(op);
      return {};
    }
    select_protocol(op);
    if (op.symmetric && !internal) last_algorithm_ = kSymmetric;
    op.sequence = ++sequence_;
    op.fingerprint = op.make_fingerprint();
    if (host_->options().check) op.fingerprint ^= std::hash<std::string_view>{}(call.label);
  }
  submit(op);
  return launch(op);
}

void ShmGroup::select_protocol(ShmOperation& op) const {
  const OpDesc& call = op.call;
  const std::size_t bytes = std::max(call.in.bytes(), call.out.bytes());
  const std::string_view named = host_->algorithms().choose(call.kind, bytes);
  if (named == kSymmetric && bytes > kEagerBytes)
    throw InvalidUsage("all_reduce: algorithm symmetric takes at most " + std::to_string(kEagerBytes) + " bytes, not " +
                       std::to_string(bytes) + "; see TESSERA_ALGO");
  op.symmetric = call.kind == OpKind::all_reduce && named != kDirect && bytes <= kEagerBytes;
  op.small = bytes <= kSmallBytes;
  op.eager = op.eager_size() <= kEagerBytes && (call.kind != OpKind::all_reduce || op.symmetric);
  const bool one_sided = call.kind == OpKind::broadcast || call.kind == OpKind::scatter ||
                         call.kind == OpKind::reduce || call.kind == OpKind::gather;
  op.everyone = !op.eager || !one_sided || host_->options().check;
}

Work ShmGroup::start_batch(std::span<const OpDesc> parts) {
  if (failed_.load()) throw_failure();
  if (parts.empty()) return {};
  last_algorithm_ = kDirect;
  ShmOperation& whole = acquire();
  whole.prepare(shared_from_this(), parts.front());
  whole.parts_left = static_cast<std::uint32_t>(parts.size());
  Work work(&whole);
  for (const OpDesc& part : parts) {
    ShmOperation& op = acquire();
    op.prepare(shared_from_this(), part);
    op.set_deadline();
    op.parent = &whole;
    submit(op);
  }
  host_->engine().try_poll(false);
  host_->engine().wake_waiters();
  host_->engine().wake_progress_thread();
  return work;
}

void ShmGroup::submit(ShmOperation& op) noexcept {
  op.retain();  // until complete()
  if (op.parent != nullptr) op.parent->retain();
  host_->engine().begin_operation();
  const std::lock_guard lock(submit_mutex_);
  if (in_flight_.fetch_add(1) == 0) idle_.store(0);
  submitted_.push(op);
  any_submitted_.store(true);
}

Work ShmGroup::launch(ShmOperation& op) {
  ProgressEngine& engine = host_->engine();
  engine.try_poll(false);
  if (op.small) engine.spin_for_completion(op.finished);
  if (op.succeeded()) return {};
  op.set_deadline();
  engine.wake_waiters();  // the thread that holds the lock may have polled before the submission
  engine.wake_progress_thread_if_idle();
  return Work(&op);
}

void ShmGroup::run_alone(ShmOperation& op) {
  const OpDesc& call = op.call;
  if (op.reduces()) {
    const void* source = call.in.data;
    combine(op, std::span(&source, 1), static_cast<std::byte*>(call.out.data), call.out.count);
  } else if (call.kind != OpKind::barrier) {
    copy_bytes(call.out.data, call.in.data, call.out.bytes(), false);
  }
  op.finished.store(ShmOperation::kGood);
}

void ShmGroup::complete(ShmOperation& op, std::uint32_t how) noexcept {
  ShmOperation* parent = op.parent;
  op.finished.store(how);
  if (parent != nullptr && --parent->parts_left == 0)
    parent->finished.store(failed_.load() ? ShmOperation::kFailed : ShmOperation::kGood);
  host_->engine().end_operation();
  op.release();
  if (parent != nullptr) parent->release();
  {
    const std::lock_guard lock(submit_mutex_);
    if (in_flight_.fetch_sub(1) == 1) idle_.store(1);
  }
  host_->engine().wake_waiters();
}

bool ShmGroup::drain_submissions() noexcept {
  if (!any_submitted_.load()) return false;
  const std::lock_guard lock(submit_mutex_);
  any_submitted_.store(false);
  bool any = false;
  while (!submitted_.empty()) {
    ShmOperation& op = submitted_.pop();
    any = true;
    if (op.call.kind == OpKind::send || op.call.kind == OpKind::recv) {
      const auto peer = static_cast<std::size_t>(op.call.root);
      (op.call.kind == OpKind::send ? sends_ : receives_)[peer].queue.push(op);
      ++messages_waiting_;
    } else {
      collectives_.push(op);
    }
  }
  return any;
}

bool ShmGroup::poll(bool with_health_check) noexcept {
  if (in_flight_.load() == 0) return false;
  bool moved = drain_submissions();
  try {
    if (failed_.load()) {
      fail(failure_, cause_);  // what was submitted since the failure
      return true;
    }
    if (with_health_check && check_health()) return true;
    if (!collectives_.empty()) moved |= advance_first();
    if (messages_waiting_ > 0) moved |= advance_messages();
  } catch (const Mismatch& error) {
    fail(FailureKind::mismatch, error.what());
    return true;
  } catch (const std::exception& error) {
    // Memory of a peer that failed can become unreadable: then the peer's failure is the cause, not this error.
    if (!adopt_peer_failure()) fail(FailureKind::system, error.what());
    return true;
  }
  return moved;
}

/// Advances the first queued collective by one piece, or by many if it is small.
bool ShmGroup::advance_first() {
  constexpr int kPieces = 64;  // bounded, so that deadlines are checked
  const std::uint64_t sequence = collectives_.head->sequence;
  for (int piece = 0; piece < kPieces; ++piece) {
    if (!advance_collective(*collectives_.head)) return piece > 0;
    if (failed_.load() || collectives_.empty() || collectives_.head->sequence != sequence || !collectives_.head->small)
      break;
  }
  return true;
}

void ShmGroup::notify() noexcept {
  for (int k = 0; k < size_; ++k)
    if (k != rank_) ring(board(k).bell);
}

namespace {

void add(ByteCounts& credit, OpKind kind, std::size_t bytes) noexcept {
  auto& counter = credit.bytes[static_cast<std::size_t>(kind)];
  counter.store(counter.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);  // one writer
}

}  // namespace

void ShmGroup::credit(const ShmOperation& op, int source, std::size_t bytes) noexcept {
  if (!op.internal && source != rank_) add(own().credit(source), op.call.kind, bytes);
}

void ShmGroup::count_sent(const ShmOperation& op, int reader, std::size_t bytes) noexcept {
  if (!op.internal && reader != rank_) add(sent_[static_cast<std::size_t>(reader)], op.call.kind, bytes);
}

void ShmGroup::read_traffic(TrafficStats& snapshot) const {
  for (int k = 0; k < size_; ++k) {
    if (k == rank_) continue;
    const ByteCounts& read = ports_[static_cast<std::size_t>(k)].credit(rank_);  // what k has read from this rank
    const ByteCounts& sent = sent_[static_cast<std::size_t>(k)];
    for (std::size_t i = 0; i < kOpKinds; ++i) {
      const std::uint64_t bytes =
          read.bytes[i].load(std::memory_order_relaxed) + sent.bytes[i].load(std::memory_order_relaxed);
      snapshot.by_kind[i].bytes_sent += bytes;
      snapshot.bytes_to_peer[static_cast<std::size_t>(k)] += bytes;
    }
  }
}

}  // namespace tessera::comm::shm
