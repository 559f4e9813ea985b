#include "tessera/comm/slow_link/slow_link.h"

#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/core/decorator.h"
#include "tessera/comm/slow_link/port_use.h"
#include "tessera/comm/slow_link/slow_work.h"

namespace tessera::comm {
namespace {

class SlowCommunicator final : public Decorator {
 public:
  SlowCommunicator(std::unique_ptr<Communicator> inner, const SlowLinks& links, int world_rank, int world_size,
                   std::shared_ptr<SlowRank> state)
      : Decorator(std::move(inner)),
        links_(links),
        world_rank_(world_rank),
        world_size_(world_size),
        state_(std::move(state)),
        members_(static_cast<std::size_t>(size())),
        times_(this->inner()) {
    this->inner()
        .all_gather(view_of(&world_rank_, 1), view_of(members_.data(), members_.size()), {.label = "slow link"})
        .wait();
    forget_traffic();
    own_capabilities().any_source = false;  // the port that a message takes is known only when it has come
  }

  Lateness lateness() const {
    const std::lock_guard lock(state_->mutex);
    const double took = state_->took.median();
    const double late = state_->late.median();
    return {late, took > 0 ? 100 * late / took : 0, times_.shared()};
  }

  LinkRecord take_record() const {
    const std::lock_guard lock(state_->mutex);
    return std::exchange(state_->record, {});
  }

 private:
  Work do_start(const OpDesc& call) override {
    const auto transfer = begin({&call, 1});
    return pass(Decorator::do_start(call), transfer, call.timeout);
  }
  Work do_batch(std::span<const OpDesc> parts) override {
    if (parts.empty()) return Decorator::do_batch(parts);
    const auto transfer = begin(parts);
    return pass(Decorator::do_batch(parts), transfer, parts.front().timeout);
  }

  std::shared_ptr<Transfer> begin(std::span<const OpDesc> calls) {
    if (size() == 1) return nullptr;
    auto transfer = std::make_shared<Transfer>();
    transfer->use = port_use({links_, world_size_, members_, rank()}, calls);
    transfer->called = std::chrono::steady_clock::now();
    const OpKind kind = calls.front().kind;
    if (kind != OpKind::send && kind != OpKind::recv) {
      transfer->times = &times_;
      transfer->number = calls_++;
      times_.record(transfer->number, transfer->called);
    }
    if (state_->records) record(*transfer);
    return transfer;
  }

  void record(const Transfer& transfer) {
    LinkCall call{.called_ns = std::chrono::nanoseconds(transfer.called.time_since_epoch()).count(),
                  .latency_ns = transfer.use.latency.count()};
    for (const std::chrono::nanoseconds port : transfer.use.occupied) call.occupied_ns += port.count();
    const std::lock_guard lock(state_->mutex);
    state_->record.calls.push_back(call);
  }

  Work pass(Work work, const std::shared_ptr<Transfer>& transfer, std::chrono::milliseconds timeout) {
    if (transfer == nullptr) return work;
    state_->ports.add(transfer);
    return Work(new SlowWork(std::move(work), inner(), state_, transfer, transfer->called + timeout, completions_));
  }

  std::unique_ptr<Communicator> decorate(std::unique_ptr<Communicator> child) override {
    return std::make_unique<SlowCommunicator>(std::move(child), links_, world_rank_, world_size_, state_);
  }

  const SlowLinks links_;
  const std::int32_t world_rank_;
  const int world_size_;
  const std::shared_ptr<SlowRank> state_;
  std::vector<std::int32_t> members_;  // as ranks of the world
  CallTimes times_;
  std::uint64_t calls_ = 0;  // of collectives
  CompletionPoller completions_;
};

}  // namespace

std::unique_ptr<Communicator> slow_links(std::unique_ptr<Communicator> world, const SlowLinks& links) {
  const int rank = world->rank();
  const int size = world->size();
  if (links.hosts < 1 || size % links.hosts != 0)
    throw InvalidUsage("slow links: " + std::to_string(size) + " ranks don't divide into " +
                       std::to_string(links.hosts) + " hosts of equal size; use a divisor of the number of ranks");
  if (!(links.link.bytes_per_second > 0) || (links.hosts > 1 && !(links.intra.bytes_per_second > 0)))
    throw InvalidUsage("slow links: a link needs a rate above 0");
  auto state = std::make_shared<SlowRank>();
  state->records = links.record;
  return std::make_unique<SlowCommunicator>(std::move(world), links, rank, size, std::move(state));
}

namespace {

const SlowCommunicator& slow_communicator(const Communicator& communicator, const char* function) {
  const auto* slow = dynamic_cast<const SlowCommunicator*>(&communicator);
  if (slow == nullptr) throw InvalidUsage(std::string(function) + ": the communicator has no slow links");
  return *slow;
}

}  // namespace

Lateness lateness_of(const Communicator& communicator) {
  return slow_communicator(communicator, "lateness_of").lateness();
}

LinkRecord take_record(const Communicator& communicator) {
  return slow_communicator(communicator, "take_record").take_record();
}

}  // namespace tessera::comm
