#include "tests/comm/schedule_world.h"

#include <map>
#include <random>
#include <stdexcept>
#include <tuple>

#include "tessera/comm/reduce.h"

namespace tessera::comm_test {
namespace {

Slice part(const Problem& problem, const std::vector<std::size_t>& starts, int rank) {
  if (starts.empty()) return slice_of(problem.count, problem.ranks, rank);
  const auto r = static_cast<std::size_t>(rank);
  return {starts[r], starts[r + 1] - starts[r]};
}

bool in_place_possible(const Problem& problem) {
  switch (problem.kind) {
    case OpKind::all_to_all:
    case OpKind::barrier:
      return false;
    case OpKind::broadcast:
    case OpKind::reduce:
    case OpKind::gather:
    case OpKind::scatter:
      return problem.rank == problem.root;
    default:
      return true;
  }
}

std::vector<Problem> for_all_ranks(const Problem& problem, std::uint32_t in_place_ranks) {
  std::vector<Problem> all(static_cast<std::size_t>(problem.ranks), problem);
  for (int rank = 0; rank < problem.ranks; ++rank) {
    Problem& own = all[static_cast<std::size_t>(rank)];
    own.rank = rank;
    own.in_place = ((in_place_ranks >> rank) & 1) != 0 && in_place_possible(own);
  }
  return all;
}

/// One run: what has started, what has come, and the memory.
class Run {
 public:
  Run(const ScheduleWorld& world, std::uint64_t seed, const std::vector<Bytes>& inputs) : world_(world), random_(seed) {
    for (int rank = 0; rank < ranks(); ++rank) {
      auto& buffers = memory_.emplace_back();
      for (int b = 0; b < 4; ++b) buffers.emplace_back(world.buffer_bytes(rank, b), std::byte{0xFF});  // NaN; -1
      const Bytes& input = inputs[static_cast<std::size_t>(rank)];
      if (!input.empty()) std::memcpy(at(rank, {Place::in, 0, input.size()}), input.data(), input.size());
      const double factor = conformance::factor(rank);
      std::memcpy(at(rank, {Place::factor, 0, 8}), &factor, 8);
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

  std::byte* at(int rank, const Region& region) {
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
  const Step& step(int rank, std::uint32_t index) const {
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
    const Step& now = step(rank, index);
    if (now.kind == Step::Kind::copy) {
      std::memmove(at(rank, now.to), at(rank, now.from), now.to.bytes);
    } else if (now.kind == Step::Kind::reduce) {
      reduce(rank, now);
    } else {
      const std::size_t which = message_of_.at({rank, index});
      InFlight& message = messages_[which];
      if (now.kind == Step::Kind::receive) {
        message.expected = true;
      } else {
        message.sent = true;
        // Some transports take a copy and are done, others read when the receiver is there.
        message.copied = random_() % 2 == 0;
        if (message.copied) message.early.assign(at(rank, now.from), at(rank, now.from) + now.from.bytes);
      }
      if (message.sent && message.expected) pending_.push_back({Action::deliver, 0, 0, which});
      if (now.kind == Step::Kind::receive || !message.copied) return;
    }
    pending_.push_back({Action::finish, rank, index, 0});
  }

  void deliver(InFlight& message) {
    const MessagePair& pair = message.pair;
    const Step& send = step(pair.from, pair.send);
    const Step& receive = step(pair.to, pair.receive);
    const std::byte* data = message.copied ? message.early.data() : at(pair.from, send.from);
    if (receive.to.bytes > 0) std::memcpy(at(pair.to, receive.to), data, receive.to.bytes);
    pending_.push_back({Action::finish, pair.to, pair.receive, 0});
    if (!message.copied) pending_.push_back({Action::finish, pair.from, pair.send, 0});
  }

  void reduce(int rank, const Step& now) {
    const Problem& problem = world_.problems[static_cast<std::size_t>(rank)];
    using Kind = ReduceOp::Kind;
    ReduceOp op{problem.reduce, static_cast<double>(problem.ranks)};
    if (now.arithmetic != Arithmetic::whole && op.kind == Kind::premul_sum) op.kind = Kind::sum;
    if (now.arithmetic == Arithmetic::partial && op.kind == Kind::avg) op.kind = Kind::sum;
    const Schedule& schedule = world_.schedules[static_cast<std::size_t>(rank)];
    std::vector<const void*> sources;
    for (std::uint32_t s = 0; s < now.sources; ++s) sources.push_back(at(rank, schedule.sources[now.first_source + s]));
    std::vector<double> factors(now.factors.bytes / sizeof(double));
    if (!factors.empty()) std::memcpy(factors.data(), at(rank, now.factors), now.factors.bytes);
    reduce_tree(op, problem.dtype, sources, factors, at(rank, now.to), now.to.bytes / size_of(problem.dtype));
  }

  void finish(int rank, std::uint32_t index) {
    --left_;
    const Schedule& schedule = world_.schedules[static_cast<std::size_t>(rank)];
    const Step& now = schedule.steps[index];
    for (std::uint32_t f = 0; f < now.followers; ++f) {
      const std::uint32_t follower = schedule.followers[now.first_follower + f];
      if (--waits_[static_cast<std::size_t>(rank)][follower] == 0)
        pending_.push_back({Action::start, rank, follower, 0});
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

ScheduleWorld::ScheduleWorld(const Problem& problem, std::string_view algorithm, std::uint32_t in_place_ranks)
    : ScheduleWorld(for_all_ranks(problem, in_place_ranks), algorithm) {}

ScheduleWorld::ScheduleWorld(std::vector<Problem> all, std::string_view algorithm) : problems(std::move(all)) {
  for (const Problem& problem : problems) schedules.push_back(build_schedule(problem, algorithm));
}

std::size_t ScheduleWorld::in_count(int rank) const {
  const Problem& problem = problems[static_cast<std::size_t>(rank)];
  switch (problem.kind) {
    case OpKind::all_gather:
    case OpKind::gather:
      return part(problem, problem.out_starts, rank).count;
    case OpKind::broadcast:
    case OpKind::scatter:
      return rank == problem.root ? problem.count : 0;
    case OpKind::all_to_all:
      return problem.in_starts.empty() ? problem.count : problem.in_starts.back();
    default:
      return problem.count;
  }
}

std::size_t ScheduleWorld::out_count(int rank) const {
  const Problem& problem = problems[static_cast<std::size_t>(rank)];
  switch (problem.kind) {
    case OpKind::reduce_scatter:
    case OpKind::scatter:
      return part(problem, problem.in_starts, rank).count;
    case OpKind::reduce:
    case OpKind::gather:
      return rank == problem.root ? problem.count : 0;
    case OpKind::all_to_all:
      return problem.out_starts.empty() ? problem.count : problem.out_starts.back();
    default:
      return problem.count;
  }
}

Spot ScheduleWorld::spot(int rank, Place place) const {
  const Problem& problem = problems[static_cast<std::size_t>(rank)];
  const std::size_t size = size_of(problem.dtype);
  if (place == Place::scratch) return {2, 0};
  if (place == Place::factor) return {3, 0};
  const bool gathers = problem.kind == OpKind::all_gather || problem.kind == OpKind::gather;
  const bool scatters = problem.kind == OpKind::reduce_scatter || problem.kind == OpKind::scatter;
  if (place == Place::in)
    return problem.in_place && gathers ? Spot{1, part(problem, problem.out_starts, rank).offset * size} : Spot{0, 0};
  if (!problem.in_place || gathers) return {1, 0};
  return scatters ? Spot{0, part(problem, problem.in_starts, rank).offset * size} : Spot{0, 0};
}

std::size_t ScheduleWorld::buffer_bytes(int rank, int buffer) const {
  const Problem& problem = problems[static_cast<std::size_t>(rank)];
  const std::size_t size = size_of(problem.dtype);
  if (buffer == 2) return schedules[static_cast<std::size_t>(rank)].scratch_bytes;
  if (buffer == 3) return sizeof(double);
  const bool used = spot(rank, buffer == 0 ? Place::in : Place::out).buffer == buffer;
  if (!used) return 0;
  return (buffer == 0 ? in_count(rank) : out_count(rank)) * size;
}

std::string ScheduleWorld::run(std::uint64_t seed, const std::vector<Bytes>& inputs,
                               std::vector<Bytes>& outputs) const {
  Run run(*this, seed, inputs);
  const std::string error = run.all();
  outputs.clear();
  for (std::size_t r = 0; r < problems.size(); ++r) {
    const int rank = static_cast<int>(r);
    const std::byte* out = run.at(rank, {Place::out, 0, 0});
    outputs.emplace_back(out, out + out_count(rank) * size_of(problems[r].dtype));
    // What is not written in place stays as it was.
    const std::byte* in = run.at(rank, {Place::in, 0, 0});
    const Spot from = spot(rank, Place::in);
    const Spot to = spot(rank, Place::out);
    for (std::size_t i = 0; i < inputs[r].size(); ++i) {
      const bool written = from.buffer == to.buffer && from.offset + i >= to.offset &&
                           from.offset + i < to.offset + outputs.back().size();
      if (!written && in[i] != inputs[r][i]) return "rank " + std::to_string(rank) + " wrote to its input";
    }
  }
  return error;
}

std::uint64_t ScheduleWorld::bytes_sent(int rank) const {
  std::uint64_t sum = 0;
  for (const Step& step : schedules[static_cast<std::size_t>(rank)].steps)
    if (step.kind == Step::Kind::send) sum += step.from.bytes;
  return sum;
}

std::vector<MessagePair> messages_of(const ScheduleWorld& world) {
  std::map<std::tuple<int, int, std::uint32_t>, MessagePair> pairs;
  const auto fail = [](int from, int to, std::uint32_t number, const char* what) {
    throw std::runtime_error("message " + std::to_string(number) + " from rank " + std::to_string(from) + " to " +
                             std::to_string(to) + " " + what);
  };
  for (int rank = 0; rank < static_cast<int>(world.schedules.size()); ++rank) {
    const auto& steps = world.schedules[static_cast<std::size_t>(rank)].steps;
    for (std::uint32_t i = 0; i < steps.size(); ++i)
      if (steps[i].kind == Step::Kind::send &&
          !pairs.try_emplace({rank, steps[i].peer, steps[i].number}, MessagePair{rank, i, steps[i].peer, UINT32_MAX})
               .second)
        fail(rank, steps[i].peer, steps[i].number, "is sent twice");
  }
  for (int rank = 0; rank < static_cast<int>(world.schedules.size()); ++rank) {
    const auto& steps = world.schedules[static_cast<std::size_t>(rank)].steps;
    for (std::uint32_t i = 0; i < steps.size(); ++i) {
      if (steps[i].kind != Step::Kind::receive) continue;
      const auto found = pairs.find({steps[i].peer, rank, steps[i].number});
      if (found == pairs.end()) fail(steps[i].peer, rank, steps[i].number, "is never sent");
      if (found->second.receive != UINT32_MAX) fail(steps[i].peer, rank, steps[i].number, "is received twice");
      found->second.receive = i;
    }
  }
  std::vector<MessagePair> all;
  for (const auto& [key, pair] : pairs) {
    if (pair.receive == UINT32_MAX) fail(pair.from, pair.to, std::get<2>(key), "is never received");
    all.push_back(pair);
  }
  return all;
}

void drop_dependency(Schedule& schedule, std::size_t which) {
  std::size_t seen = 0;
  for (Step& step : schedule.steps) {
    if (which >= seen + step.followers) {
      seen += step.followers;
      continue;
    }
    // The last one takes the place of the dropped one.
    const auto first = schedule.followers.begin() + step.first_follower;
    std::swap(first[static_cast<std::ptrdiff_t>(which - seen)], first[step.followers - 1]);
    --schedule.steps[first[step.followers - 1]].waits_for;
    --step.followers;
    return;
  }
}

}  // namespace tessera::comm_test
