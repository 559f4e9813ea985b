#include "tessera/comm/staging/communicator.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <limits>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/page.h"
#include "tessera/comm/core/op_traits.h"

namespace tessera::comm::staging {
namespace {

constexpr std::chrono::milliseconds kPatience{2000};

/// The lane on which calls must be issued in order.
std::pair<OpKind, int> lane_of(const OpDesc& call) {
  return is_message(call.kind) ? std::pair(call.kind, call.root) : std::pair(OpKind::barrier, 0);
}

}  // namespace

bool on_device(const OpDesc& call) noexcept {
  return call.in.device.type != DeviceType::cpu || call.out.device.type != DeviceType::cpu;
}

StagedCommunicator::StagedCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<StagingPipeline> engine)
    : Decorator(std::move(inner)), engine_(std::move(engine)) {
  own_capabilities().memory.push_back(MemoryKind::device);
  share_here();
}

StagedCommunicator::~StagedCommunicator() {
  if (is_parents()) {
    static auto* const kept = new std::vector<decltype(regions_)>;  // never destroyed: the device is the parent's
    kept->push_back(std::move(regions_));
    return;
  }
  engine_->poll_until([this] { return in_flight_.load() == 0; }, Clock::time_point::max());
  const std::lock_guard lock(engine_->mutex());  // the thread that ended the last operation may still hold it
  regions_.clear();
  if (closing_ != nullptr) close_windows();
}

void StagedCommunicator::negotiate_ipc() {
  const Capabilities& can = inner().capabilities();
  if (size() == 1 || !can.splits_share_memory || !engine_->options().negotiates_ipc) return;
  closing_ = inner().split(0, rank());
  std::uint8_t shares = engine_->options().ipc && engine_->device().traits().shares_memory ? 1 : 0;
  closing_->all_reduce(view_of(&shares, 1), view_of(&shares, 1), ReduceOp::min()).wait();
  if (rank() == 0 && logger() != nullptr)
    logger()->write(
        LogLevel::info,
        "memory of " + name_of(engine_->device().device()) +
            (shares != 0 ? " moves by IPC between ranks of a host"
                         : " moves through pinned host memory: IPC is off, or a rank's device does not support it"));
  if (shares == 0) return closing_.reset();
  engine_->share(AlgorithmTable(engine_->options().algorithms, can.algorithms));
  share_here();
}

void StagedCommunicator::share_here() {
  if (engine_->windows() != nullptr && size() > 1 && capabilities().shares_memory)
    sharing_.emplace(*engine_, size(), logger());
}

/// A device must not free memory that others have open, so the ranks synchronize once more. None of them waits long for
/// a rank that is late or left with an error: then the windows stay until the process ends.
void StagedCommunicator::close_windows() noexcept {
  const std::shared_ptr<IpcWindows>& windows = engine_->windows();
  windows->close_others();
  bool all = false;
  try {
    if (std::uncaught_exceptions() == 0) {
      closing_->barrier({.timeout = kPatience, .label = "closing"}).wait();
      all = true;
    }
  } catch (const std::exception&) {  // a missing rank has ended or failed, which was reported where it was detected
  }
  windows->end(all);
}

void StagedCommunicator::check_memory(const OpDesc& call) const {
  if (call.kind == OpKind::recv && call.root == kAnyRank && on_device(call))  // its chunks must come from one rank
    throw Unsupported("recv: memory of " + name_of(call.out.device) +
                      " can't receive from any rank; name the sender, or use host memory");
  const Device own = engine_->device().device();
  for (const ConstView& view : {call.in, ConstView(call.out)})
    if (view.device.type != DeviceType::cpu && view.device != own)
      throw InvalidUsage(std::string(name_of(call.kind)) + ": memory is on " + name_of(view.device) +
                         ", this communicator needs " + name_of(own));
  if (call.in.count != 0 && call.out.count != 0 && call.in.device.type != call.out.device.type)
    throw InvalidUsage(std::string(name_of(call.kind)) + ": in is on " + name_of(call.in.device) + " but out is on " +
                       name_of(call.out.device));
}

void StagedCommunicator::do_after(Stream& stream) {
  if (stream.device().type == DeviceType::cpu) {
    if (!stream.immediate()) stream.record().wait();
  } else {
    after_ = stream.record();
  }
}

Work StagedCommunicator::do_start(const OpDesc& call) {
  Event after = std::exchange(after_, {});
  check_memory(call);
  if (!on_device(call) && in_flight_.load() == 0 && after.done()) {
    if (sharing_) sharing_->set_algorithm({});
    return Decorator::do_start(call);
  }
  return submit({&call, 1}, std::move(after));
}

Work StagedCommunicator::do_batch(std::span<const OpDesc> parts) {
  Event after = std::exchange(after_, {});
  for (const OpDesc& part : parts) check_memory(part);
  if (parts.empty()) return {};
  if (std::ranges::none_of(parts, on_device) && in_flight_.load() == 0 && after.done()) {
    if (sharing_) sharing_->set_algorithm({});
    return Decorator::do_batch(parts);
  }
  return submit(parts, std::move(after));
}

