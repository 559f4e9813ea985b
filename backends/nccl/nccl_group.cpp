#include "backends/nccl/nccl_group.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "tessera/base/checksum.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/core/op_traits.h"

namespace tessera::comm::nccl {
namespace {

using namespace std::chrono_literals;
constexpr auto kCloseTime = 10s;

std::uint64_t child_id(std::uint64_t parent, std::uint64_t split, int color) {
  const std::array parts{parent, split, static_cast<std::uint64_t>(color)};
  return base::checksum(std::as_bytes(std::span(parts)));
}

}  // namespace

std::shared_ptr<NcclGroup> NcclGroup::create(std::shared_ptr<NcclRuntime> runtime, std::uint64_t id,
                                             std::shared_ptr<Family> family) {
  const auto end = [&api = runtime->api(), device = runtime->device()](NcclGroup* group) {
    const DeviceGuard guard(api, device, std::nothrow);
    delete group;
  };
  return std::shared_ptr<NcclGroup>(new NcclGroup(std::move(runtime), id, std::move(family)), end);
}

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
    run_call([this, id = key()] { comm_.init(id, rank(), size()); }, until);
    create_resources();
  } catch (const Timeout&) {
    fail({FailureKind::timeout, "nccl: the communicator of " + std::to_string(size()) + " ranks was not ready within " +
                                    format_duration(timeout) + describe_absent()},
         true);
  } catch (const BackendError& error) {
    fail({FailureKind::backend, error.what()}, true);
  }
  if (failed()) comm_.wait_aborted();
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
  return create_child(plan, make_child(child_id(id(), list + number, plan.tag), {}, nullptr));
}

std::shared_ptr<NcclGroup> NcclGroup::make_child(std::uint64_t id, const SplitOptions& options,
                                                 std::shared_ptr<Family> family) {
  auto child = create(runtime_, id, std::move(family));
  if (options.for_gathers && runtime_->copy_engines()) child->comm_.gather_by_copy_engines();
  return child;
}

std::shared_ptr<NcclGroup> NcclGroup::create_child(const GroupPlan& plan, std::shared_ptr<NcclGroup> child) {
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
  stream_ = std::make_shared<OperationStream>(api_, sizeof(SplitRequest) * (members().size() + 1));
  family_->add(*this);
}

std::shared_ptr<NcclGroup> NcclGroup::split(int color, int key, const SplitOptions& options) {
  const DeviceGuard guard(api_, runtime_->device());
  const GroupPlan plan = plan_split(gather_requests({color, key}), rank(), timeout());
  const std::uint64_t child_number = child_id(id(), ++splits_, color);
  if (plan.members.empty()) return nullptr;
  std::vector<int> all(members().size());
  std::iota(all.begin(), all.end(), 0);
  return plan.members == all ? duplicate(make_child(child_number, options, family_))
                             : create_child(plan, make_child(child_number, options, nullptr));
}

std::shared_ptr<NcclGroup> NcclGroup::duplicate(std::shared_ptr<NcclGroup> child) {
  child->enter_members(rank(), members());
  start_split(
      0, [this, child](ncclComm_t comm) { child->comm_.begin_copy(comm, rank()); },
      [child](ncclComm_t) { child->comm_.finish_copy(); })
      .wait();
  try {
    child->create_resources();
  } catch (const Error& error) {
    fail({FailureKind::backend, std::string("split: ") + error.what()}, true);
    failure_.rethrow();
  }
  runtime_->add(*child);
  runtime_->memory().add(*child);
  return child;
}

/// Gathers what all members want, over the NCCL communicator.
std::vector<SplitRequest> NcclGroup::gather_requests(SplitRequest mine) {
  std::vector<SplitRequest> requests(members().size());
  auto* const device = static_cast<SplitRequest*>(stream_->scratch().device());
  auto* const host = static_cast<SplitRequest*>(stream_->scratch().host());
  host[requests.size()] = mine;
  start_split(next_number(), [this, device, host, count = requests.size()](ncclComm_t comm) {
    const cudaStream_t stream = stream_->get();
    const auto copy = [&](void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
      check_cuda(api_, api_.cudaMemcpyAsync(to, from, bytes, kind, stream), "cudaMemcpyAsync");
    };
    copy(device + count, host + count, sizeof(SplitRequest), cudaMemcpyHostToDevice);
    check(api_.ncclAllGather(device + count, device, sizeof(SplitRequest), ncclUint8, comm, stream), "ncclAllGather");
    copy(host, device, count * sizeof(SplitRequest), cudaMemcpyDeviceToHost);
  }).wait();
  std::copy_n(host, requests.size(), requests.begin());
  return requests;
}

/// A part of a split. `number`: as that of an operation.
Work NcclGroup::start_split(std::uint64_t number, Issue issue, Issue and_then) {
  NcclOperation& op = acquire<NcclOperation>(api_, *this);
  op.reset({.timeout = timeout()}, number, "split");
  if (options().check && number != 0) op.signature = "split";
  return launch(op, std::move(issue), std::move(and_then));
}

void NcclGroup::close() noexcept {
  drain();
  completions_.close();
  runtime_->monitor().send(members(),
                           {.kind = ControlMessage::Kind::departure, .communicator = id(), .value = called()->load()});
  runtime_->memory().remove(*this);
  family_->remove(*this);
  runtime_->remove(*this);
  if (!failed()) {
    try {
      run_call([this] { comm_.destroy(); }, Clock::now() + kCloseTime);
    } catch (const std::exception& error) {
      log(LogLevel::warn, std::string("nccl: closing a communicator: ") + error.what());
    }
  }
  comm_.abort();  // unless it has ended
  if (failed()) wait_stopped();
  if (!comm_.wait_aborted()) log(LogLevel::warn, "nccl: a communicator could not be aborted and is leaked");
}

