#include "backends/nccl/nccl_group.h"

#include <cstring>
#include <numeric>

#include "backends/nccl/ordered_reduce.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/core/format.h"

namespace tessera::comm::nccl {
namespace {

using namespace std::chrono_literals;
constexpr auto kCloseTime = 10s;

std::uint64_t child_id(std::uint64_t parent, std::uint64_t split, int color) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const std::uint64_t part : {parent, split, static_cast<std::uint64_t>(color)})
    hash = (hash ^ part) * 0x100000001b3U ^ (hash >> 29);
  return hash;
}

}  // namespace

void NcclGroup::connect(const ncclUniqueId& id) {
  std::vector<int> all(static_cast<std::size_t>(runtime_->size()));
  std::iota(all.begin(), all.end(), 0);
  enter_members(runtime_->rank(), std::move(all));
  runtime_->add(*this);
  init([&] { return id; }, timeout());
}

void NcclGroup::init(const std::function<ncclUniqueId()>& key, std::chrono::milliseconds timeout) {
  const Clock::time_point until = Clock::now() + timeout;
  const DeviceGuard guard(api_, runtime_->device());  // NCCL uses the current device
  try {
    const ncclUniqueId id = key();
    call_nccl([&] { comm_.init(id, rank(), size()); });
    wait_ready(until);
    create_resources();
  } catch (const Timeout&) {
    fail({FailureKind::timeout, "nccl: the communicator of " + std::to_string(size()) + " ranks was not ready within " +
                                    format_duration(timeout) + describe_absent()},
         true);
  } catch (const BackendError& error) {
    fail({FailureKind::backend, error.what()}, true);
  }
  throw_if_failed();
}

std::shared_ptr<NcclGroup> NcclGroup::create_group(const GroupPlan& plan) {
  throw_if_failed();
  const std::uint64_t list = fingerprint(plan.members);
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = ++groups_[{list, plan.tag}];
  }
  auto child = std::make_shared<NcclGroup>(runtime_, child_id(id(), list + number, plan.tag));
  child->enter_members(plan.rank, plan.world_ranks(*this));
  child->expect_members();
  runtime_->add(*child);
  try {
    child->init([&] { return child->exchange_key(Clock::now() + plan.timeout); }, plan.timeout);
  } catch (...) {
    runtime_->remove(*child);
    if (!child->failed()) throw;
    const Failure& failure = child->failure_.get();
    fail({failure.kind, std::string(plan.label) + ": " + failure.cause}, true);
    failure_.rethrow();
  }
  runtime_->memory().add(*child);
  return child;
}

/// The first member makes the key. Each one also tells the others that it has begun.
ncclUniqueId NcclGroup::exchange_key(Clock::time_point until) {
  ncclUniqueId key{};
  std::string hex;
  if (rank() == 0) {
    if (const ncclResult_t result = api_.ncclGetUniqueId(&key); result != ncclSuccess)
      throw BackendError(std::string("nccl: ncclGetUniqueId: ") + api_.ncclGetErrorString(result));
    constexpr std::string_view kDigits = "0123456789abcdef";
    for (const char byte : key.internal) {
      hex += kDigits[static_cast<unsigned char>(byte) / 16];
      hex += kDigits[static_cast<unsigned char>(byte) % 16];
    }
  }
  runtime_->monitor().send(
      members(), {.kind = ControlMessage::Kind::group_key, .communicator = id(), .text = hex.empty() ? "begun" : hex});
  return rank() == 0 ? key : wait_for_key(until);
}

/// Creates what operations need, once the NCCL communicator is ready.
void NcclGroup::create_resources() {
  capabilities_ = make_capabilities(size(), options().deterministic);
  stream_ = std::make_unique<OperationStream>(api_, sizeof(int) * (members().size() + 1));
}

std::shared_ptr<NcclGroup> NcclGroup::split(int color, int key) {
  const DeviceGuard guard(api_, runtime_->device());
  auto child = std::make_shared<NcclGroup>(runtime_, child_id(id(), ++splits_, color));
  NcclOperation& op = acquire<NcclOperation>(api_, *this);
  op.reset({.timeout = timeout()}, next_number(), "split");
  if (options().check) op.signature = "split";
  launch(op, [&] { comm_.split(color, key, child->comm_); }).wait();
  if (color < 0) return nullptr;
  try {
    child->complete_split();
  } catch (const Error& error) {
    fail({FailureKind::backend, std::string("split: ") + error.what()}, true);
    failure_.rethrow();
  } catch (const NcclError& error) {
    fail({FailureKind::backend, std::string("split: ") + error.function}, true);
    failure_.rethrow();
  }
  runtime_->add(*child);
  runtime_->memory().add(*child);
  return child;
}

