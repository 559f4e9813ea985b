// Direct reductions. The owner of a slice of the result receives that slice from all others and adds all of them at
// once, by the tree of slices.h. Rank j owns slice j (all_reduce, reduce_scatter), the root owns everything (reduce),
// or every rank owns everything (symmetric).
#include <algorithm>

#include "tessera/comm/algorithms/algorithms.h"

namespace tessera::comm::schedules {
namespace {

// Memory for slices that wait to be added, over all peers; with very many ranks, two segments of each may exceed it.
constexpr std::size_t kScratchTarget = std::size_t{32} << 20;

enum class Owners { parts, root, everyone };

class DirectSum {
 public:
  DirectSum(ScheduleBuilder& builder, Owners owners)
      : builder_(builder), spec_(builder.spec()), owners_(owners), segment_(segment_elements(spec_, steps())) {
    if (spec_.reduce == ReduceOp::Kind::premul_sum) exchange_factors();
  }

  /// The elements of the result that rank j computes.
  Slice owned_by(int j) const {
    if (owners_ == Owners::parts) return part_of(spec_, spec_.in_starts, j);
    return owners_ == Owners::everyone || j == spec_.root ? everything(spec_) : Slice{};
  }
  Segments segments_of(int j) const { return {owned_by(j), segment_}; }

  /// Sends this rank's slices to their owners; the first segments of all before the second ones.
  void send_slices();
  /// Receives the others' slices and adds them. `to(segment)` returns the sum's destination; `done(segment, step)` is
  /// called after each sum.
  template <class To, class Done>
  void add_up(To to, Done done);

 private:
  void exchange_factors();
  /// Steps for each segment of the call: send, receive, forward and final receive. A root receives it from every rank,
  /// so many ranks need a long schedule or much scratch memory; this balances the two.
  std::size_t steps() const {
    const auto ranks = static_cast<std::size_t>(spec_.ranks);
    if (owners_ == Owners::parts) return 4;
    return std::min(ranks, 8 + ranks / 4) * (owners_ == Owners::everyone ? 2 : 1);
  }

