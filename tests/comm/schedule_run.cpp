#include <map>
#include <random>

#include "tessera/comm/kernels/reduce.h"
#include "tests/comm/schedule_world.h"

namespace tessera::comm_test {
namespace {

/// One run: the steps that have started, the messages that have arrived, and the memory.
class Run {
 public:
  Run(const ScheduleWorld& world, std::uint64_t seed, const std::vector<Bytes>& inputs) : world_(world), random_(seed) {
    for (int rank = 0; rank < ranks(); ++rank) {
      auto& buffers = memory_.emplace_back();
      for (int b = 0; b < 4; ++b) buffers.emplace_back(world.buffer_bytes(rank, b), std::byte{0xFF});  // NaN; -1
      const Bytes& input = inputs[static_cast<std::size_t>(rank)];
      if (!input.empty()) std::memcpy(at(rank, {BufferId::in, 0, input.size()}), input.data(), input.size());
      const double factor = conformance::factor(rank);
      std::memcpy(at(rank, {BufferId::factor, 0, 8}), &factor, 8);
      auto& waits = waits_.emplace_back();
      const Schedule& schedule = world.schedules[static_cast<std::size_t>(rank)];
      for (std::uint32_t i = 0; i < schedule.steps.size(); ++i) {
        waits.push_back(schedule.steps[i].waits_for);
        if (waits.back() == 0) pending_.push_back({Action::start, rank, i, 0});
      }
      left_ += schedule.steps.size();
    }
    for (const MessagePair& pair : messages_of(world)) {
      const auto index = messages_.size();
      messages_.push_back({pair});
      message_of_[{pair.from, pair.send}] = index;
      message_of_[{pair.to, pair.receive}] = index;
    }
  }

  std::string all() {
    while (!pending_.empty()) {
      const std::size_t pick = random_() % pending_.size();
      const Event event = pending_[pick];
      pending_[pick] = pending_.back();
      pending_.pop_back();
      act(event);
    }
    if (left_ != 0) return "deadlock: " + std::to_string(left_) + " steps were never done";
    return "";
  }

  std::byte* at(int rank, const BufferRegion& region) {
    const Spot spot = world_.spot(rank, region.place);
    return memory_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(spot.buffer)].data() + spot.offset +
           region.offset;
  }

 private:
  enum class Action { start, finish, deliver };
  struct Event {
    Action action;
    int rank;
    std::uint32_t step;
    std::size_t message;
  };
  struct InFlight {
    MessagePair pair;
    bool sent = false;
    bool expected = false;
    bool copied = false;
    Bytes early;
  };

  int ranks() const { return static_cast<int>(world_.schedules.size()); }
  const ScheduleStep& step(int rank, std::uint32_t index) const {
    return world_.schedules[static_cast<std::size_t>(rank)].steps[index];
  }

  void act(const Event& event) {
    if (event.action == Action::finish) {
      finish(event.rank, event.step);
    } else if (event.action == Action::deliver) {
      deliver(messages_[event.message]);
    } else {
      start(event.rank, event.step);
    }
  }

  void start(int rank, std::uint32_t index) {
    const ScheduleStep& now = step(rank, index);
    if (now.kind == ScheduleStep::Kind::copy) {
      std::memmove(at(rank, now.to), at(rank, now.from), now.to.bytes);
    } else if (now.kind == ScheduleStep::Kind::reduce) {
      reduce(rank, now);
    } else {
      const std::size_t which = message_of_.at({rank, index});
      InFlight& message = messages_[which];
      if (now.kind == ScheduleStep::Kind::receive) {
        message.expected = true;
      } else {
        message.sent = true;
        // Some transports copy and complete at once, others read when the receiver is ready.
        message.copied = random_() % 2 == 0;
        if (message.copied) message.early.assign(at(rank, now.from), at(rank, now.from) + now.from.bytes);
      }
      if (message.sent && message.expected) pending_.push_back({Action::deliver, 0, 0, which});
      if (now.kind == ScheduleStep::Kind::receive || !message.copied) return;
    }
    pending_.push_back({Action::finish, rank, index, 0});
  }

