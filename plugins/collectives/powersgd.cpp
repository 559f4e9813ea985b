#include "plugins/collectives/powersgd.h"

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

namespace {

/// A matrix [rows, columns], or a parameter that is sent whole (rank 0), and the offsets of its elements.
struct Matrix {
  std::size_t rows = 0, columns = 0;
  std::size_t rank = 0;
  std::size_t p = 0;  // offset in the first message: P, or the parameter
  std::size_t q = 0;  // offset in the second message: Q^T
  std::size_t error = 0;
  std::size_t count() const { return rows * columns; }
};

/// The messages of a flat parameter. Lengths are the same multiple for every rank.
struct Packing {
  std::vector<Matrix> matrices;
  std::size_t first = 0, first_used = 0;
  std::size_t second = 0, second_used = 0;
  std::size_t errors = 0;
};

Matrix matrix_of(const nn::Shape& shape, std::size_t rank) {
  Matrix matrix{.rows = 1, .columns = 1};
  for (std::size_t i = 0; i < shape.size(); ++i)
    (i == 0 ? matrix.rows : matrix.columns) *= static_cast<std::size_t>(shape[i]);
  rank = std::min({rank, matrix.rows, matrix.columns});
  if (rank * (matrix.rows + matrix.columns) < matrix.count()) matrix.rank = rank;
  return matrix;
}

Packing pack(std::span<const nn::Shape> shapes, int rank, int ranks) {
  Packing packing;
  for (const nn::Shape& shape : shapes) {
    Matrix matrix = matrix_of(shape, static_cast<std::size_t>(rank));
    matrix.p = packing.first_used;
    matrix.q = packing.second_used;
    matrix.error = packing.errors;
    packing.first_used += matrix.rank > 0 ? matrix.rank * matrix.rows : matrix.count();
    packing.second_used += matrix.rank * matrix.columns;
    if (matrix.rank > 0) packing.errors += matrix.count();
    packing.matrices.push_back(matrix);
  }
  const auto round_up = [multiple = static_cast<std::size_t>(ranks) * 8](std::size_t count) {
    return (count + multiple - 1) / multiple * multiple;
  };
  packing.first = round_up(packing.first_used);
  packing.second = round_up(packing.second_used);
  return packing;
}

/// A rank's own share of the result, in units of its matrix.
double share_of(const ReduceOp& op, int ranks) {
  if (op.kind == ReduceOp::Kind::sum) return 1.0 / ranks;
  if (op.kind == ReduceOp::Kind::avg) return op.scalar == 0 ? 1.0 : op.scalar / ranks;
  throw base::Unsupported("powersgd supports sum and avg, not " + std::string(comm::name_of(op.kind)) + "; use plain");
}

}  // namespace

/// The state of one flat parameter, kept between steps.
struct PowerSgd::PowerSgdState {
  std::string name;
  Packing packing;
  Buffer errors;  // of all matrices; M during a step
  Lease q;        // Q^T of all matrices: the second message
  float* error(const Matrix& matrix) const { return static_cast<float*>(errors.data()) + matrix.error; }
  float* q_of(const Matrix& matrix) const { return static_cast<float*>(q.data()) + matrix.q; }
};

struct PowerSgd::InFlight {
  comm::Communicator& channel;
  const FlatTransfer transfer;
  const ReduceOp op;
  comm::OpOptions options;
  fsdp::Copier& copier;
  const PowerSgdState& plugin_state;
  Lease first;
  float* p(const Matrix& matrix) const { return static_cast<float*>(first.data()) + matrix.p; }
  float* gradient(std::size_t entry) const {
    return static_cast<float*>(transfer.out.data) + transfer.flat->entries[entry].offset;
  }
  comm::View view(void* data, std::size_t count) const { return {data, count, DType::f32, transfer.out.device}; }
  nn::kernels::LinearShape shape(const Matrix& matrix) const {
    return {.rows = matrix.rows, .in = matrix.columns, .out = matrix.rank};
  }
};

