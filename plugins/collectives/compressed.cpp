#include "plugins/collectives/compressed.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::collectives {

using base::Buffer;
using base::DType;
using base::Stream;
using comm::OpKind;
using comm::ReduceOp;
using fsdp::CollectiveCall;
using fsdp::FlatTransfer;
using fsdp::Lease;
using fsdp::WorkChain;
using nn::kernels::compressed_bytes;

namespace {

bool travels_as_it_is(Compression compression, DType dtype) {
  return compression == Compression::bf16 && base::size_of(dtype) == 2;
}

/// The divisor of a sum.
float divisor_of(const ReduceOp& op, int ranks) {
  if (op.kind == ReduceOp::Kind::sum || op.kind == ReduceOp::Kind::premul_sum) return 1;
  if (op.kind != ReduceOp::Kind::avg)
    throw base::Unsupported("compressed collectives support sum, premul_sum and avg, not " +
                            std::string(comm::name_of(op.kind)) + "; use plain");
  return op.scalar == 0 ? static_cast<float>(ranks) : static_cast<float>(op.scalar);
}

/// The factor that is applied to a rank's own values before.
float factor_of(const ReduceOp& op) {
  return op.kind == ReduceOp::Kind::premul_sum ? static_cast<float>(op.scalar) : 1.0F;
}

std::byte* element(void* base, DType dtype, std::size_t index) {
  return static_cast<std::byte*>(base) + index * base::size_of(dtype);
}

}  // namespace

/// Encoding errors: of what this rank sent to each rank, and of the slice that it sums and sends on.
struct CompressedCollective::ErrorFeedback {
  std::string name;
  Buffer sent, slice;
};

/// A transfer in flight.
struct CompressedCollective::InFlight {
  InFlight(const CollectiveCall& call, const FlatTransfer& what)
      : channel(call.channel),
        transfer(what),
        op(call.op),
        options(call.options),
        ranks(static_cast<std::size_t>(call.channel.size())),
        rank(static_cast<std::size_t>(call.channel.rank())),
        part(std::max(what.in.count, what.out.count) / ranks) {}

  comm::ConstView bytes_at(const Lease& lease, std::size_t from, std::size_t count) const {
    return {static_cast<const std::byte*>(lease.data()) + from, count, DType::u8, transfer.in.device};
  }
  comm::View all_of(const Lease& lease) const { return {lease.data(), lease.bytes(), DType::u8, transfer.in.device}; }
  /// Element `index` of the result.
  std::byte* out(std::size_t index) const { return element(transfer.out.data, transfer.out.dtype, index); }

  comm::Communicator& channel;
  const FlatTransfer transfer;
  const ReduceOp op;
  comm::OpOptions options;
  const std::size_t ranks, rank;
  const std::size_t part;      // elements of one rank
  std::size_t compressed = 0;  // bytes of that part, compressed
  Lease mine, theirs;          // ranks x encoded
  float* error = nullptr;      // null: no feedback
  float* slice_error = nullptr;
};

CompressedCollective::CompressedCollective(const CompressionOptions& options) : options_(options) {}
CompressedCollective::~CompressedCollective() = default;

fsdp::CollectiveCapabilities CompressedCollective::capabilities() const {
  return {
      .exact = false, .linear = false, .has_state = options_.feedback, .dtypes = {DType::f32, DType::bf16, DType::f16}};
}

void CompressedCollective::prepare(const fsdp::CollectiveSetup& setup) {
  context_ = &fsdp::nn_context(setup.runtime);
  buffers_ = &setup.buffers;
  if (!options_.feedback) return;
  for (const fsdp::TransferSpec& transfer : setup.transfers) {
    if (travels_as_it_is(options_.compression, transfer.dtype)) continue;
    const auto elements = static_cast<std::size_t>(transfer.elements);
    const auto room = [&](std::size_t count) {
      return context_->memory().allocate(count * sizeof(float), base::MemoryCategory::communication);
    };
    ErrorFeedback errors{transfer.name, room(elements), {}};
    if (options_.collective == OpKind::all_reduce)
      errors.slice = room(elements / static_cast<std::size_t>(transfer.ranks));
    errors_.emplace(std::pair(transfer.flat, elements), std::move(errors));
  }
  clear_state(context_->stream());
}

WorkChain CompressedCollective::run(const CollectiveCall& call) {
  std::vector<std::shared_ptr<InFlight>> flights;
  WorkChain works;  // destroyed before the flights, whose memory is in use until then
  for (const FlatTransfer& transfer : call.transfers) {
    const std::uint64_t raw = plain_bytes(options_.collective, transfer, call.channel.size());
    stats_.raw += raw;
    if (travels_as_it_is(options_.compression, transfer.in.dtype)) {
      works.add(fsdp::start_plain(options_.collective, call, transfer));
      stats_.sent += raw;
      continue;
    }
    auto flight = std::make_shared<InFlight>(call, transfer);
    flight->compressed = compressed_bytes(options_.compression, flight->part);
    if (flight->part * flight->ranks != std::max(transfer.in.count, transfer.out.count))
      throw base::InvalidUsage("compressed collectives need equal parts: " + std::to_string(transfer.in.count) +
                               " elements for " + std::to_string(flight->ranks) + " ranks");
    const auto found = errors_.find({transfer.flat, flight->part * flight->ranks});
    if (found != errors_.end()) {
      flight->error = static_cast<float*>(found->second.sent.data());
      flight->slice_error = static_cast<float*>(found->second.slice.data());
    }
    flight->mine =
        buffers_->acquire(flight->ranks * flight->compressed, std::string(call.options.label), *call.options.after);
    if (options_.collective == OpKind::all_gather) {
      gather_part(*flight, works);
    } else {
      send_parts(*flight, works);
    }
    flights.push_back(std::move(flight));
  }
  if (flights.empty()) return works;
  const auto decompress = [this, flights](Stream& stream) {
    for (const auto& flight : flights) decompress_parts(*flight, stream);
    return WorkChain();
  };
  if (options_.collective == OpKind::all_gather) {
    works.then(decompress);
    return works;
  }
  works.then([this, flights, decompress](Stream& stream) {
    WorkChain more;
    for (const auto& flight : flights) {
      sum_parts(*flight, stream);
      if (options_.collective == OpKind::all_reduce) gather_part(*flight, more);
    }
    if (options_.collective == OpKind::all_reduce) more.then(decompress);
    return more;
  });
  return works;
}