Work StagedCommunicator::submit(std::span<const OpDesc> calls, Event after) {
  const std::lock_guard lock(engine_->mutex());
  if (sharing_) sharing_->set_algorithm({});
  auto* const made = new StagedOperation(engine_, *this, calls, std::move(after));  // its handles own it
  Work work(made);
  StagedOperation& operation = *made;
  in_flight_.fetch_add(1);
  for (StagedTransfer& part : operation.parts()) enter(part);
  engine_->add(operation);
  return work;
}

void StagedCommunicator::enter(StagedTransfer& part) {
  lanes_[lane_of(part.call())].push_back(&part);
  unissued_.fetch_add(1);
}

void StagedCommunicator::leave(StagedTransfer& part) noexcept {
  std::deque<StagedTransfer*>& lane = lanes_[lane_of(part.call())];
  const auto found = std::ranges::find(lane, &part);
  if (found == lane.end()) return;
  lane.erase(found);
  unissued_.fetch_sub(1);
}

bool StagedCommunicator::may_issue(StagedTransfer& part) { return lanes_[lane_of(part.call())].front() == &part; }

Buffer StagedCommunicator::acquire_region(std::size_t bytes) {
  const std::size_t page = base::page_bytes();
  const std::size_t size = std::bit_ceil(std::max(bytes, page));
  if (auto idle = regions_.extract(size)) return std::move(idle.mapped());
  // Whole pages: two regions that share one could not both be pinned.
  auto whole = std::make_shared<Buffer>(inner().allocate(size + page, MemoryKind::host, MemoryCategory::communication));
  const std::size_t skew = (page - reinterpret_cast<std::uintptr_t>(whole->data()) % page) % page;
  void* const data = whole->bytes_at(skew);
  engine_->device().pin_host(data, size);
  return {data, size, [whole = std::move(whole), device = engine_->shared_device()](void* p, std::size_t n) {
            device->unpin_host(p, n);
            whole->reset();
          }};
}

void StagedCommunicator::release_region(Buffer region) {
  const std::size_t size = region.bytes();
  regions_.emplace(size, std::move(region));
}

/// A split needs exclusive use of the inner communicator, and only issued calls progress without it. The peers'
/// messages may come after their split, so no chunk may wait for a region that another chunk occupies until then.
void StagedCommunicator::wait_until_issued() {
  {
    const std::lock_guard lock(engine_->mutex());
    for (auto& [lane, parts] : lanes_)
      if (lane.first != OpKind::barrier)
        for (StagedTransfer* part : parts) part->widen(std::numeric_limits<std::size_t>::max());
  }
  engine_->poll_until([this] { return unissued_.load() == 0; }, Clock::time_point::max());
  const std::lock_guard lock(engine_->mutex());
}

std::unique_ptr<Communicator> StagedCommunicator::do_split(int color, int key, const SplitOptions& options) {
  wait_until_issued();
  return Decorator::do_split(color, key, options);
}

std::unique_ptr<Communicator> StagedCommunicator::decorate(std::unique_ptr<Communicator> child) {
  return std::make_unique<StagedCommunicator>(std::move(child), engine_);
}

Buffer StagedCommunicator::do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  if (kind == MemoryKind::host) {
    const std::lock_guard lock(engine_->mutex());
    return Decorator::do_allocate(bytes, kind, use);
  }
  const std::shared_ptr<DeviceRuntime>& device = engine_->shared_device();
  device->wait_for_host_events();  // to allocate may wait for all streams
  if (engine_->windows() != nullptr) return engine_->windows()->allocate(bytes, use, memory_tracker());
  void* const data = device->allocate(bytes);
  if (use) memory_tracker()->add(*use, bytes);
  return {data, bytes, [device, use, memory_tracker = memory_tracker()](void* p, std::size_t n) {
            device->free(p, n);
            if (use) memory_tracker->remove(*use, n);
          }};
}

Buffer StagedCommunicator::do_allocate_symmetric(std::size_t bytes, MemoryKind kind,
                                                 std::optional<MemoryCategory> use) {
  if (kind == MemoryKind::device) return do_allocate(bytes, kind, use);
  wait_until_issued();  // it is collective, as a split is
  return Decorator::do_allocate_symmetric(bytes, kind, use);
}

void StagedCommunicator::do_abort(std::string_view reason) noexcept {
  Decorator::do_abort(reason);
  aborted_.store(true);
}

void StagedCommunicator::do_traffic(TrafficStats& snapshot) const {
  const std::lock_guard lock(engine_->mutex());
  Decorator::do_traffic(snapshot);
  if (sharing_) sharing_->correct(snapshot);
}

std::string_view StagedCommunicator::do_last_algorithm() const noexcept {
  const std::lock_guard lock(engine_->mutex());
  return sharing_ && !sharing_->algorithm().empty() ? sharing_->algorithm() : inner().last_algorithm();
}

}  // namespace tessera::comm::staging

namespace tessera::comm {

std::unique_ptr<Communicator> stage(std::unique_ptr<Communicator> inner, std::shared_ptr<DeviceRuntime> device,
                                    StagingOptions options) {
  auto engine = std::make_shared<staging::StagingPipeline>(std::move(device), std::move(options));
  auto made = std::make_unique<staging::StagedCommunicator>(std::move(inner), std::move(engine));
  made->negotiate_ipc();
  return made;
}

}  // namespace tessera::comm