PowerSgd::PowerSgd(std::string name, int rank, bool feedback)
    : name_(std::move(name)), rank_(rank), feedback_(feedback) {}
PowerSgd::~PowerSgd() = default;

fsdp::CollectiveCapabilities PowerSgd::capabilities() const {
  return {.exact = false, .linear = false, .whole = true, .has_state = true, .dtypes = {DType::f32}};
}

void PowerSgd::prepare(const fsdp::CollectiveSetup& setup) {
  context_ = &fsdp::nn_context(setup.runtime);
  buffers_ = &setup.buffers;
  for (const fsdp::TransferSpec& transfer : setup.transfers) {
    std::vector<nn::Shape> shapes;
    for (const fsdp::FlatEntry& entry : transfer.flat->entries) shapes.push_back(entry.parameter->shape());
    PowerSgdState plugin_state{.name = transfer.name, .packing = pack(shapes, rank_, transfer.ranks)};
    plugin_state.errors =
        context_->memory().allocate(plugin_state.packing.errors * sizeof(float), base::MemoryCategory::communication);
    plugin_state.q = buffers_->acquire(plugin_state.packing.second * sizeof(float), transfer.name, context_->stream());
    plugin_state_.emplace(transfer.flat, std::move(plugin_state));
  }
  clear_state(context_->stream());
}

WorkChain PowerSgd::run(const CollectiveCall& call) {
  std::vector<std::shared_ptr<InFlight>> flights;
  WorkChain works;                      // destroyed before the flights, whose memory is in use until then
  Stream& stream = context_->stream();  // products share scratch memory, so all run on this stream
  stream.wait(call.options.after->record());
  nn::KernelTable<float>& kernels = context_->kernels<float>(name_);
  for (const FlatTransfer& transfer : call.transfers) {
    if (transfer.in.data != transfer.out.data)
      throw base::InvalidUsage(name_ + ": in and out differ; it reduces in place");
    share_of(call.op, call.channel.size());  // throws Unsupported before anything is sent
    const PowerSgdState& plugin_state = plugin_state_.at(transfer.flat);
    const Packing& packing = plugin_state.packing;
    auto flight = std::make_shared<InFlight>(
        InFlight{call.channel, transfer, call.op, call.options, call.copier, plugin_state, Lease()});
    flight->first = buffers_->acquire(packing.first * sizeof(float), std::string(call.options.label), stream);
    for (std::size_t i = 0; i < packing.matrices.size(); ++i) {
      const Matrix& matrix = packing.matrices[i];
      if (matrix.rank == 0) {
        call.copier.copy(stream, flight->p(matrix), flight->gradient(i), matrix.count() * sizeof(float));
        continue;
      }
      float* const m = plugin_state.error(matrix);
      kernels.assign(stream, {flight->gradient(i), m, matrix.count(), feedback_});
      kernels.linear_forward(
          stream,
          {.shape = flight->shape(matrix), .x = m, .weight = plugin_state.q_of(matrix), .y = flight->p(matrix)});
    }
    context_->runtime().fill(stream, static_cast<float*>(flight->first.data()) + packing.first_used, 0,
                             (packing.first - packing.first_used) * sizeof(float));
    const comm::View first = flight->view(flight->first.data(), packing.first);
    call.options.after->wait(stream.record());
    works.add(call.channel.all_reduce(first, first, call.op, call.options));
    stats_.raw += plain_bytes(OpKind::all_reduce, transfer, call.channel.size());
    for (const std::size_t count : {packing.first, packing.second})
      stats_.sent += comm::direct_bytes_sent(OpKind::all_reduce, count, sizeof(float), call.channel.size(), 0);
    flights.push_back(std::move(flight));
  }
  works.then([this, flights](Stream& then) {
    WorkChain second;
    for (const auto& flight : flights) sum_q(*flight, then, second);
    second.then([this, flights](Stream& last) {
      for (const auto& flight : flights) finish(*flight, last);
      return WorkChain();
    });
    return second;
  });
  return works;
}

