// Properties of schedules that are proved without running them.
#include <algorithm>
#include <stdexcept>

#include "tests/comm/schedule_world.h"

namespace tessera::comm_test {
namespace {

std::string describe(int rank, std::uint32_t index, const ScheduleStep& step) {
  static constexpr const char* kNames[] = {"send", "receive", "copy", "reduce"};
  return "rank " + std::to_string(rank) + " step " + std::to_string(index) + " (" +
         kNames[static_cast<std::size_t>(step.kind)] + ")";
}

/// The happens-before relation as a graph: each step begins and ends; a message is written while it arrives.
class Order {
 public:
  explicit Order(const ScheduleWorld& world) : messages_(messages_of(world)) {
    std::uint32_t nodes = 0;
    for (const Schedule& schedule : world.schedules) {
      first_.push_back(nodes);
      nodes += 2 * static_cast<std::uint32_t>(schedule.steps.size());
    }
    landing_ = nodes;
    next_.resize(nodes + messages_.size());
    for (int rank = 0; rank < static_cast<int>(world.schedules.size()); ++rank) {
      const Schedule& schedule = world.schedules[static_cast<std::size_t>(rank)];
      for (std::uint32_t i = 0; i < schedule.steps.size(); ++i) {
        edge(begin(rank, i), end(rank, i));
        for (std::uint32_t f = 0; f < schedule.steps[i].dependents; ++f)
          edge(end(rank, i), begin(rank, schedule.dependents[schedule.steps[i].first_dependent + f]));
      }
    }
    for (std::uint32_t m = 0; m < messages_.size(); ++m) {
      const MessagePair& pair = messages_[m];
      edge(begin(pair.from, pair.send), landing_ + m);
      edge(begin(pair.to, pair.receive), landing_ + m);
      edge(landing_ + m, end(pair.to, pair.receive));
    }
  }

  std::uint32_t begin(int rank, std::uint32_t step) const { return first_[static_cast<std::size_t>(rank)] + 2 * step; }
  std::uint32_t end(int rank, std::uint32_t step) const { return begin(rank, step) + 1; }
  std::uint32_t landing(std::size_t message) const { return landing_ + static_cast<std::uint32_t>(message); }
  const std::vector<MessagePair>& messages() const { return messages_; }

  /// Makes each send end only after its receive has begun, as transports may require.
  void add_rendezvous_edges() {
    for (const MessagePair& pair : messages_) edge(begin(pair.to, pair.receive), end(pair.from, pair.send));
  }

  /// Topological order; shorter than the graph if there is a cycle.
  std::vector<std::uint32_t> sorted() const {
    std::vector<std::uint32_t> waits(next_.size());
    for (const auto& dependents : next_)
      for (const std::uint32_t node : dependents) ++waits[node];
    std::vector<std::uint32_t> order;
    for (std::uint32_t node = 0; node < next_.size(); ++node)
      if (waits[node] == 0) order.push_back(node);
    for (std::size_t i = 0; i < order.size(); ++i)
      for (const std::uint32_t node : next_[order[i]])
        if (--waits[node] == 0) order.push_back(node);
    return order;
  }
  std::size_t nodes() const { return next_.size(); }

  /// Computes the transitive closure that before() queries.
  void close() {
    const std::size_t words = (next_.size() + 63) / 64;
    words_ = words;
    after_.assign(next_.size() * words, 0);
    const std::vector<std::uint32_t> order = sorted();
    for (auto node = order.rbegin(); node != order.rend(); ++node) {
      std::uint64_t* own = after_.data() + *node * words;
      own[*node / 64] |= std::uint64_t{1} << (*node % 64);
      for (const std::uint32_t dependent : next_[*node])
        for (std::size_t w = 0; w < words; ++w) own[w] |= after_[dependent * words + w];
    }
  }
  bool before(std::uint32_t a, std::uint32_t b) const { return ((after_[a * words_ + b / 64] >> (b % 64)) & 1) != 0; }

 private:
  void edge(std::uint32_t a, std::uint32_t b) { next_[a].push_back(b); }

