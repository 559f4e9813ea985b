#include "tessera/comm/algorithms/schedule_builder.h"

#include <algorithm>
#include <bit>

namespace tessera::comm {
namespace {

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kSegmentBytes = std::size_t{256} << 10;
constexpr std::size_t kMaxSteps = 16384;

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

int middle(int a, int b) {
  return static_cast<int>(tree_middle(static_cast<std::size_t>(a), static_cast<std::size_t>(b)));
}

}  // namespace

ScheduleBuilder::ScheduleBuilder(const CollectiveSpec& spec, std::string_view algorithm)
    : spec_(spec), size_(size_of(spec.dtype)) {
  schedule_.algorithm = algorithm;
  const auto ranks = static_cast<std::size_t>(spec.ranks);
  numbers_.assign(2 * ranks, 0);
  schedule_.steps.reserve(8 * ranks);
  edges_.reserve(8 * ranks);
}

BufferRegion ScheduleBuilder::scratch(std::size_t bytes) {
  const BufferRegion region{BufferId::scratch, schedule_.scratch_bytes, bytes};
  schedule_.scratch_bytes += aligned(bytes);
  return region;
}

StepId ScheduleBuilder::add(ScheduleStep step, Waits waits) {
  const auto id = static_cast<StepId>(schedule_.steps.size());
  if (step.kind == ScheduleStep::Kind::send || step.kind == ScheduleStep::Kind::receive) {
    const int first = step.kind == ScheduleStep::Kind::send ? 0 : ranks();
    step.number = numbers_[static_cast<std::size_t>(first) + static_cast<std::size_t>(step.peer)]++;
  }
  schedule_.steps.push_back(step);
  for (const StepId earlier : waits) wait(id, earlier);
  return id;
}

StepId ScheduleBuilder::send(int peer, BufferRegion from, Waits waits) {
  if (from.bytes == 0) return kNoStep;
  return add({.kind = ScheduleStep::Kind::send, .peer = peer, .from = from}, waits);
}

StepId ScheduleBuilder::receive(int peer, BufferRegion to, Waits waits) {
  if (to.bytes == 0) return kNoStep;
  return add({.kind = ScheduleStep::Kind::receive, .peer = peer, .to = to}, waits);
}

StepId ScheduleBuilder::signal(int peer, Waits waits) {
  return add({.kind = ScheduleStep::Kind::send, .peer = peer, .from = {BufferId::scratch, 0, 0}}, waits);
}

StepId ScheduleBuilder::await(int peer, Waits waits) {
  return add({.kind = ScheduleStep::Kind::receive, .peer = peer, .to = {BufferId::scratch, 0, 0}}, waits);
}

StepId ScheduleBuilder::copy(BufferRegion from, BufferRegion to, Waits waits, bool same) {
  if (to.bytes == 0 || same) return kNoStep;
  return add({.kind = ScheduleStep::Kind::copy, .from = from, .to = to}, waits);
}

StepId ScheduleBuilder::reduce(ReducePhase arithmetic, std::span<const BufferRegion> sources, BufferRegion to,
                               Waits waits, BufferRegion factors) {
  if (to.bytes == 0) return kNoStep;
  const auto first = static_cast<std::uint32_t>(schedule_.sources.size());
  schedule_.sources.insert(schedule_.sources.end(), sources.begin(), sources.end());
  return add({.kind = ScheduleStep::Kind::reduce,
              .arithmetic = arithmetic,
              .to = to,
              .first_source = first,
              .sources = static_cast<std::uint32_t>(sources.size()),
              .factors = factors},
             waits);
}

StepId ScheduleBuilder::native(BufferRegion from, BufferRegion to, Waits waits) {
  return add({.kind = ScheduleStep::Kind::native, .from = from, .to = to}, waits);
}

void ScheduleBuilder::wait(StepId step, StepId earlier) {
  if (step != kNoStep && earlier != kNoStep) edges_.push_back({earlier, step});
}

BufferRegion ScheduleBuilder::own_factor(StepId& ready) {
  if (own_factor_.bytes == 0) {
    own_factor_ = scratch(sizeof(double));
    own_factor_ready_ = copy({BufferId::factor, 0, sizeof(double)}, own_factor_);
  }
  ready = own_factor_ready_;
  return own_factor_;
}

Schedule ScheduleBuilder::finish() && {
  std::vector<ScheduleStep>& steps = schedule_.steps;
  for (const Edge& edge : edges_) {
    ++steps[edge.earlier].dependents;
    ++steps[edge.later].waits_for;
  }
  std::uint32_t first = 0;
  for (ScheduleStep& step : steps) {
    step.first_dependent = first;
    first += step.dependents;
    step.dependents = 0;  // counted again below, as the entries are filled
  }
  schedule_.dependents.resize(edges_.size());
  for (const Edge& edge : edges_) {
    ScheduleStep& earlier = steps[edge.earlier];
    schedule_.dependents[earlier.first_dependent + earlier.dependents++] = edge.later;
  }
  return std::move(schedule_);
}

ScratchRing::ScratchRing(ScheduleBuilder& builder, std::size_t buffers, std::size_t uses, std::size_t bytes)
    : stride_(aligned(bytes)), free_(std::min(buffers, uses), kNoStep) {
  first_ = builder.scratch(stride_ * free_.size());
  last_ = free_.size() - 1;
}

ScratchRing::Buffer ScratchRing::acquire(std::size_t bytes) {
  last_ = (last_ + 1) % free_.size();
  return {sub_region(first_, last_ * stride_, bytes), free_[last_]};
}

std::size_t segment_elements(const CollectiveSpec& spec, std::size_t steps) {
  const std::size_t size = size_of(spec.dtype);
  const std::size_t least = spec.count / std::max(kMaxSteps / steps, std::size_t{1}) + 1;
  return std::max(kSegmentBytes / size, (least + kCacheLine - 1) / kCacheLine * kCacheLine);
}

Slice part_of(const CollectiveSpec& spec, const std::vector<std::size_t>& starts, int index) {
  if (starts.empty()) return slice_of(spec.count, spec.ranks, index);
  const auto i = static_cast<std::size_t>(index);
  return {starts[i], starts[i + 1] - starts[i]};
}

Slice parts_of(const CollectiveSpec& spec, const std::vector<std::size_t>& starts, int first, int last) {
  if (first == last) return {0, 0};
  const Slice end = part_of(spec, starts, last - 1);
  const std::size_t offset = part_of(spec, starts, first).offset;
  return {offset, end.offset + end.count - offset};
}

TreePosition place_in_tree(int ranks, int rank, int root) {
  TreePosition place;
  const auto keeper = [root](int a, int b) { return a <= root && root < b ? root : a; };
  int a = 0;
  int b = ranks;
  place.last = ranks;
  while (b - a > 1) {
    const int m = middle(a, b);
    const bool lower = rank < m;
    const int above = keeper(a, b);
    const int other_first = lower ? m : a;
    const int other_last = lower ? b : m;
    (lower ? b : a) = m;
    if (above == rank) {
      place.children.push_back({keeper(other_first, other_last), other_first, other_last, lower});
    } else if (keeper(a, b) == rank) {
      place.parent = above;
      place.first = a;
      place.last = b;
    }
  }
  return place;
}

PowerOfTwoGroups::PowerOfTwoGroups(int ranks, int rank) : ranks_(ranks) {
  levels = std::bit_width(static_cast<unsigned>(ranks)) - 1;
  int a = 0;
  int b = ranks;
  for (int level = levels - 1; level >= 0; --level) {
    const int m = middle(a, b);
    const bool upper = rank >= m;
    (upper ? a : b) = m;
    group |= (upper ? 1 : 0) << level;
  }
  speaks = rank == a;
  if (b - a == 2) partner = speaks ? a + 1 : a;
}

int PowerOfTwoGroups::first_rank(int index) const {
  if (index == count()) return ranks_;
  int a = 0;
  int b = ranks_;
  for (int level = levels - 1; level >= 0; --level) (((index >> level) & 1) != 0 ? a : b) = middle(a, b);
  return a;
}

StepId FilledPrefix::ready(Slice slice) const {
  const std::size_t end = slice.offset + slice.count;
  const auto found = std::ranges::lower_bound(ends_, end, {}, [](const auto& entry) { return entry.first; });
  return found == ends_.end() ? last() : found->second;
}

Operand::Operand(ScheduleBuilder& builder, Target target) : builder_(builder), in_out_(false) {
  const CollectiveSpec& spec = builder.spec();
  in_out_ = target == Target::out && spec.in_place;
  if (spec.reduce != ReduceOp::Kind::premul_sum) return;
  in_out_ = target == Target::out;
  const Slice all = everything(spec);
  product_ = in_out_ ? builder.out(all) : builder.scratch(builder.in(all).bytes);
  StepId factor_ready = kNoStep;
  const BufferRegion factor = builder.own_factor(factor_ready);
  const Segments segments(all, segment_elements(spec, 1));
  for (std::size_t s = 0; s < segments.count(); ++s) {
    const BufferRegion from = builder.in(segments[s]);
    const BufferRegion to = sub_region(product_, from.offset, from.bytes);
    const StepId earlier = scaled_.last() == kNoStep ? factor_ready : scaled_.last();
    const Slice segment = segments[s];
    scaled_.add(segment.offset + segment.count, builder.reduce(ReducePhase::whole, {&from, 1}, to, {earlier}, factor));
  }
}

BufferRegion Operand::at(Slice slice) const {
  const BufferRegion region = builder_.in(slice);
  return product_.bytes == 0 ? region : sub_region(product_, region.offset, region.bytes);
}

}  // namespace tessera::comm