  void deliver(InFlight& message) {
    const MessagePair& pair = message.pair;
    const ScheduleStep& send = step(pair.from, pair.send);
    const ScheduleStep& receive = step(pair.to, pair.receive);
    const std::byte* data = message.copied ? message.early.data() : at(pair.from, send.from);
    if (receive.to.bytes > 0) std::memcpy(at(pair.to, receive.to), data, receive.to.bytes);
    pending_.push_back({Action::finish, pair.to, pair.receive, 0});
    if (!message.copied) pending_.push_back({Action::finish, pair.from, pair.send, 0});
  }

  void reduce(int rank, const ScheduleStep& now) {
    const CollectiveSpec& spec = world_.specs[static_cast<std::size_t>(rank)];
    using Kind = ReduceOp::Kind;
    ReduceOp op{spec.reduce, static_cast<double>(spec.ranks)};
    if (now.arithmetic != ReducePhase::whole && op.kind == Kind::premul_sum) op.kind = Kind::sum;
    if (now.arithmetic == ReducePhase::partial && op.kind == Kind::avg) op.kind = Kind::sum;
    const Schedule& schedule = world_.schedules[static_cast<std::size_t>(rank)];
    std::vector<const void*> sources;
    for (std::uint32_t s = 0; s < now.sources; ++s) sources.push_back(at(rank, schedule.sources[now.first_source + s]));
    std::vector<double> factors(now.factors.bytes / sizeof(double));
    if (!factors.empty()) std::memcpy(factors.data(), at(rank, now.factors), now.factors.bytes);
    reduce_tree(op, spec.dtype, sources, factors, at(rank, now.to), now.to.bytes / size_of(spec.dtype));
  }

  void finish(int rank, std::uint32_t index) {
    --left_;
    const Schedule& schedule = world_.schedules[static_cast<std::size_t>(rank)];
    const ScheduleStep& now = schedule.steps[index];
    for (std::uint32_t f = 0; f < now.dependents; ++f) {
      const std::uint32_t dependent = schedule.dependents[now.first_dependent + f];
      if (--waits_[static_cast<std::size_t>(rank)][dependent] == 0)
        pending_.push_back({Action::start, rank, dependent, 0});
    }
  }

  const ScheduleWorld& world_;
  std::mt19937_64 random_;
  std::vector<std::vector<Bytes>> memory_;
  std::vector<std::vector<std::uint32_t>> waits_;
  std::vector<Event> pending_;
  std::vector<InFlight> messages_;
  std::map<std::pair<int, std::uint32_t>, std::size_t> message_of_;
  std::size_t left_ = 0;
};

}  // namespace

std::string ScheduleWorld::run(std::uint64_t seed, const std::vector<Bytes>& inputs,
                               std::vector<Bytes>& outputs) const {
  Run run(*this, seed, inputs);
  const std::string error = run.all();
  outputs.clear();
  for (std::size_t r = 0; r < specs.size(); ++r) {
    const int rank = static_cast<int>(r);
    const std::byte* out = run.at(rank, {BufferId::out, 0, 0});
    outputs.emplace_back(out, out + out_count(rank) * size_of(specs[r].dtype));
    // Input bytes that are not overwritten in place stay unchanged.
    const std::byte* in = run.at(rank, {BufferId::in, 0, 0});
    const Spot from = spot(rank, BufferId::in);
    const Spot to = spot(rank, BufferId::out);
    for (std::size_t i = 0; i < inputs[r].size(); ++i) {
      const bool written = from.buffer == to.buffer && from.offset + i >= to.offset &&
                           from.offset + i < to.offset + outputs.back().size();
      if (!written && in[i] != inputs[r][i]) return "rank " + std::to_string(rank) + " wrote to its input";
    }
  }
  return error;
}

}  // namespace tessera::comm_test