  std::vector<MessagePair> messages_;
  std::vector<std::uint32_t> first_;
  std::uint32_t landing_ = 0;
  std::vector<std::vector<std::uint32_t>> next_;
  std::size_t words_ = 0;
  std::vector<std::uint64_t> after_;
};

/// Bytes of one buffer that one step reads or writes, from event `start` until any of `ends`.
struct Access {
  int buffer;
  std::size_t first;
  std::size_t last;
  bool writes;
  std::uint32_t step;
  std::uint32_t start;
  std::uint32_t ends[2];
};

class Accesses {
 public:
  Accesses(const ScheduleWorld& world, const Order& order) : world_(world), order_(order) {
    partner_.resize(world.schedules.size());
    for (std::size_t r = 0; r < world.schedules.size(); ++r) partner_[r].resize(world.schedules[r].steps.size());
    for (std::size_t m = 0; m < order.messages().size(); ++m) {
      const MessagePair& pair = order.messages()[m];
      partner_[static_cast<std::size_t>(pair.from)][pair.send] = m;
      partner_[static_cast<std::size_t>(pair.to)][pair.receive] = m;
    }
  }

  std::vector<Access> of(int rank) const {
    std::vector<Access> all;
    const Schedule& schedule = world_.schedules[static_cast<std::size_t>(rank)];
    for (std::uint32_t i = 0; i < schedule.steps.size(); ++i) {
      const ScheduleStep& step = schedule.steps[i];
      const std::uint32_t begin = order_.begin(rank, i);
      const std::uint32_t end = order_.end(rank, i);
      const std::size_t message = partner_[static_cast<std::size_t>(rank)][i];
      const auto add = [&](const BufferRegion& region, bool writes, std::uint32_t start, std::uint32_t other_end) {
        if (region.bytes == 0) return;
        const Spot spot = world_.spot(rank, region.place);
        const std::size_t first = spot.offset + region.offset;
        all.push_back({spot.buffer, first, first + region.bytes, writes, i, start, {end, other_end}});
      };
      switch (step.kind) {
        case ScheduleStep::Kind::send: {  // no longer read once it is done or has arrived
          const MessagePair& pair = order_.messages()[message];
          add(step.from, false, begin, order_.end(pair.to, pair.receive));
          break;
        }
        case ScheduleStep::Kind::receive:
          add(step.to, true, order_.landing(message), end);
          break;
        case ScheduleStep::Kind::copy:
          add(step.from, false, begin, end);
          add(step.to, true, begin, end);
          break;
        case ScheduleStep::Kind::reduce:
          for (std::uint32_t s = 0; s < step.sources; ++s)
            add(schedule.sources[step.first_source + s], false, begin, end);
          add(step.factors, false, begin, end);
          add(step.to, true, begin, end);
          break;
        case ScheduleStep::Kind::native:  // not among the message-based algorithms
          break;
      }
    }
    return all;
  }

  bool ordered(const Access& a, const Access& b) const {
    const auto over = [&](const Access& x, const Access& y) {
      return order_.before(x.ends[0], y.start) || order_.before(x.ends[1], y.start);
    };
    return over(a, b) || over(b, a);
  }