/// P is complete: computes Q of the matrices from it.
void PowerSgd::sum_q(InFlight& flight, Stream& stream, WorkChain& works) {
  const Packing& packing = flight.plugin_state.packing;
  if (packing.second == 0) return;
  nn::KernelTable<float>& kernels = context_->kernels<float>(name_);
  for (const Matrix& matrix : packing.matrices) {
    if (matrix.rank == 0) continue;
    float* const p = flight.p(matrix);
    context_->device_kernels().orthonormalize(stream, {p, matrix.rows, matrix.rank});
    kernels.linear_backward(stream, {.shape = flight.shape(matrix),
                                     .x = flight.plugin_state.error(matrix),
                                     .dy = p,
                                     .dweight = flight.plugin_state.q_of(matrix)});
  }
  const comm::View second = flight.view(flight.plugin_state.q.data(), packing.second);
  flight.options.after = &stream;
  works.add(flight.channel.all_reduce(second, second, flight.op, flight.options));
}

/// P and Q are complete: their product is the result, and the difference is kept as the error.
void PowerSgd::finish(InFlight& flight, Stream& stream) {
  nn::KernelTable<float>& kernels = context_->kernels<float>(name_);
  const double share = share_of(flight.op, flight.channel.size());
  const Packing& packing = flight.plugin_state.packing;
  for (std::size_t i = 0; i < packing.matrices.size(); ++i) {
    const Matrix& matrix = packing.matrices[i];
    float* const out = flight.gradient(i);
    if (matrix.rank == 0) {
      flight.copier.copy(stream, out, flight.p(matrix), matrix.count() * sizeof(float));
      continue;
    }
    kernels.linear_backward(
        stream,
        {.shape = flight.shape(matrix), .weight = flight.plugin_state.q_of(matrix), .dy = flight.p(matrix), .dx = out});
    if (feedback_)
      kernels.scale(stream, {out, static_cast<float>(-share), flight.plugin_state.error(matrix), matrix.count(), true});
  }
  flight.first.release(stream.record());
}

std::vector<fsdp::CollectivePlugin::State> PowerSgd::state() {
  std::vector<State> all;
  for (const auto& [flat, plugin_state] : plugin_state_) {
    if (plugin_state.packing.second == 0) continue;
    all.push_back({plugin_state.name + "/q", static_cast<float*>(plugin_state.q.data()), plugin_state.packing.second});
    if (feedback_)
      all.push_back(
          {plugin_state.name + "/error", static_cast<float*>(plugin_state.errors.data()), plugin_state.packing.errors});
  }
  return all;
}

void PowerSgd::clear_state(Stream& stream) {
  for (const auto& [flat, plugin_state] : plugin_state_) {
    context_->runtime().fill(stream, plugin_state.errors.data(), 0, plugin_state.errors.bytes());
    context_->runtime().fill(stream, plugin_state.q.data(), 0, plugin_state.q.bytes());
    for (std::size_t i = 0; i < plugin_state.packing.matrices.size(); ++i) {
      const Matrix& matrix = plugin_state.packing.matrices[i];
      // any initial Q works if it is the same on every rank
      const std::string& parameter = flat->entries[i].parameter->name();
      const nn::StreamRange numbers{nn::tensor_stream(0, parameter), 0, matrix.rank * matrix.columns};
      context_->kernels<float>(name_).fill_normal(stream, {numbers, 0.0F, 1.0F, plugin_state.q_of(matrix)});
    }
  }
}

fsdp::CollectiveCost powersgd_cost(int rank, const fsdp::CollectiveSize& size) {
  const Packing packing = pack(size.shapes, rank, size.ranks);
  const auto bytes = [&](std::size_t count) {
    return comm::direct_bytes_sent(OpKind::all_reduce, count, sizeof(float), size.ranks, 0);
  };
  return {packing.second == 0 ? 1U : 2U, bytes(packing.first) + bytes(packing.second)};
}

}  // namespace tessera::collectives
