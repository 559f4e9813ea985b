// Creation and end of a communicator.
#include <cstring>
#include <numeric>

#include "backends/nccl/nccl_group.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/core/backoff.h"

namespace tessera::comm::nccl {
namespace {

using namespace std::chrono_literals;
constexpr auto kCloseTime = 10s;

ncclConfig_t non_blocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;  // contains its version
  config.blocking = 0;
  config.splitShare = 0;  // a failed communicator must not fail those split from it
  return config;
}

std::uint64_t child_id(std::uint64_t parent, std::uint64_t split, int color) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const std::uint64_t part : {parent, split, static_cast<std::uint64_t>(color)})
    hash = (hash ^ part) * 0x100000001b3U ^ (hash >> 29);
  return hash;
}

Capabilities make_capabilities(int size, bool deterministic) {
  Capabilities all;
  all.backend = "nccl";
  all.dtypes = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8,
                DType::u8,  DType::i32, DType::i64, DType::u32,  DType::u64};
  all.memory = {MemoryKind::device};
  all.deterministic = deterministic || size == 1;
  all.rounding_ulps =
      deterministic
          ? 0.5
          : 0.5 * (size - 1) + 1;  // each hop rounds; avg and premul_sum also round the factor and the product
  return all;
}

}  // namespace

NcclGroup::~NcclGroup() {
  if (comm_ != nullptr) aborter_ = CommAborter::start(api_, runtime_->device(), comm_);  // it was never finalized
  if (aborter_ != nullptr) aborter_->wait_until(stop_deadline());
}

void NcclGroup::connect(const ncclUniqueId& id) {
  std::vector<int> all(static_cast<std::size_t>(runtime_->size()));
  std::iota(all.begin(), all.end(), 0);
  enter_members(runtime_->rank(), std::move(all));
  runtime_->add(*this);
  const Clock::time_point until = Clock::now() + timeout();
  ncclConfig_t config = non_blocking();
  const DeviceGuard guard(api_, runtime_->device());  // NCCL uses the current device
  try {
    issue_locked([&] {
      return check(api_.ncclCommInitRankConfig(&comm_, size(), id, rank(), &config), "ncclCommInitRankConfig");
    });
    wait_ready(until);
    create_resources();
  } catch (const Timeout&) {
    fail({FailureKind::timeout, "nccl: the communicator of " + std::to_string(size()) + " ranks was not ready within " +
                                    format_duration(timeout())},
         true);
  } catch (const BackendError& error) {
    fail({FailureKind::backend, error.what()}, true);
  }
  throw_if_failed();
}

void NcclGroup::enter_members(int rank, std::vector<int> members) {
  closed_.resize(members.size());
  verifier_ = CallVerifier(members.size());
  set_members(rank, std::move(members));
}

/// Creates what operations need, once the NCCL communicator is ready.
void NcclGroup::create_resources() {
  const DeviceGuard guard(api_, runtime_->device());
  capabilities_ = make_capabilities(size(), options().deterministic);
  stream_ = std::make_unique<CudaStream>(api_);
  before_ = std::make_unique<CudaEvent>(api_);
  const std::size_t bytes = sizeof(int) * (members().size() + 1);
  scratch_ = std::make_unique<PinnedScratch>(api_, bytes);
  check_cuda(api_, api_.cudaMemsetAsync(scratch_->device(), 0, bytes, stream_->get()), "cudaMemsetAsync");
}

std::shared_ptr<NcclGroup> NcclGroup::split(int color, int key) {
  const DeviceGuard guard(api_, runtime_->device());
  auto child = std::make_shared<NcclGroup>(runtime_, child_id(id_, ++splits_, color));
  ncclConfig_t config = non_blocking();
  NcclOperation& op = acquire<NcclOperation>(api_, *this);
  op.reset({.timeout = timeout()}, called_->fetch_add(1) + 1, "split");
  if (options().check) op.signature = "split";
  launch(op, [&] {
    return check(api_.ncclCommSplit(comm_, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &child->comm_, &config),
                 "ncclCommSplit");
  }).wait();
  if (color < 0) return nullptr;
  try {
    child->wait_ready(Clock::now() + timeout());
    int child_rank = 0;
    int child_size = 0;
    check(api_.ncclCommUserRank(child->comm_, &child_rank), "ncclCommUserRank");
    check(api_.ncclCommCount(child->comm_, &child_size), "ncclCommCount");
    // Until they are known:
    child->enter_members(child_rank, std::vector<int>(static_cast<std::size_t>(child_size), runtime_->rank()));
    child->create_resources();
    child->enter_members(child_rank, child->gather_world_ranks());
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

/// Gathers the world ranks of all members over the NCCL communicator, which also tests it.
std::vector<int> NcclGroup::gather_world_ranks() {
  std::vector<int> ranks(members().size());
  const std::size_t bytes = sizeof(int) * ranks.size();
  int* const device = static_cast<int*>(scratch_->device());
  int* const host = static_cast<int*>(scratch_->host());
  host[ranks.size()] = runtime_->rank();
  const cudaStream_t stream = stream_->get();
  start_internal([&] {
    int* const mine = device + ranks.size();
    check_cuda(api_, api_.cudaMemcpyAsync(mine, host + ranks.size(), sizeof(int), cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
    return check(api_.ncclAllGather(mine, device, sizeof(int), ncclUint8, comm_, stream), "ncclAllGather");
  }).wait();
  start_internal([&] {
    check_cuda(api_, api_.cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    return ncclSuccess;
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
  Backoff pause;
  while (true) {  // ends: every operation has a deadline, at which it fails
    check_health();
    const std::lock_guard lock(mutex_);
    if (in_flight_.empty()) break;
    pause(1ms);
  }
  runtime_->monitor().send(members(),
                           {.kind = ControlMessage::Kind::leaving, .communicator = id_, .value = called_->load()});
  runtime_->memory().remove(*this);
  runtime_->remove(*this);
  if (!failed()) {
    try {
      const DeviceGuard guard(api_, runtime_->device());
      issue_locked([this] { return check(api_.ncclCommFinalize(comm_), "ncclCommFinalize"); });
      wait_ready(Clock::now() + kCloseTime);
      const std::lock_guard lock(mutex_);
      api_.ncclCommDestroy(std::exchange(comm_, nullptr));
    } catch (const std::exception& error) {
      log(LogLevel::warn, std::string("nccl: closing a communicator: ") + error.what());
    }
  }
  if (aborter_ != nullptr && !aborter_->wait_until(stop_deadline()))
    log(LogLevel::warn, "nccl: a failed communicator could not be aborted and is leaked");
}

/// Throws BackendError, Timeout, and a failure that a peer has reported.
void NcclGroup::wait_ready(Clock::time_point until) {
  Backoff pause;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (comm_ == nullptr) break;
      const ncclResult_t state = state_locked();
      if (state == ncclSuccess) return;
      if (state != ncclInProgress) throw BackendError(vendor_text_locked({state, "a communicator"}));
    }
    if (Clock::now() >= until) throw Timeout("nccl: not ready in time");
    pause(1ms);
  }
  failure_.rethrow();
}

}  // namespace tessera::comm::nccl