LaunchTarget NcclGroup::target(ncclComm_t comm) const {
  return {.api = api_,
          .comm = comm,
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
  if (options().check && !message) op.signature = checked_signature(call, size()) + describe_places(call);
  return op;
}

/// Checked mode: where a call's buffers are in windows, which must be the same on all ranks, or NCCL computes wrong
/// results. The smaller buffer of a gather or a scatter may be the rank's own slice of the larger one.
std::string NcclGroup::describe_places(const OpDesc& call) {
  std::string text;
  const auto add = [&](std::string_view word, const void* data) {
    if (const std::string place = runtime_->memory().describe_place(*this, data); !place.empty())
      text.append(", ").append(word).append(" ").append(place);
  };
  if (call.kind == OpKind::reduce_scatter || call.kind == OpKind::all_reduce) add("from", call.in.data);
  if (call.kind == OpKind::all_gather || call.kind == OpKind::all_reduce) add("to", call.out.data);
  return text;
}

Work NcclGroup::start_tree(NcclOperation& op) {
  const auto where = [this, &op](ncclComm_t comm) {
    LaunchTarget all = target(comm);
    all.workspace = stream_->workspace(workspace_bytes(op.call, size(), rank()));
    return all;
  };
  return launch(
      op, [where, &op](ncclComm_t comm) { issue_exchange(where(comm), op.call); },
      [where, &op](ncclComm_t comm) { issue_sum(where(comm), op.call); });
}

Work NcclGroup::start_divided(NcclOperation& op) {
  return launch(
      op,
      [this, &op](ncclComm_t comm) {
        OpDesc sum = op.call;
        sum.op = ReduceOp::sum();
        issue(target(comm), sum);
      },
      [this, &op](ncclComm_t comm) { issue_division(target(comm), op.call); });
}

Work NcclGroup::start(const OpDesc& call) {
  const bool tree = uses_tree(api_, call, size(), options().deterministic);
  if (!tree) require_supported(call, size());
  check_device(call);
  throw_if_failed();
  const DeviceGuard guard(api_, runtime_->device());
  NcclOperation& op = prepare(call);
  Work work = tree ? start_tree(op)
              : divides_afterwards(api_, call)
                  ? start_divided(op)
                  : launch(op, [this, &op](ncclComm_t comm) { issue(target(comm), op.call); });
  count(call);
  return work;
}

Work NcclGroup::start_batch(std::span<const OpDesc> parts) {
  for (const OpDesc& part : parts) check_device(part);
  throw_if_failed();
  if (parts.empty()) return {};
  const DeviceGuard guard(api_, runtime_->device());
  NcclOperation& op = acquire<NcclOperation>(api_, *this);
  op.reset({.timeout = parts.front().timeout, .label = parts.front().label}, 0, "batch");
  Work work = launch(
      op, [this, all = std::vector(parts.begin(), parts.end())](ncclComm_t comm) { issue_batch(target(comm), all); });
  for (const OpDesc& part : parts) count(part);
  return work;
}

void* NcclGroup::register_memory(void* data, std::size_t bytes) {
  const auto handle = std::make_shared<void*>(nullptr);
  const auto enter = [this, data, bytes, handle](ncclComm_t comm) {
    check(api_.ncclCommRegister(comm, data, bytes, handle.get()), "ncclCommRegister");
  };
  try {
    run_call([this, enter] { comm_.use(enter); }, Clock::now() + timeout());
  } catch (const Error& error) {
    log(LogLevel::warn, std::string("nccl: memory is not registered: ") + error.what());
    return nullptr;
  }
  return *handle;
}

void* NcclGroup::register_window(const std::shared_ptr<Buffer>& memory, Clock::time_point until) {
  constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC, which older headers lack
  const auto window = std::make_shared<void*>(nullptr);
  const auto enter = [this, memory, window](ncclComm_t comm) {
    check(api_.ncclCommWindowRegister(comm, memory->data(), memory->bytes(), window.get(), kSymmetric),
          "ncclCommWindowRegister");
  };
  run_call([this, enter] { comm_.use(enter); }, until);
  return *window;
}

void NcclGroup::deregister(ncclResult_t (*function)(ncclComm_t, void*), void* handle) noexcept {
  if (failed()) {  // its abort drops the registrations; the memory must live until then
    wait_stopped();
    return;
  }
  try {
    run_call([this, function, handle] { comm_.use([&](ncclComm_t comm) { function(comm, handle); }); },
             Clock::now() + kCloseTime);
  } catch (const std::exception& error) {
    log(LogLevel::warn, std::string("nccl: memory stays registered: ") + error.what());
  }
}

void NcclGroup::on_symmetric_vote(const ControlMessage& message) noexcept {
  if (const int member = member_of(message.from); member >= 0) symmetric_memory_.on_vote(member, message);
}

/// NCCL does not report what it transfers: its collectives are counted like the direct algorithms, whose total is that
/// of a bandwidth-optimal algorithm.
void NcclGroup::count(const OpDesc& call) {
  const ReadPlan plan(call, rank(), size());
  for (int peer = 0; peer < size(); ++peer) traffic_.add(call.kind, peer, plan.bytes_to(peer));
}

}  // namespace tessera::comm::nccl
