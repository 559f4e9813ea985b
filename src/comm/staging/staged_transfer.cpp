#include "tessera/comm/staging/staged_transfer.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "tessera/base/memory_pool.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/staging/communicator.h"

namespace tessera::comm::staging {
namespace {

/// Elements of the longest part, the same on every rank that can compute it.
std::size_t longest(const OpDesc& call, int ranks) {
  const std::span<const std::size_t> counts = parts_of_out(call.kind) ? call.out_counts : call.in_counts;
  return counts.empty() ? part_count(call, ranks) : *std::ranges::max_element(counts);
}

using namespace std::chrono_literals;

/// Runs a device call. Peers can't see its failure, so it is sent to them.
template <class F>
auto query_device(StagedOperation& operation, F&& query) {
  try {
    return query();
  } catch (const std::exception& error) {
    operation.communicator().abort_inner(error.what());
    throw;
  }
}

bool reached(StagedOperation& operation, const Event& event) {
  return query_device(operation, [&] { return event.done(); });
}

}  // namespace

ChunkPlan::ChunkPlan(const OpDesc& call, int rank, int ranks, std::size_t chunk_bytes)
    : kind_(call.kind),
      size_(size_of(call.in.dtype)),
      rank_(static_cast<std::size_t>(rank)),
      ranks_(static_cast<std::size_t>(ranks)),
      in_(side(call.in, call.in_counts, parts_of_in(call.kind))),
      out_(side(call.out, call.out_counts, parts_of_out(call.kind))) {
  if (kind_ == OpKind::all_to_all && in_.ragged) {  // no rank knows the others' lengths: one chunk
    step_ = std::numeric_limits<std::size_t>::max() / 2;
    return;
  }
  const bool parted = parts_of_in(kind_) || parts_of_out(kind_);
  const std::size_t whole = std::max<std::size_t>(chunk_bytes / size_ / (parted ? ranks_ : 1), 1);
  const std::size_t unit = parted ? 16 : ranks_;
  step_ = whole <= unit ? (parted ? whole : unit) : whole / unit * unit;
  chunks_ = std::max<std::size_t>((longest(call, ranks) + step_ - 1) / step_, 1);
}

ChunkPlan::BufferSide ChunkPlan::side(const ConstView& view, std::span<const std::size_t> counts, bool parted) const {
  BufferSide made;
  made.here = view.data != nullptr && view.count != 0;
  made.ragged = !counts.empty();
  if (made.ragged) {
    made.counts.assign(counts.begin(), counts.end());
  } else if (parted) {
    made.counts.assign(ranks_, view.count / ranks_);
  } else {
    made.counts = {view.count};
  }
  return made;
}

void ChunkPlan::append_segments(const BufferSide& side, std::size_t from, std::size_t at,
                                std::vector<CopySegment>& segments) const {
  std::size_t device = 0;
  for (const std::size_t count : side.counts) {
    const std::size_t taken = count > from ? std::min(step_, count - from) : 0;
    if (taken != 0) segments.push_back({(device + from) * size_, at, taken * size_});
    at += taken * size_;
    device += count;
  }
}

std::size_t ChunkPlan::taken(const BufferSide& side, std::size_t from) const {
  const std::vector<std::size_t> counts = counts_of(side, from);
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

std::vector<std::size_t> ChunkPlan::counts_of(const BufferSide& side, std::size_t from) const {
  std::vector<std::size_t> counts;
  for (const std::size_t count : side.counts) counts.push_back(count > from ? std::min(step_, count - from) : 0);
  return counts;
}

Chunk ChunkPlan::chunk(std::size_t index) const {
  const std::size_t from = index * step_;
  Chunk made;
  if (in_.ragged) made.in_counts = counts_of(in_, from);
  if (out_.ragged) made.out_counts = counts_of(out_, from);
  made.in_count = in_.here ? taken(in_, from) : 0;
  made.out_count = out_.here ? taken(out_, from) : 0;
  const auto own_part = [&](const BufferSide& side) {
    const std::vector<std::size_t> counts = counts_of(side, from);
    const auto own = counts.begin() + static_cast<std::ptrdiff_t>(rank_);
    return std::accumulate(counts.begin(), own, std::size_t{0}) * size_;
  };
  if (kind_ == OpKind::all_to_all) {  // the only one that doesn't work in place
    made.out_at = (made.in_count * size_ + kAlignment - 1) / kAlignment * kAlignment;
  } else if (parts_of_out(kind_) && out_.here) {
    made.in_at = own_part(out_);
  } else if (parts_of_in(kind_) && in_.here) {
    made.out_at = own_part(in_);
  }
  if (in_.here) append_segments(in_, from, made.in_at, made.down);
  if (out_.here) append_segments(out_, from, made.out_at, made.up);
  made.bytes = std::max(made.in_at + made.in_count * size_, made.out_at + made.out_count * size_);
  return made;
}

StagedTransfer::StagedTransfer(StagedOperation& operation, const OpDesc& call, bool staged)
    : operation_(operation),
      call_(call),
      in_counts_(call.in_counts.begin(), call.in_counts.end()),
      out_counts_(call.out_counts.begin(), call.out_counts.end()) {
  call_.in_counts = in_counts_;
  call_.out_counts = out_counts_;
  call_.label = {};  // its memory belongs to the caller, which may continue after wait_on()
  if (!staged) return;
  const Communicator& comm = operation.communicator();
  const StagingOptions& options = operation.engine().options();
  plan_.emplace(call_, comm.rank(), comm.size(), options.chunk_bytes);
  chunks_ = plan_->chunks();
  IpcState* const sharing = operation.communicator().sharing();
  if (sharing != nullptr && sharing->suits(call_)) {
    shared_.emplace(operation, call_);
  } else {
    widen(options.chunks_in_flight);
  }
}

void StagedTransfer::widen(std::size_t chunks) {
  if (!plan_) return;
  for (chunks = std::min(chunks, chunks_ - begun_); chunks > 0; --chunks) {
    regions_.push_back(operation_.communicator().acquire_region(plan_->region_bytes()));
    idle_.push_back(regions_.back().bytes_at(0));
  }
}

void StagedTransfer::release_regions() {
  for (Buffer& region : regions_) operation_.communicator().release_region(std::move(region));
  regions_.clear();
}

bool StagedTransfer::moving() const noexcept {
  if (shared_) return shared_->talking();
  return std::ranges::any_of(flights_, [](const ChunkInFlight& f) { return f.stage == ChunkInFlight::Stage::moving; });
}

bool StagedTransfer::advance(bool may_issue) {
  bool moved = false;
  if (shared_) {
    moved = shared_->advance(may_issue);
    if (!shared_->staged()) return moved;
    shared_.reset();
    query_device(operation_, [this] { widen(operation_.engine().options().chunks_in_flight); });
  }
  while (may_issue && begin_chunk()) moved = true;
  while (may_issue && issue_next()) moved = true;
  return land() || moved;
}

bool StagedTransfer::begin_chunk() {
  if (begun_ == chunks_ || (plan_ && idle_.empty())) return false;
  ChunkInFlight& flight = flights_.emplace_back();
  flight.index = begun_++;
  if (plan_) {
    flight.chunk = plan_->chunk(flight.index);
    flight.region = idle_.back();
    idle_.pop_back();
    copy_down(flight);
  }
  return true;
}

void StagedTransfer::copy_down(ChunkInFlight& flight) {
  if (flight.chunk.down.empty()) return;
  StagingPipeline& engine = operation_.engine();
  const auto* from = static_cast<const std::byte*>(call_.in.data);
  query_device(operation_, [&] {
    for (const CopySegment& segment : flight.chunk.down)
      engine.device().copy(engine.down(), CopyDirection::device_to_host, flight.region + segment.host,
                           from + segment.device, segment.bytes);
    flight.event = engine.down().record();
  });
}

bool StagedTransfer::issue_next() {
  const auto next = std::ranges::find_if(
      flights_, [](const ChunkInFlight& flight) { return flight.stage == ChunkInFlight::Stage::down; });
  if (next == flights_.end() || !reached(operation_, next->event)) return false;
  issue(*next);
  return true;
}

void StagedTransfer::issue(ChunkInFlight& flight) {
  OpDesc call = call_;
  call.label = operation_.label();
  call.timeout = operation_.time_left();
  if (plan_) {
    const Chunk& chunk = flight.chunk;
    const auto at = [&](std::size_t count, std::size_t offset) -> std::byte* {
      return count == 0 ? nullptr : flight.region + offset;
    };
    call.in = {at(chunk.in_count, chunk.in_at), chunk.in_count, call_.in.dtype, {}};
    call.out = {at(chunk.out_count, chunk.out_at), chunk.out_count, call_.out.dtype, {}};
    call.in_counts = chunk.in_counts;
    call.out_counts = chunk.out_counts;
  }
  flight.work = operation_.communicator().issue(call);
  flight.stage = ChunkInFlight::Stage::moving;
  ++issued_;
}

bool StagedTransfer::land() {
  bool moved = false;
  for (ChunkInFlight& flight : flights_)
    if (flight.stage == ChunkInFlight::Stage::moving) moved |= land_first(flight);
  while (!flights_.empty() && flights_.front().stage == ChunkInFlight::Stage::up &&
         reached(operation_, flights_.front().event)) {
    if (plan_) idle_.push_back(flights_.front().region);
    flights_.pop_front();
    ++landed_;
    moved = true;
  }
  return moved;
}

/// Starts the copy of a received chunk to the device.
bool StagedTransfer::land_first(ChunkInFlight& flight) {
  if (!flight.work.done()) return false;
  flight.work.wait();
  flight.work = {};
  flight.stage = ChunkInFlight::Stage::up;
  flight.event = {};
  if (flight.chunk.up.empty()) return true;
  StagingPipeline& engine = operation_.engine();
  auto* const to = static_cast<std::byte*>(call_.out.data);
  query_device(operation_, [&] {
    for (const CopySegment& segment : flight.chunk.up)
      engine.device().copy(engine.up(), CopyDirection::host_to_device, to + segment.device,
                           flight.region + segment.host, segment.bytes);
    flight.event = engine.up().record();
  });
  return true;
}

bool StagedTransfer::drained() {
  if (shared_) return shared_->drained();
  std::erase_if(flights_, [](ChunkInFlight& flight) {
    if (flight.stage == ChunkInFlight::Stage::moving) return flight.work.done();
    try {
      return flight.event.done();
    } catch (const std::exception&) {
      return true;  // a failed device copies nothing any more
    }
  });
  return flights_.empty();
}

}  // namespace tessera::comm::staging