 private:
  const ScheduleWorld& world_;
  const Order& order_;
  std::vector<std::vector<std::size_t>> partner_;
};

std::string bad_region(const ScheduleWorld& world, int rank, const BufferRegion& region) {
  const Spot spot = world.spot(rank, region.place);
  const CollectiveSpec& spec = world.specs[static_cast<std::size_t>(rank)];
  std::size_t bytes = world.buffer_bytes(rank, spot.buffer) - spot.offset;
  if (region.place == BufferId::in) bytes = world.in_count(rank) * size_of(spec.dtype);
  if (region.place == BufferId::out) bytes = world.out_count(rank) * size_of(spec.dtype);
  return region.offset + region.bytes > bytes ? "reaches outside of its buffer" : "";
}

std::string bad_reduce(const ScheduleWorld& world, int rank, const ScheduleStep& step) {
  const Schedule& schedule = world.schedules[static_cast<std::size_t>(rank)];
  const CollectiveSpec& spec = world.specs[static_cast<std::size_t>(rank)];
  const auto place = [&](const BufferRegion& region) {
    const Spot spot = world.spot(rank, region.place);
    return std::pair{spot.buffer, spot.offset + region.offset};
  };
  for (std::uint32_t s = 0; s < step.sources; ++s) {
    const BufferRegion& source = schedule.sources[step.first_source + s];
    if (const std::string error = bad_region(world, rank, source); !error.empty()) return error;
    if (source.bytes != step.to.bytes) return "has a source of another length";
    const auto [buffer, offset] = place(source);
    const auto [to_buffer, to_offset] = place(step.to);
    if (buffer == to_buffer && offset != to_offset && offset < to_offset + step.to.bytes &&
        to_offset < offset + source.bytes)
      return "writes over a part of a source";
    if (offset % size_of(spec.dtype) != 0) return "has a source that is not aligned";
  }
  const bool multiplies = step.arithmetic == ReducePhase::whole && spec.reduce == ReduceOp::Kind::premul_sum;
  if (step.factors.bytes != (multiplies ? step.sources * sizeof(double) : 0)) return "has a wrong number of factors";
  if (multiplies && step.factors.place != BufferId::scratch) return "has its factors elsewhere than in scratch";
  return "";
}

std::string bad_step(const ScheduleWorld& world, int rank, std::uint32_t index) {
  const Schedule& schedule = world.schedules[static_cast<std::size_t>(rank)];
  const ScheduleStep& step = schedule.steps[index];
  for (std::uint32_t f = 0; f < step.dependents; ++f)
    if (schedule.dependents[step.first_dependent + f] <= index) return "is waited for by an earlier one";
  for (const BufferRegion& region : {step.from, step.to, step.factors})
    if (const std::string error = bad_region(world, rank, region); !error.empty()) return error;
  const CollectiveSpec& spec = world.specs[static_cast<std::size_t>(rank)];
  if (step.to.bytes > 0 && step.to.place == BufferId::in && !spec.in_place) return "writes to the input";
  if (step.kind == ScheduleStep::Kind::copy && step.from.bytes != step.to.bytes) return "copies between two lengths";
  if (step.kind == ScheduleStep::Kind::reduce) return bad_reduce(world, rank, step);
  return "";
}

}  // namespace

std::string ScheduleWorld::check() const {
  try {
    for (int rank = 0; rank < static_cast<int>(schedules.size()); ++rank) {
      const Schedule& schedule = schedules[static_cast<std::size_t>(rank)];
      std::vector<std::uint32_t> waits(schedule.steps.size());
      for (std::uint32_t i = 0; i < schedule.steps.size(); ++i) {
        if (const std::string error = bad_step(*this, rank, i); !error.empty())
          return describe(rank, i, schedule.steps[i]) + " " + error;
        for (std::uint32_t f = 0; f < schedule.steps[i].dependents; ++f)
          ++waits[schedule.dependents[schedule.steps[i].first_dependent + f]];
      }
      for (std::uint32_t i = 0; i < waits.size(); ++i)
        if (waits[i] != schedule.steps[i].waits_for)
          return describe(rank, i, schedule.steps[i]) + " miscounts what it waits for";
    }
    Order order(*this);
    for (const MessagePair& pair : order.messages()) {
      const ScheduleStep& send = schedules[static_cast<std::size_t>(pair.from)].steps[pair.send];
      const ScheduleStep& receive = schedules[static_cast<std::size_t>(pair.to)].steps[pair.receive];
      if (send.from.bytes != receive.to.bytes)
        return describe(pair.from, pair.send, send) + " and " + describe(pair.to, pair.receive, receive) +
               " differ in length";
    }
    order.add_rendezvous_edges();
    if (order.sorted().size() != order.nodes()) return "steps wait for each other in a circle";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::string ScheduleWorld::race() const {
  Order order(*this);
  order.close();
  const Accesses accesses(*this, order);
  for (int rank = 0; rank < static_cast<int>(schedules.size()); ++rank) {
    std::vector<Access> all = accesses.of(rank);
    std::sort(all.begin(), all.end(), [](const Access& a, const Access& b) {
      return std::pair{a.buffer, a.first} < std::pair{b.buffer, b.first};
    });
    for (std::size_t i = 0; i < all.size(); ++i)
      for (std::size_t j = i + 1; j < all.size(); ++j) {
        const Access& a = all[i];
        const Access& b = all[j];
        if (b.buffer != a.buffer || b.first >= a.last) break;
        if (a.step == b.step || (!a.writes && !b.writes) || accesses.ordered(a, b)) continue;
        const auto& steps = schedules[static_cast<std::size_t>(rank)].steps;
        return describe(rank, a.step, steps[a.step]) + " meets " + describe(rank, b.step, steps[b.step]) +
               " in buffer " + std::to_string(a.buffer);
      }
  }
  return "";
}

std::string ScheduleWorld::early_leaver() const {
  Order order(*this);
  order.close();
  const int ranks = static_cast<int>(schedules.size());
  for (int a = 0; a < ranks; ++a)
    for (int b = 0; b < ranks; ++b) {
      bool waits = a == b;
      for (std::uint32_t i = 0; i < schedules[static_cast<std::size_t>(a)].steps.size(); ++i)
        for (std::uint32_t j = 0; j < schedules[static_cast<std::size_t>(b)].steps.size(); ++j)
          waits = waits || order.before(order.begin(a, i), order.end(b, j));
      if (!waits) return "rank " + std::to_string(b) + " may leave before rank " + std::to_string(a) + " has come";
    }
  return "";
}

}  // namespace tessera::comm_test