/// Sends each rank the encoded part that it sums.
void CompressedCollective::send_parts(InFlight& flight, WorkChain& works) {
  Stream& stream = *flight.options.after;
  const FlatTransfer& t = flight.transfer;
  divisor_of(flight.op, flight.channel.size());  // throws Unsupported before anything is sent
  flight.theirs = buffers_->acquire(flight.mine.bytes(), flight.mine.owner(), stream);
  for (std::size_t to = 0; to < flight.ranks; ++to)
    context_->device_kernels().compress(stream,
                                        {.compression = options_.compression,
                                         .in = element(const_cast<void*>(t.in.data), t.in.dtype, to * flight.part),
                                         .from = t.in.dtype,
                                         .count = flight.part,
                                         .out = static_cast<std::byte*>(flight.mine.data()) + to * flight.compressed,
                                         .error = flight.error == nullptr ? nullptr : flight.error + to * flight.part,
                                         .factor = factor_of(flight.op)});
  works.add(flight.channel.all_to_all(flight.all_of(flight.mine), flight.all_of(flight.theirs), flight.options));
  stats_.sent += (flight.ranks - 1) * flight.compressed;
}

/// Sums the received parts into this rank's part of the result.
void CompressedCollective::sum_parts(InFlight& flight, Stream& stream) {
  const bool whole = options_.collective == OpKind::all_reduce;
  context_->device_kernels().sum_compressed(stream, {.compression = options_.compression,
                                                     .in = flight.theirs.data(),
                                                     .stride = flight.compressed,
                                                     .sources = flight.ranks,
                                                     .divisor = divisor_of(flight.op, flight.channel.size()),
                                                     .out = flight.out(whole ? flight.rank * flight.part : 0),
                                                     .to = flight.transfer.out.dtype,
                                                     .count = flight.part});
  flight.theirs.release(stream.record());
  flight.options.after = &stream;
  if (!whole) flight.mine.release(stream.record());
}

/// Gathers this rank's part: of an all_gather its input, of an all_reduce the part that it has summed.
void CompressedCollective::gather_part(InFlight& flight, WorkChain& works) {
  const FlatTransfer& t = flight.transfer;
  const bool added = options_.collective == OpKind::all_reduce;
  const std::size_t own = flight.rank * flight.compressed;
  context_->device_kernels().compress(*flight.options.after,
                                      {.compression = options_.compression,
                                       .in = added ? flight.out(flight.rank * flight.part) : t.in.data,
                                       .from = t.in.dtype,
                                       .count = flight.part,
                                       .out = static_cast<std::byte*>(flight.mine.data()) + own,
                                       .error = flight.slice_error});
  works.add(flight.channel.all_gather(flight.bytes_at(flight.mine, own, flight.compressed), flight.all_of(flight.mine),
                                      flight.options));
  stats_.sent += (flight.ranks - 1) * flight.compressed;
}

void CompressedCollective::decompress_parts(InFlight& flight, Stream& stream) {
  for (std::size_t from = 0; from < flight.ranks; ++from)
    context_->device_kernels().sum_compressed(
        stream, {.compression = options_.compression,
                 .in = static_cast<const std::byte*>(flight.mine.data()) + from * flight.compressed,
                 .stride = flight.compressed,
                 .out = flight.out(from * flight.part),
                 .to = flight.transfer.out.dtype,
                 .count = flight.part});
  flight.mine.release(stream.record());
}

std::vector<fsdp::CollectivePlugin::State> CompressedCollective::state() {
  std::vector<State> all;
  const auto add = [&](const std::string& name, const Buffer& buffer) {
    if (buffer) all.push_back({name, static_cast<float*>(buffer.data()), buffer.bytes() / sizeof(float)});
  };
  for (const auto& [flat, errors] : errors_) {
    add(errors.name + "/error", errors.sent);
    add(errors.name + "/slice_error", errors.slice);
  }
  return all;
}

void CompressedCollective::clear_state(Stream& stream) {
  for (const State& each : state()) context_->runtime().fill(stream, each.data, 0, each.count * sizeof(float));
}

fsdp::CollectiveCost compressed_cost(const CompressionOptions& options, const fsdp::CollectiveSize& size) {
  const auto ranks = static_cast<std::uint64_t>(size.ranks);
  const std::uint64_t hops = options.collective == OpKind::all_reduce ? 2 : 1;
  const std::uint64_t part = size.elements / ranks;
  if (travels_as_it_is(options.compression, size.dtype))
    return {1, hops * (ranks - 1) * part * base::size_of(size.dtype)};
  return {hops, hops * (ranks - 1) * compressed_bytes(options.compression, part)};
}

}  // namespace tessera::collectives
