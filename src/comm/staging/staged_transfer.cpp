#include "tessera/comm/staging/staged_transfer.h"

#include <algorithm>

#include "tessera/comm/staging/communicator.h"

namespace tessera::comm::staging {
namespace {

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
