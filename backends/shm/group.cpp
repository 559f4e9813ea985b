#include "backends/shm/group.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/reduce.h"

namespace tessera::shm {

std::shared_ptr<Group> Group::make(std::shared_ptr<Host> host, int rank, int members, std::shared_ptr<Ledger> ledger) {
  return std::shared_ptr<Group>(new Group(std::move(host), rank, members, std::move(ledger)));
}

Group::Group(std::shared_ptr<Host> host, int rank, int members, std::shared_ptr<Ledger> ledger)
    : host_(std::move(host)), rank_(rank), size_(members), ledger_(std::move(ledger)) {
  head_ = host_->staging().allocate(Port::head_bytes(members), MemoryUse::communication, ledger_, true);
  sent_ = std::vector<Credit>(static_cast<std::size_t>(members));
  slots_ = host_->staging().allocate(sizeof(PortSlots), MemoryUse::communication, ledger_, true);
}

Group::~Group() {
  Host::Retired retired;
  for (Port& member : ports_) retired.closed.push_back(&member.head().closed.value);
  retired.head = std::move(head_);
  retired.slots = std::move(slots_);
  retired.tiles = std::move(tiles_);
  retired.copies = std::move(copies_);
  host_->retire(std::move(retired));
}

Group::Member Group::own_place() const {
  return {host_->rank(), host_->staging().offset_of(head_.data()), host_->staging().offset_of(slots_.data())};
}

void Group::connect(std::vector<Member> members) {
  members_ = std::move(members);
  for (const Member& member : members_) {
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

void Group::close() noexcept {
  // Every operation has a deadline, at which it fails: this ends.
  while (!host_->engine().wait(idle_, Clock::now() + std::chrono::hours(1))) {
  }
  host_->engine().remove(*this);
  own().head().closed.value.store(1);
}

Op& Group::acquire() {
  const std::lock_guard lock(submit_mutex_);
  if (!free_ops_.empty()) return free_ops_.pop();
  all_ops_.push_back(std::make_unique<Op>());
  return *all_ops_.back();
}

void Group::put_back(Op& op) noexcept {
  const std::lock_guard lock(submit_mutex_);
  free_ops_.push(op);
}

namespace {

/// Up to here an operation may finish inside its call.
constexpr std::size_t kSmallBytes = std::size_t{1} << 20;

}  // namespace

Work Group::start(const Call& call, bool internal) {
  if (failed_.load()) throw_failure();
  Op& op = acquire();
  const WorkHold hold(op);
  op.prepare(shared_from_this(), call);
  op.internal = internal;
  if (!internal) last_algorithm_ = kDirect;
  if (call.kind != OpKind::send && call.kind != OpKind::recv) {
    if (size_ == 1) {
      run_alone(op);
      return {};
    }
    choose_way(op);
    if (op.symmetric && !internal) last_algorithm_ = kSymmetric;
    op.sequence = ++sequence_;
    op.fingerprint = op.make_fingerprint();
    if (host_->options().check) op.fingerprint ^= std::hash<std::string_view>{}(call.label);
  }
  submit(op);
  return launch(op);
}

void Group::choose_way(Op& op) const {
  const Call& call = op.call;
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

Work Group::start_batch(std::span<const Call> parts) {
  if (failed_.load()) throw_failure();
  if (parts.empty()) return {};
  last_algorithm_ = kDirect;
  Op& whole = acquire();
  whole.prepare(shared_from_this(), parts.front());
  whole.parts_left = static_cast<std::uint32_t>(parts.size());
  Work work(&whole);
  for (const Call& part : parts) {
    Op& op = acquire();
    op.prepare(shared_from_this(), part);
    op.set_deadline();
    op.parent = &whole;
    submit(op);
  }
  host_->engine().try_poll(false);
  host_->engine().wake_waiters();
  host_->engine().hand_over();
  return work;
}

void Group::submit(Op& op) noexcept {
  op.retain();  // until complete()
  if (op.parent != nullptr) op.parent->retain();
  host_->engine().begin_operation();
  const std::lock_guard lock(submit_mutex_);
  if (in_flight_.fetch_add(1) == 0) idle_.store(0);
  submitted_.push(op);
  any_submitted_.store(true);
}

Work Group::launch(Op& op) {
  ProgressEngine& engine = host_->engine();
  engine.try_poll(false);
  if (op.small) engine.drive_briefly(op.finished);
  if (op.finished_well()) return {};
  op.set_deadline();
  engine.wake_waiters();  // who holds the lock may have looked before we submitted
  engine.hand_over_unless_awaited();
  return Work(&op);
}

void Group::run_alone(Op& op) {
  const Call& call = op.call;
  if (op.reduces()) {
    const void* source = call.in.data;
    combine(op, std::span(&source, 1), static_cast<std::byte*>(call.out.data), call.out.count);
  } else if (call.kind != OpKind::barrier) {
    copy_bytes(call.out.data, call.in.data, call.out.bytes(), false);
  }
  op.finished.store(Op::kGood);
}

void Group::complete(Op& op, std::uint32_t how) noexcept {
  Op* parent = op.parent;
  op.finished.store(how);
  if (parent != nullptr && --parent->parts_left == 0) parent->finished.store(failed_.load() ? Op::kFailed : Op::kGood);
  host_->engine().end_operation();
  op.release();
  if (parent != nullptr) parent->release();
  {
    const std::lock_guard lock(submit_mutex_);
    if (in_flight_.fetch_sub(1) == 1) idle_.store(1);
  }
  host_->engine().wake_waiters();
}

bool Group::drain_submissions() noexcept {
  if (!any_submitted_.load()) return false;
  const std::lock_guard lock(submit_mutex_);
  any_submitted_.store(false);
  bool any = false;
  while (!submitted_.empty()) {
    Op& op = submitted_.pop();
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

bool Group::poll(bool thorough) noexcept {
  if (in_flight_.load() == 0) return false;
  bool moved = drain_submissions();
  try {
    if (failed_.load()) {
      fail(failure_, cause_);  // what was submitted since
      return true;
    }
    if (thorough && look_for_trouble()) return true;
    if (!collectives_.empty()) moved |= advance_first();
    if (messages_waiting_ > 0) moved |= advance_messages();
  } catch (const Mismatch& error) {
    fail(FailureKind::mismatch, error.what());
    return true;
  } catch (const std::exception& error) {
    // Memory that a peer let go of can't be read any more: then its failure is the cause, and not what came of it here.
    if (!peer_failed()) fail(FailureKind::system, error.what());
    return true;
  }
  return moved;
}

/// A piece of the collective at the head, or, where it is small, many.
bool Group::advance_first() {
  constexpr int kPieces = 64;  // deadlines are looked at, too
  const std::uint64_t sequence = collectives_.head->sequence;
  for (int piece = 0; piece < kPieces; ++piece) {
    if (!advance_collective(*collectives_.head)) return piece > 0;
    if (failed_.load() || collectives_.empty() || collectives_.head->sequence != sequence || !collectives_.head->small)
      break;
  }
  return true;
}

void Group::notify() noexcept {
  for (int k = 0; k < size_; ++k)
    if (k != rank_) ring(board(k).bell);
}

namespace {

void add(Credit& credit, OpKind kind, std::size_t bytes) noexcept {
  auto& counter = credit.bytes[static_cast<std::size_t>(kind)];
  counter.store(counter.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);  // one writer
}

}  // namespace

void Group::credit(const Op& op, int source, std::size_t bytes) noexcept {
  if (!op.internal && source != rank_) add(own().credit(source), op.call.kind, bytes);
}

void Group::count_sent(const Op& op, int reader, std::size_t bytes) noexcept {
  if (!op.internal && reader != rank_) add(sent_[static_cast<std::size_t>(reader)], op.call.kind, bytes);
}

void Group::read_meter(MeterSnapshot& snapshot) const {
  for (int k = 0; k < size_; ++k) {
    if (k == rank_) continue;
    const Credit& read = ports_[static_cast<std::size_t>(k)].credit(rank_);  // what k has read from us
    const Credit& sent = sent_[static_cast<std::size_t>(k)];
    for (std::size_t i = 0; i < kOpKinds; ++i) {
      const std::uint64_t bytes =
          read.bytes[i].load(std::memory_order_relaxed) + sent.bytes[i].load(std::memory_order_relaxed);
      snapshot.by_kind[i].bytes_sent += bytes;
      snapshot.bytes_to_peer[static_cast<std::size_t>(k)] += bytes;
    }
  }
}

}  // namespace tessera::shm
