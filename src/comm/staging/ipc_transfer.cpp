#include "tessera/comm/staging/ipc_transfer.h"

#include <algorithm>
#include <type_traits>

#include "tessera/base/error.h"
#include "tessera/comm/staging/communicator.h"

namespace tessera::comm::staging {
namespace {

/// A hash of everything that all ranks of a call must agree on: a different value is a different call.
std::uint64_t number_of(const OpDesc& call, int ranks) {
  std::uint64_t number = 0;
  const auto mix = [&number](std::uint64_t x) { number = (number ^ x) * 0x9e3779b97f4a7c15U + (number >> 29U); };
  mix(static_cast<std::uint64_t>(call.kind));
  mix(static_cast<std::uint64_t>(call.in.dtype));
  mix(static_cast<std::uint64_t>(call.op.kind));
  mix(static_cast<std::uint64_t>(call.root));
  if (call.op.kind == ReduceOp::Kind::avg) mix(static_cast<std::uint64_t>(call.op.scalar));
  const auto all = static_cast<std::uint64_t>(ranks);
  switch (call.kind) {  // the number of elements that every rank knows
    case OpKind::all_gather:
    case OpKind::broadcast:
      mix(call.out.count);
      break;
    case OpKind::scatter:
      if (call.in_counts.empty()) mix(call.out.count * all);
      break;
    case OpKind::gather:
      if (call.out_counts.empty()) mix(call.in.count * all);
      break;
    case OpKind::all_to_all:
      if (call.in_counts.empty()) mix(call.in.count);
      break;
    default:
      mix(call.in.count);
  }
  return number;
}

const std::byte* at(const void* data, std::size_t bytes) { return static_cast<const std::byte*>(data) + bytes; }

}  // namespace

IpcTransfer::IpcTransfer(StagedOperation& operation, const OpDesc& call)
    : operation_(operation),
      call_(call),
      sharing_(*operation.communicator().sharing()),
      rank_(operation.communicator().rank()),
      ranks_(operation.communicator().size()),
      reads_(call, rank_, ranks_),
      size_(size_of(call.in.dtype)),
      name_(std::string(name_of(call.kind)) +
            (operation.label().empty() ? "" : " (" + std::string(operation.label()) + ")")),
      mine_(static_cast<std::size_t>(ranks_)),
      theirs_(mine_.size()),
      sources_(mine_.size()),
      sums_(mine_.size()),
      votes_(mine_.size()) {}

bool IpcTransfer::advance(bool may_begin) {
  if (stage_ == Stage::waiting && !may_begin) return false;
  try {
    return step();
  } catch (const Timeout& error) {  // of an internal operation, as the next one: adds the call's name
    throw Timeout(name_ + ": " + error.what());
  } catch (const PeerLost& error) {
    throw PeerLost(name_ + ": " + error.what());
  } catch (const std::exception& error) {
    operation_.communicator().abort_inner(error.what());
    throw;
  }
}

bool IpcTransfer::step() {
  if (talking_) {
    if (!work_.done()) return false;
    work_.wait();
    work_ = {};
    talking_ = false;
    for (int r = 0; r < ranks_; ++r)
      if (r != rank_) sharing_.count_sent(sent_.kind, r, sent_.bytes);
  }
  if (!event_.done()) return false;
  event_ = {};
  switch (stage_) {
    case Stage::waiting:
      exchange();
      return true;
    case Stage::exchanging:
      decide();
      return true;
    case Stage::voting:
      if (std::ranges::find(votes_, 0) == votes_.end()) {
        read();
      } else {
        fall_back();
      }
      return true;
    case Stage::reading:
      talk(OpKind::barrier, {}, {}, reads_.second_round() ? Stage::synchronizing : Stage::closing);
      return true;
    case Stage::synchronizing:
      collect();
      return true;
    case Stage::collecting:
      talk(OpKind::barrier, {}, {}, Stage::closing);
      return true;
    case Stage::closing:
      count_bytes();
      stage_ = Stage::done;
      return true;
    default:
      return false;
  }
}

/// A host operation on the communicator that carries everything else, so one failure ends both.
void IpcTransfer::talk(OpKind kind, ConstView in, View out, Stage stage) {
  work_ = operation_.communicator().issue(
      {.kind = kind, .in = in, .out = out, .timeout = operation_.time_left(), .label = name_});
  talking_ = true;
  stage_ = stage;
  sent_ = {kind, kind == OpKind::all_to_all ? in.bytes() / static_cast<std::size_t>(ranks_) : in.bytes()};
}

void IpcTransfer::exchange() {
  static_assert(std::is_trivially_copyable_v<IpcDescriptor>);
  for (int r = 0; r < ranks_; ++r) mine_[static_cast<std::size_t>(r)] = descriptor_for(r);
  // All ranks must know whether the call uses windows, not only the readers.
  const bool usable = std::ranges::all_of(mine_, [](const IpcDescriptor& descriptor) { return descriptor.usable; });
  const bool fresh = std::ranges::any_of(mine_, [](const IpcDescriptor& descriptor) { return descriptor.fresh; });
  for (IpcDescriptor& descriptor : mine_) {
    descriptor.usable = usable;
    descriptor.fresh = fresh;
  }
  const auto bytes_of = [](std::vector<IpcDescriptor>& descriptors) {
    return View{descriptors.data(), descriptors.size() * sizeof(IpcDescriptor), DType::u8, {}};
  };
  talk(OpKind::all_to_all, bytes_of(mine_), bytes_of(theirs_), Stage::exchanging);
}

IpcTransfer::IpcDescriptor IpcTransfer::descriptor_for(int reader) {
  IpcDescriptor descriptor{.call = number_of(call_, ranks_)};
  const Slice given = reads_.given(reader);
  descriptor.bytes = given.count * size_;
  descriptor.factor = call_.op.scalar;
  descriptor.usable = !reduces(call_.kind) || operation_.engine().sums() != nullptr;
  if (reader == rank_) return descriptor;
  if (given.count != 0)
    place(descriptor, descriptor.in, at(call_.in.data, given.offset * size_), descriptor.bytes, reader);
  const Slice own = reads_.second_round() ? reads_.added_by(rank_) : Slice{};
  if (own.count != 0) place(descriptor, descriptor.out, out_at(own.offset), own.count * size_, reader);
  return descriptor;
}

void IpcTransfer::place(IpcDescriptor& descriptor, WindowLocation& where, const void* data, std::size_t bytes,
                        int reader) {
  if (!descriptor.usable) return;
  const std::optional<WindowLocation> found = sharing_.place_of(data, bytes);
  descriptor.usable = found.has_value();
  if (!found) return;
  where = *found;
  descriptor.fresh |= !sharing_.knows(found->window, reader);
}

void IpcTransfer::decide() {
  for (int r = 0; r < ranks_; ++r) check(theirs_[static_cast<std::size_t>(r)], r);
  const auto usable = [](const IpcDescriptor& descriptor) { return descriptor.usable; };
  if (!std::ranges::all_of(theirs_, usable)) return fall_back();
  const bool fresh = std::ranges::any_of(theirs_, [](const IpcDescriptor& descriptor) { return descriptor.fresh; });
  try {
    open_all();
    vote_ = 1;
  } catch (const Error& error) {
    if (!fresh) throw;
    sharing_.complain(error.what());
    vote_ = 0;
  }
  if (!fresh) return read();
  talk(OpKind::all_gather, view_of(&vote_, 1), view_of(votes_.data(), votes_.size()), Stage::voting);
}

void IpcTransfer::check(const IpcDescriptor& descriptor, int owner) const {
  const IpcDescriptor& own = mine_[static_cast<std::size_t>(rank_)];
  if (descriptor.call == own.call && descriptor.bytes == reads_.taken(owner).count * size_) return;
  throw Mismatch(name_ + ": rank " + std::to_string(owner) + " called a different operation than rank " +
                 std::to_string(rank_) + ", which passed " + std::to_string(call_.in.count) + " elements in and " +
                 std::to_string(call_.out.count) + " out of " + std::string(name_of(call_.in.dtype)));
}

void IpcTransfer::open_all() {
  for (int r = 0; r < ranks_; ++r) {
    const auto k = static_cast<std::size_t>(r);
    if (theirs_[k].bytes != 0)
      sources_[k] = r == rank_ ? at(call_.in.data, reads_.given(r).offset * size_) : sharing_.open(theirs_[k].in);
    if (r != rank_ && reads_.second_round() && reads_.added_by(r).count != 0) sums_[k] = sharing_.open(theirs_[k].out);
  }
}

void IpcTransfer::read() {
  for (int r = 0; r < ranks_; ++r) {
    const IpcDescriptor& descriptor = mine_[static_cast<std::size_t>(r)];
    sharing_.learn(descriptor.in.window, r);
    sharing_.learn(descriptor.out.window, r);
  }
  sharing_.set_algorithm("ipc");
  StagingPipeline& engine = operation_.engine();
  if (reduces(call_.kind)) {
    add_up();
  } else {
    for (int r = 0; r < ranks_; ++r) {
      const Slice taken = reads_.taken(r);
      const std::byte* const from = sources_[static_cast<std::size_t>(r)];
      if (taken.count == 0 || out_at(taken.offset) == from) continue;
      engine.device().copy(engine.up(), CopyDirection::device_to_device, out_at(taken.offset), from,
                           taken.count * size_);
    }
  }
  event_ = engine.up().record();
  stage_ = Stage::reading;
}

void IpcTransfer::add_up() {
  const Slice taken = reads_.taken(rank_);
  if (taken.count == 0) return;
  const std::vector<const void*> sources(sources_.begin(), sources_.end());
  std::vector<double> factors;
  for (const IpcDescriptor& descriptor : theirs_) factors.push_back(descriptor.factor);
  operation_.engine().sums()->append(operation_.engine().up(), {.op = call_.op,
                                                                .dtype = call_.in.dtype,
                                                                .sources = sources.data(),
                                                                .factors = factors.data(),
                                                                .source_count = ranks_,
                                                                .out = out_at(taken.offset),
                                                                .count = taken.count});
}

/// Starts the second round of all_reduce.
void IpcTransfer::collect() {
  StagingPipeline& engine = operation_.engine();
  for (int r = 0; r < ranks_; ++r) {
    const Slice slice = reads_.added_by(r);
    if (r == rank_ || slice.count == 0) continue;
    engine.device().copy(engine.up(), CopyDirection::device_to_device, out_at(slice.offset),
                         sums_[static_cast<std::size_t>(r)], slice.count * size_);
  }
  event_ = engine.up().record();
  stage_ = Stage::collecting;
}

/// Counts what the others have read from this rank.
void IpcTransfer::count_bytes() {
  for (int r = 0; r < ranks_; ++r)
    if (r != rank_) sharing_.count_read(call_.kind, r, reads_.bytes_to(r));
}

void IpcTransfer::fall_back() {
  sharing_.set_algorithm({});
  stage_ = Stage::staged;
}

std::byte* IpcTransfer::out_at(std::size_t element) const {
  return static_cast<std::byte*>(call_.out.data) + element * size_;
}

bool IpcTransfer::drained() {
  if (talking_ && !work_.done()) return false;
  try {
    return event_.done();
  } catch (const std::exception&) {
    return true;  // a failed device copies nothing any more
  }
}

}  // namespace tessera::comm::staging