  ScheduleBuilder& builder_;
  const CollectiveSpec& spec_;
  const Owners owners_;
  const std::size_t segment_;
  BufferRegion factors_;
  std::vector<StepId> factor_steps_;
  std::vector<StepId> sends_;  // symmetric: all sends of segment s precede those of segment s + 1
};

void DirectSum::exchange_factors() {
  const auto ranks = static_cast<std::size_t>(builder_.ranks());
  const BufferRegion own{BufferId::factor, 0, sizeof(double)};
  const bool adds = owned_by(builder_.rank()).count > 0;
  if (adds) factors_ = builder_.scratch(ranks * sizeof(double));
  const auto entry = [&](int j) {
    return sub_region(factors_, static_cast<std::size_t>(j) * sizeof(double), sizeof(double));
  };
  if (adds) factor_steps_.push_back(builder_.copy(own, entry(builder_.rank())));
  for (int d = 1; d < builder_.ranks(); ++d) {
    const int to = builder_.around(d);
    const int from = builder_.around(-d);
    if (owned_by(to).count > 0) builder_.send(to, own);
    if (adds) factor_steps_.push_back(builder_.receive(from, entry(from)));
  }
}

void DirectSum::send_slices() {
  std::size_t most = 0;
  for (int j = 0; j < builder_.ranks(); ++j) most = std::max(most, segments_of(j).count());
  for (std::size_t s = 0; s < most; ++s)
    for (int d = 1; d < builder_.ranks(); ++d) {
      const int owner = builder_.around(d);
      const Segments segments = segments_of(owner);
      if (s >= segments.count()) continue;
      const StepId sent = builder_.send(owner, builder_.in(segments[s]));
      if (owners_ == Owners::everyone) sends_.push_back(sent);
    }
}

template <class To, class Done>
void DirectSum::add_up(To to, Done done) {
  const int rank = builder_.rank();
  const auto others = static_cast<std::size_t>(builder_.ranks() - 1);
  const Segments segments = segments_of(rank);
  if (segments.count() == 0) return;
  // One of the slices can be received in `out` itself, where the sum then replaces it.
  const bool straight = !spec_.in_place;
  const std::size_t chunks = others - (straight ? 1 : 0);
  const std::size_t bytes = segments[0].count * builder_.element_size();
  const std::size_t buffers = std::clamp(kScratchTarget / (bytes * others), std::size_t{2}, kWindow);
  ScratchRing window(builder_, buffers, segments.count(), chunks * bytes);
  std::vector<BufferRegion> sources(others + 1);
  std::vector<StepId> received(others);
  StepId first = kNoStep;
  for (std::size_t s = 0; s < segments.count(); ++s) {
    const BufferRegion sum = to(segments[s]);
    const ScratchRing::Buffer buffer = window.acquire(chunks * sum.bytes);
    sources[static_cast<std::size_t>(rank)] = builder_.in(segments[s]);
    std::size_t used = 0;
    for (std::size_t d = 1; d <= others; ++d) {
      const int from = builder_.around(-static_cast<int>(d));
      const bool here = straight && d == 1;
      const BufferRegion chunk = here ? sum : sub_region(buffer.region, used++ * sum.bytes, sum.bytes);
      sources[static_cast<std::size_t>(from)] = chunk;
      received[d - 1] = builder_.receive(from, chunk, {here ? kNoStep : buffer.free});
    }
    const StepId added = builder_.reduce(ReducePhase::whole, sources, sum, {}, factors_);
    for (const StepId step : received) builder_.wait(added, step);
    if (s == 0) {
      for (const StepId step : factor_steps_) builder_.wait(added, step);
      first = added;
    } else if (!factor_steps_.empty()) {
      builder_.wait(added, first);  // and thereby for the factors
    }
    // Symmetric and in place: the sum replaces data that is being sent.
    if (spec_.in_place && !sends_.empty())
      for (std::size_t i = s * others; i < (s + 1) * others; ++i) builder_.wait(added, sends_[i]);
    window.release(added);
    done(segments[s], added);
  }
}

}  // namespace

void symmetric_all_reduce(ScheduleBuilder& builder) {
  DirectSum sum(builder, Owners::everyone);
  sum.send_slices();
  sum.add_up([&](Slice segment) { return builder.out(segment); }, [](Slice, StepId) {});
}

void direct_all_reduce(ScheduleBuilder& builder) {
  DirectSum sum(builder, Owners::parts);
  sum.send_slices();
  sum.add_up([&](Slice segment) { return builder.out(segment); },
             [&](Slice segment, StepId added) {
               for (int d = 1; d < builder.ranks(); ++d) builder.send(builder.around(d), builder.out(segment), {added});
             });
  // In place, these receives overwrite slices that were sent. The sends are complete by causality: an owner's sum
  // arrives only after the owner has received this rank's whole slice.
  for (int d = 1; d < builder.ranks(); ++d) {
    const int owner = builder.around(-d);
    const Segments segments = sum.segments_of(owner);
    for (std::size_t s = 0; s < segments.count(); ++s) builder.receive(owner, builder.out(segments[s]));
  }
}

void direct_reduce_scatter(ScheduleBuilder& builder) {
  DirectSum sum(builder, Owners::parts);
  const std::size_t start = sum.owned_by(builder.rank()).offset;
  sum.send_slices();
  sum.add_up([&](Slice segment) { return builder.out({segment.offset - start, segment.count}); }, [](Slice, StepId) {});
}

void direct_reduce(ScheduleBuilder& builder) {
  DirectSum sum(builder, Owners::root);
  sum.send_slices();
  sum.add_up([&](Slice segment) { return builder.out(segment); }, [](Slice, StepId) {});
}

}  // namespace tessera::comm::schedules