/// Learns the members of this group, which a split has created.
void NcclGroup::complete_split() {
  wait_ready(Clock::now() + timeout());
  int rank = 0;
  int size = 0;
  check(api_.ncclCommUserRank(comm_.get(), &rank), "ncclCommUserRank");
  check(api_.ncclCommCount(comm_.get(), &size), "ncclCommCount");
  // Until they are known:
  enter_members(rank, std::vector<int>(static_cast<std::size_t>(size), runtime_->rank()));
  create_resources();
  enter_members(rank, gather_world_ranks());
}

/// Gathers the world ranks of all members over the NCCL communicator, which also tests it.
std::vector<int> NcclGroup::gather_world_ranks() {
  std::vector<int> ranks(members().size());
  const std::size_t bytes = sizeof(int) * ranks.size();
  int* const device = static_cast<int*>(stream_->scratch().device());
  int* const host = static_cast<int*>(stream_->scratch().host());
  host[ranks.size()] = runtime_->rank();
  const cudaStream_t stream = stream_->get();
  start_internal([&] {
    int* const mine = device + ranks.size();
    check_cuda(api_, api_.cudaMemcpyAsync(mine, host + ranks.size(), sizeof(int), cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
    check(api_.ncclAllGather(mine, device, sizeof(int), ncclUint8, comm_.get(), stream), "ncclAllGather");
  }).wait();
  start_internal([&] {
    check_cuda(api_, api_.cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  }).wait();
  std::memcpy(ranks.data(), host, bytes);
  return ranks;
}

/// An operation of a split, which only this group's members call.
Work NcclGroup::start_internal(const Issue& issue) {
  NcclOperation& op = acquire<NcclOperation>(api_, *this);
  op.reset({.timeout = timeout()}, 0, "split");
  return launch(op, issue);
}

void NcclGroup::close() noexcept {
  drain();
  completions_.close();
  runtime_->monitor().send(members(),
                           {.kind = ControlMessage::Kind::departure, .communicator = id(), .value = called()->load()});
  runtime_->memory().remove(*this);
  runtime_->remove(*this);
  if (!failed()) {
    try {
      const DeviceGuard guard(api_, runtime_->device());
      call_nccl([this] { comm_.finalize(); });
      wait_ready(Clock::now() + kCloseTime);
      const std::lock_guard lock(mutex_);
      comm_.destroy();
    } catch (const std::exception& error) {
      log(LogLevel::warn, std::string("nccl: closing a communicator: ") + error.what());
    }
  }
  if (!comm_.wait_aborted()) log(LogLevel::warn, "nccl: a failed communicator could not be aborted and is leaked");
}

LaunchTarget NcclGroup::target() const {
  return {.api = api_,
          .comm = comm_.get(),
          .stream = stream_->get(),
          .rank = rank(),
          .size = size(),
          .scratch = stream_->scratch().device()};
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
  op.reset(call, message ? 0 : next_number());
  if (options().check && !message) op.signature = checked_signature(call, size());
  return op;
}

Work NcclGroup::start_tree(const OpDesc& call) {
  const auto where = [this, bytes = workspace_bytes(call, size(), rank())] {
    LaunchTarget all = target();
    all.workspace = stream_->workspace(bytes);
    return all;
  };
  return launch(
      prepare(call),
      [&] {
        issue_exchange(where(), call);
        count(call);
      },
      [&] { issue_sum(where(), call); });
}

Work NcclGroup::start_divided(const OpDesc& call) {
  OpDesc sum = call;
  sum.op = ReduceOp::sum();
  return launch(
      prepare(call),
      [&] {
        issue(target(), sum);
        count(call);
      },
      [&] { issue_division(target(), call); });
}

Work NcclGroup::start(const OpDesc& call) {
  const bool tree = uses_tree(api_, call, size(), options().deterministic);
  if (!tree) require_supported(call, size());
  check_device(call);
  throw_if_failed();
  const DeviceGuard guard(api_, runtime_->device());
  if (tree) return start_tree(call);
  if (divides_afterwards(api_, call)) return start_divided(call);
  return launch(prepare(call), [&] {
    issue(target(), call);
    count(call);
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
    issue_batch(target(), parts);
    for (const OpDesc& part : parts) count(part);
  });
}

void* NcclGroup::register_memory(void* data, std::size_t bytes) {
  void* handle = nullptr;
  try {
    wait_ready(Clock::now() + timeout());
    call_nccl([&] { check(api_.ncclCommRegister(comm_.get(), data, bytes, &handle), "ncclCommRegister"); });
  } catch (const Error& error) {
    log(LogLevel::warn, std::string("nccl: memory is not registered: ") + error.what());
    return nullptr;
  }
  return handle;
}

void NcclGroup::deregister_memory(void* handle) noexcept {
  const std::lock_guard lock(mutex_);
  // A failed communicator has dropped its registrations.
  if (comm_.get() != nullptr) api_.ncclCommDeregister(comm_.get(), handle);
}

void NcclGroup::count(const OpDesc& call) {
  for (int peer = 0; peer < size(); ++peer) traffic_.add(call.kind, peer, bytes_to(call, size(), rank(), peer));
}

}  // namespace tessera::comm::nccl
