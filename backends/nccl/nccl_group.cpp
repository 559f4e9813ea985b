#include "backends/nccl/nccl_group.h"

#include <algorithm>

#include "backends/nccl/backoff.h"
#include "backends/nccl/ordered_reduce.h"
#include "tessera/base/error.h"
#include "tessera/comm/core/format.h"

namespace tessera::comm::nccl {
namespace {

using namespace std::chrono_literals;

}  // namespace

NcclGroup::NcclGroup(std::shared_ptr<NcclRuntime> world, std::uint64_t id, CommunicatorOptions options)
    : world_(std::move(world)), api_(world_->api()), id_(id), options_(std::move(options)) {}

NcclOperation& NcclGroup::acquire() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_ops_.empty()) {
      NcclOperation& op = *free_ops_.back();
      free_ops_.pop_back();
      return op;
    }
  }
  auto made = std::make_unique<NcclOperation>(api_);
  const std::lock_guard lock(mutex_);
  all_ops_.push_back(std::move(made));
  return *all_ops_.back();
}

void NcclGroup::put_back(NcclOperation& op) noexcept {
  const std::lock_guard lock(mutex_);
  free_ops_.push_back(&op);
}

void NcclGroup::come_after(cudaStream_t stream) {
  before_->record(stream);
  comes_after_ = true;
}

LaunchTarget NcclGroup::target() const {
  return {.api = api_,
          .comm = comm_,
          .stream = stream_->get(),
          .rank = rank_,
          .size = size(),
          .scratch = scratch_->device()};
}

void NcclGroup::check_device(const OpDesc& call) const {
  for (const ConstView& view : {call.in, ConstView(call.out)})
    if (view.count != 0 && view.device.index != world_->device())
      throw InvalidUsage(std::string(name_of(call.kind)) + ": memory is on " + name_of(view.device) +
                         ", this communicator works on device " + std::to_string(world_->device()));
}

NcclOperation::OpInfo NcclGroup::describe_call(const OpDesc& call) {
  const bool message = call.kind == OpKind::send || call.kind == OpKind::recv;
  const bool checked = world_->options().check && !message;
  return {.name = name_of(call.kind),
          .sort = message ? NcclOperation::OpClass::message : NcclOperation::OpClass::ordered,
          .peer = call.root,
          .sequence = message ? 0 : called_->fetch_add(1) + 1,
          .timeout = call.timeout,
          .label = std::string(call.label),
          .signature = checked ? checked_signature(call, size()) : ""};
}

/// Only grows: memory that operations in flight use is kept.
void* NcclGroup::workspace(std::size_t bytes) {
  if (workspaces_.empty() || workspaces_.back()->bytes() < bytes)
    workspaces_.push_back(std::make_unique<DeviceBlock>(
        api_, std::max(bytes, workspaces_.empty() ? std::size_t{0} : 2 * workspaces_.back()->bytes())));
  return workspaces_.back()->data();
}

Work NcclGroup::start_tree(const OpDesc& call) {
  LaunchTarget where = target();
  return launch(
      describe_call(call),
      [&] {
        where.workspace = workspace(workspace_bytes(call, size(), rank_));
        const ncclResult_t result = issue_exchange(where, call);
        count(call);
        return result;
      },
      [&] { return issue_sum(where, call); });
}

Work NcclGroup::start(const OpDesc& call) {
  const bool tree = uses_tree(api_, call, size(), world_->options().deterministic);
  if (!tree) require_supported(call, size());
  check_device(call);
  if (failed_.load()) throw_failure();
  if (tree) return start_tree(call);
  if (failed_.load()) throw_failure();
  return launch(describe_call(call), [&] {
    const ncclResult_t result = issue(target(), call);
    count(call);
    return result;
  });
}

Work NcclGroup::start_batch(std::span<const OpDesc> parts) {
  for (const OpDesc& part : parts) check_device(part);
  if (failed_.load()) throw_failure();
  if (parts.empty()) return {};
  const OpDesc& first = parts.front();
  return launch({.name = "batch",
                 .sort = NcclOperation::OpClass::batch,
                 .timeout = first.timeout,
                 .label = std::string(first.label)},
                [&] {
                  const ncclResult_t result = issue_batch(target(), parts);
                  for (const OpDesc& part : parts) count(part);
                  return result;
                });
}

