#include "backends/nccl/nccl_group.h"

#include <algorithm>

#include "backends/nccl/ordered_reduce.h"
#include "tessera/base/error.h"
#include "tessera/comm/core/backoff.h"
#include "tessera/comm/core/format.h"

namespace tessera::comm::nccl {

using namespace std::chrono_literals;

NcclGroup::NcclGroup(std::shared_ptr<NcclRuntime> runtime, std::uint64_t id)
    : GroupCore({runtime, &runtime->options()}, 0, {}), runtime_(std::move(runtime)), api_(runtime_->api()), id_(id) {}

void NcclGroup::come_after(cudaStream_t stream) {
  before_->record(stream);
  comes_after_ = true;
}

LaunchTarget NcclGroup::target() const {
  return {.api = api_,
          .comm = comm_,
          .stream = stream_->get(),
          .rank = rank(),
          .size = size(),
          .scratch = scratch_->device()};
}

void NcclGroup::check_device(const OpDesc& call) const {
  for (const ConstView& view : {call.in, ConstView(call.out)})
    if (view.count != 0 && view.device.index != runtime_->device())
      throw InvalidUsage(std::string(name_of(call.kind)) + ": memory is on " + name_of(view.device) +
                         ", this communicator needs cuda:" + std::to_string(runtime_->device()));
}

NcclOperation& NcclGroup::prepare(const OpDesc& call) {
  NcclOperation& op = acquire<NcclOperation>(api_, *this);
  const bool message = is_message(call.kind);
  op.reset(call, message ? 0 : called_->fetch_add(1) + 1);
  if (options().check && !message) op.signature = checked_signature(call, size());
  return op;
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
      prepare(call),
      [&] {
        where.workspace = workspace(workspace_bytes(call, size(), rank()));
        const ncclResult_t result = issue_exchange(where, call);
        count(call);
        return result;
      },
      [&] { return issue_sum(where, call); });
}

Work NcclGroup::start(const OpDesc& call) {
  const bool tree = uses_tree(api_, call, size(), options().deterministic);
  if (!tree) require_supported(call, size());
  check_device(call);
  throw_if_failed();
  const DeviceGuard guard(api_, runtime_->device());
  if (tree) return start_tree(call);
  return launch(prepare(call), [&] {
    const ncclResult_t result = issue(target(), call);
    count(call);
    return result;
  });
}

Work NcclGroup::start_batch(std::span<const OpDesc> parts) {
  for (const OpDesc& part : parts) check_device(part);
  throw_if_failed();
  if (parts.empty()) return {};
  const DeviceGuard guard(api_, runtime_->device());
  NcclOperation& op = acquire<NcclOperation>(api_, *this);
  op.reset({.timeout = parts.front().timeout, .label = parts.front().label}, 0, "batch");
  return launch(op, [&] {
    const ncclResult_t result = issue_batch(target(), parts);
    for (const OpDesc& part : parts) count(part);
    return result;
  });
}

/// Throws BackendError. Does nothing if the communicator has failed.
void NcclGroup::issue_locked(const Issue& issue) {
  const std::lock_guard lock(mutex_);
  if (failed()) return;
  try {
    issue();
  } catch (const NcclError& error) {
    throw BackendError(vendor_text_locked(error));
  }
}

Work NcclGroup::launch(NcclOperation& op, const Issue& issue, const Issue& and_then) {
  op.group = shared_from_this();
  const WorkRef hold(op);
  throw_if_failed();
  if (!op.signature.empty())
    send_signature(op);  // before the call: NCCL may hang if the ranks call different operations
  runtime_->begin_operation();
  try {
    issue_locked([&] {
      if (comes_after_) before_->make_stream_wait(stream_->get());
      comes_after_ = false;
      op.retain();
      in_flight_.push_back(&op);
      return issue();
    });
    if (and_then) {
      wait_enqueued(op, false);
      issue_locked(and_then);
    }
  } catch (const BackendError& error) {
    fail({FailureKind::backend, op.format() + ": " + error.what()}, true);
  }
  wait_enqueued(op, true);
  return Work(&op);
}

/// Waits until NCCL has enqueued what was issued. `all`: this was all of the operation, so its event is recorded.
void NcclGroup::wait_enqueued(NcclOperation& op, bool all) {
  Backoff pause;
  while (!failed()) {
    Failure failure;
    {
      const std::lock_guard lock(mutex_);
      if (comm_ == nullptr) break;
      const ncclResult_t state = state_locked();
      if (state == ncclSuccess && !all) return;
      if (state == ncclSuccess) {
        const cudaError_t error = api_.cudaEventRecord(op.event.get(), stream_->get());
        op.recorded = error == cudaSuccess;
        if (op.recorded) return;
        failure = {FailureKind::backend, op.format() + ": nccl: cudaEventRecord: " + api_.cudaGetErrorString(error)};
      } else if (state != ncclInProgress) {
        health_locked(failure);
      }
    }
    if (failure.kind != FailureKind::none) fail(std::move(failure), true);
    if (op.is_late(Clock::now())) fail_with_timeout(op);
    pause(1ms);
  }
  api_.cudaEventRecord(op.event.get(), stream_->get());  // what is on the stream must complete before the exception
  throw_failure(op);
}

void* NcclGroup::register_memory(void* data, std::size_t bytes) {
  void* handle = nullptr;
  try {
    wait_ready(Clock::now() + timeout());
    issue_locked([&] { return check(api_.ncclCommRegister(comm_, data, bytes, &handle), "ncclCommRegister"); });
  } catch (const Error& error) {
    log(LogLevel::warn, std::string("nccl: memory is not registered: ") + error.what());
    return nullptr;
  }
  return handle;
}

void NcclGroup::deregister_memory(void* handle) noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) api_.ncclCommDeregister(comm_, handle);  // a failed communicator has dropped its registrations
}

void NcclGroup::count(const OpDesc& call) {
  for (int peer = 0; peer < size(); ++peer) traffic_.add(call.kind, peer, bytes_to(call, size(), rank(), peer));
}

}  // namespace tessera::comm::nccl
