#include "tessera/comm/host/schedule_executor.h"

#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/host/host_group.h"
#include "tessera/comm/kernels/reduce.h"

namespace tessera::comm::host {
namespace {

constexpr std::uint8_t kIdle = 0;
constexpr std::uint8_t kUnderWay = 1;
constexpr std::uint8_t kDone = 2;

constexpr std::size_t kKeptScratchBytes = 1 << 20;

/// A step number that no collective reaches; those below it, down to the largest tag, are of messages with tags.
constexpr std::uint32_t kMessageStep = (1U << 24) - 1;

bool is_transfer(const ScheduleStep& step) {
  return step.kind == ScheduleStep::Kind::send || step.kind == ScheduleStep::Kind::receive;
}

/// The schedule of a single send or receive.
void describe_message(const OpDesc& call, Schedule& schedule) {
  schedule.algorithm = kMessageAlgorithm;
  schedule.steps.resize(1);
  ScheduleStep& step = schedule.steps.front();
  step.kind = call.kind == OpKind::send ? ScheduleStep::Kind::send : ScheduleStep::Kind::receive;
  step.peer = call.root;
  step.number = kMessageStep - static_cast<std::uint32_t>(call.tag);
  step.from = {BufferId::in, 0, call.in.bytes()};
  step.to = {BufferId::out, 0, call.out.bytes()};
}

}  // namespace

void ScheduleExecutor::reset(const OpDesc& what, std::uint64_t number) {
  Operation::reset(what, number);
  small = what.in.bytes() <= kSmallBytes && what.out.bytes() <= kSmallBytes;
  signature.clear();
  runnable = false;
  verified = true;
  surprise_peer = -1;
  native_position = 0;
  copy = nullptr;
  factor_ = what.op.kind == ReduceOp::Kind::premul_sum ? what.op.scalar : 1;
  left_ = 0;
  ready_.clear();
  next_ready_ = 0;
  schedule_.reset();
  if (!is_message()) return;
  if (message_ == nullptr) message_ = std::make_shared<Schedule>();
  describe_message(call, *message_);
  set_schedule(message_);
}

/// Frees scratch memory that few operations need.
void ScheduleExecutor::recycle() noexcept {
  schedule_.reset();
  if (scratch_.bytes() > kKeptScratchBytes) scratch_.reset();
  Operation::recycle();
}

void ScheduleExecutor::set_schedule(std::shared_ptr<const Schedule> schedule) {
  schedule_ = std::move(schedule);
  const std::size_t steps = schedule_->steps.size();
  if (schedule_->scratch_bytes > scratch_.bytes())
    scratch_ = host_.runtime().memory().allocate(schedule_->scratch_bytes, MemoryCategory::communication);
  waits_.resize(steps);
  messages_.resize(steps);
  state_.assign(steps, kIdle);
  left_ = steps;
  ready_.reserve(steps);
  for (std::size_t i = 0; i < steps; ++i) {
    waits_[i] = schedule_->steps[i].waits_for;
    if (waits_[i] == 0) ready_.push_back(static_cast<std::uint32_t>(i));
  }
}

std::byte* ScheduleExecutor::at(const BufferRegion& region) const noexcept {
  switch (region.place) {
    case BufferId::in:  // only read
      return static_cast<std::byte*>(const_cast<void*>(call.in.data)) + region.offset;
    case BufferId::out:
      return static_cast<std::byte*>(call.out.data) + region.offset;
    case BufferId::scratch:
      return scratch_.bytes_at(region.offset);
    case BufferId::factor:
      break;
  }
  return reinterpret_cast<std::byte*>(const_cast<double*>(&factor_)) + region.offset;
}

void ScheduleExecutor::start_message(std::uint32_t index) {
  const ScheduleStep& step = schedule_->steps[index];
  const bool sends = step.kind == ScheduleStep::Kind::send;
  const BufferRegion& region = sends ? step.from : step.to;
  Message& message = messages_[index];
  message = Message{};
  message.data = region.bytes == 0 ? nullptr : at(region);
  message.bytes = region.bytes;
  message.peer = host_.world_rank(step.peer);
  message.tag = {host_.id(), static_cast<std::uint32_t>(sequence), step.number};
  message.owner = this;
  message.index = index;
  if (sends) message.sent = host_.counter(*this, step.peer);
  state_[index] = kUnderWay;
  Transport& transport = host_.runtime().transport();
  sends ? transport.send(message) : transport.receive(message);
}

/// False: earlier native operations must start first.
bool ScheduleExecutor::start_native(std::uint32_t index) {
  if (!host_.begin_native_in_order(*this)) return false;
  const ScheduleStep& step = schedule_->steps[index];
  const ReduceOp::Kind reduce = call.op.kind;
  const bool adds = reduce == ReduceOp::Kind::avg || reduce == ReduceOp::Kind::premul_sum;
  native_ = {.kind = call.kind,
             .dtype = call.out.dtype,
             .reduce = adds ? ReduceOp::Kind::sum : reduce,
             .count = part_count(call, host_.size()),
             .root = call.root,
             .in = step.from.bytes == 0 ? nullptr : at(step.from),
             .out = step.to.bytes == 0 ? nullptr : at(step.to),
             .group = host_.native(),
             .copy = copy,
             .owner = this,
             .index = index};
  state_[index] = kUnderWay;
  host_.runtime().transport().native()->start(native_);
  return true;
}

void ScheduleExecutor::native_done(NativeRequest& collective) noexcept {
  host_.count_native(*this);
  step_done(collective.index);
  host_.runtime().make_runnable(*this);
}

std::size_t ScheduleExecutor::compute(const ScheduleStep& step) {
  if (step.kind == ScheduleStep::Kind::copy) {
    copy_bytes(at(step.to), at(step.from), step.to.bytes, false);
    return step.to.bytes;
  }
  ReduceOp op = call.op;
  const bool plain = step.arithmetic == ReducePhase::partial;
  if (op.kind == ReduceOp::Kind::premul_sum && step.arithmetic != ReducePhase::whole) op = ReduceOp::sum();
  if (op.kind == ReduceOp::Kind::avg && plain) op = ReduceOp::sum();
  sources_.clear();
  for (std::uint32_t i = 0; i < step.sources; ++i) sources_.push_back(at(schedule_->sources[step.first_source + i]));
  std::span<const double> factors;
  if (step.factors.bytes != 0) factors = {reinterpret_cast<const double*>(at(step.factors)), step.sources};
  const DType dtype = call.out.dtype;
  reduce_tree(op, dtype, sources_, factors, at(step.to), step.to.bytes / size_of(dtype));
  return step.to.bytes * step.sources;
}

MessageTag ScheduleExecutor::message_tag(std::uint64_t number) const noexcept {
  return {host_.id(), static_cast<std::uint32_t>(number), message_->steps.front().number};
}

void ScheduleExecutor::set_sender(int member, std::uint64_t number) noexcept {
  call.root = member;
  sequence = number;
  message_->steps.front().peer = member;
  if (call.source != nullptr) *call.source = member;
}

void ScheduleExecutor::begin() {
  if (ready()) host_.runtime().make_runnable(*this);
}

bool ScheduleExecutor::run(std::size_t budget) {
  const std::size_t before = next_ready_;
  std::size_t moved_bytes = 0;
  while (ready() && moved_bytes <= budget) {
    const std::uint32_t index = ready_[next_ready_];
    const ScheduleStep& step = schedule_->steps[index];
    if (step.kind == ScheduleStep::Kind::native && !start_native(index)) break;
    ++next_ready_;
    if (is_transfer(step)) {
      start_message(index);
    } else if (step.kind != ScheduleStep::Kind::native) {
      moved_bytes += compute(step);
      step_done(index);
    }
  }
  return next_ready_ != before;
}

void ScheduleExecutor::step_done(std::uint32_t index) noexcept {
  state_[index] = kDone;
  --left_;
  const ScheduleStep& step = schedule_->steps[index];
  for (std::uint32_t i = 0; i < step.dependents; ++i) {
    const std::uint32_t dependent = schedule_->dependents[step.first_dependent + i];
    if (--waits_[dependent] == 0) ready_.push_back(dependent);  // its capacity is reserved: this can't throw
  }
}

void ScheduleExecutor::message_done(Message& message, std::size_t bytes) noexcept {
  if (bytes != message.bytes && surprise_peer < 0) {
    surprise = bytes;
    surprise_peer = schedule_->steps[message.index].peer;
  }
  step_done(message.index);
  host_.runtime().make_runnable(*this);
}

bool ScheduleExecutor::needs(int member) const noexcept {
  for (std::size_t i = 0; i < state_.size() && left_ != 0; ++i) {
    const ScheduleStep& step = schedule_->steps[i];
    if (state_[i] == kDone) continue;
    if (step.kind == ScheduleStep::Kind::native || (is_transfer(step) && step.peer == member)) return true;
  }
  return false;
}

void ScheduleExecutor::cancel_step(std::uint32_t index) noexcept {
  Transport& transport = host_.runtime().transport();
  if (schedule_->steps[index].kind == ScheduleStep::Kind::native) return transport.native()->cancel(native_);
  transport.cancel(messages_[index]);
}

void ScheduleExecutor::cancel() noexcept {
  for (std::size_t i = 0; i < state_.size(); ++i)
    if (state_[i] == kUnderWay) cancel_step(static_cast<std::uint32_t>(i));
  state_.clear();
  ready_.clear();
  next_ready_ = 0;
  left_ = 0;
}

}  // namespace tessera::comm::host