/// Throws BackendError. Does nothing if the communicator has failed.
void NcclGroup::issue_locked(const std::function<ncclResult_t()>& issue) {
  const std::lock_guard lock(mutex_);
  if (failed_.load()) return;
  try {
    issue();
  } catch (const NcclError& error) {
    throw BackendError(vendor_text_locked(error));
  }
}

Work NcclGroup::launch(NcclOperation::OpInfo what, const std::function<ncclResult_t()>& issue,
                       const std::function<ncclResult_t()>& and_then) {
  if (failed_.load()) throw_failure();
  const DeviceGuard guard(api_, world_->device());
  NcclOperation& op = acquire();
  const WorkRef hold(op);
  op.prepare(shared_from_this(), std::move(what));
  if (!op.what.signature.empty())
    announce(op.what);  // before the call: NCCL may hang if the ranks call different operations
  world_->begin_operation();
  try {
    issue_locked([&] {
      if (comes_after_) before_->make_stream_wait(stream_->get());
      comes_after_ = false;
      op.retain();
      in_flight_.push_back(&op);
      return issue();
    });
    if (and_then) {
      take_in(op, false);
      issue_locked(and_then);
    }
  } catch (const BackendError& error) {
    fail({FailureKind::backend, op.describe() + ": " + error.what()}, true);
  }
  take_in(op, true);
  return Work(&op);
}

/// Waits until NCCL has enqueued what was issued. `all`: this was all of the operation, so its event is recorded.
void NcclGroup::take_in(NcclOperation& op, bool all) {
  Backoff pause;
  while (!failed_.load()) {
    Failure trouble;
    {
      const std::lock_guard lock(mutex_);
      if (comm_ == nullptr) break;
      const ncclResult_t state = state_locked();
      if (state == ncclSuccess && !all) return;
      if (state == ncclSuccess) {
        const cudaError_t error = api_.cudaEventRecord(op.event.get(), stream_->get());
        op.recorded = error == cudaSuccess;
        if (op.recorded) return;
        trouble = {FailureKind::backend, op.describe() + ": nccl: cudaEventRecord: " + api_.cudaGetErrorString(error)};
      } else if (state != ncclInProgress) {
        health_locked(trouble);
      }
    }
    if (trouble.kind != FailureKind::none) fail(std::move(trouble), true);
    if (Clock::now() >= op.deadline) time_out(op);
    pause(1ms);
  }
  api_.cudaEventRecord(op.event.get(), stream_->get());  // what is on the stream must complete before the exception
  throw_failure(&op);
}

void* NcclGroup::register_memory(void* data, std::size_t bytes) {
  void* handle = nullptr;
  try {
    wait_ready(Clock::now() + options_.timeout);
    issue_locked([&] { return check(api_.ncclCommRegister(comm_, data, bytes, &handle), "ncclCommRegister"); });
  } catch (const Error& error) {
    if (options_.logger != nullptr)
      options_.logger->write(LogLevel::warn, std::string("nccl: memory is not registered: ") + error.what());
    return nullptr;
  }
  return handle;
}

void NcclGroup::deregister_memory(void* handle) noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) api_.ncclCommDeregister(comm_, handle);  // a failed communicator has dropped its registrations
}

void NcclGroup::count(const OpDesc& call) {
  for (int peer = 0; peer < size(); ++peer)
    bytes_[static_cast<std::size_t>(call.kind)][static_cast<std::size_t>(peer)] += bytes_to(call, size(), rank_, peer);
}

void NcclGroup::read_traffic(TrafficStats& snapshot) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t kind = 0; kind < kOpKinds; ++kind)
    for (std::size_t peer = 0; peer < members_.size(); ++peer) {
      snapshot.by_kind[kind].bytes_sent += bytes_[kind][peer];
      snapshot.bytes_to_peer[peer] += bytes_[kind][peer];
    }
}

}  // namespace tessera::comm::nccl
