// The operations whose parts go to single ranks: gather, scatter, all_to_all, send and receive.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "c10d/backend.h"

namespace tessera::c10d_backend {
namespace {

using ::c10d::OpType;
using TorchWorkPtr = c10::intrusive_ptr<::c10d::Work>;

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* operation) {
  if (tensors.size() == 1) return tensors.front();
  C10_THROW_ERROR(ValueError,
                  std::string("tessera: ") + operation + " takes one tensor, not " + std::to_string(tensors.size()));
}

/// Without tags, messages between two ranks match in the order in which they are sent.
/// Elements of each rank's part, along the first dimension of `tensor`.
std::vector<std::size_t> part_counts(const at::Tensor& tensor, const std::vector<std::int64_t>& splits, int ranks,
                                     const char* what) {
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const std::size_t per_row =
      rows == 0 ? 0 : static_cast<std::size_t>(tensor.numel() / rows) * moved_per_element(tensor);
  std::vector<std::size_t> counts;
  if (splits.empty()) {
    if (rows % ranks != 0)
      C10_THROW_ERROR(ValueError, std::string("tessera: all_to_all: the first dimension of the ") + what + " is " +
                                      std::to_string(rows) + ", no multiple of the " + std::to_string(ranks) +
                                      " ranks; give split sizes");
    counts.assign(static_cast<std::size_t>(ranks), static_cast<std::size_t>(rows / ranks) * per_row);
    return counts;
  }
  if (splits.size() != static_cast<std::size_t>(ranks) ||
      std::accumulate(splits.begin(), splits.end(), std::int64_t{0}) != rows)
    C10_THROW_ERROR(ValueError, std::string("tessera: all_to_all: the split sizes of the ") + what +
                                    " must be one for each rank and add up to " + std::to_string(rows));
  for (const std::int64_t split : splits) counts.push_back(static_cast<std::size_t>(split) * per_row);
  return counts;
}

}  // namespace

TorchWorkPtr TorchBackend::gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                  const ::c10d::GatherOptions& options) {
  Call call{OpType::GATHER, options.timeout, {}, {}, {}, "gather", inputs};
  const comm::View in = moved(readable(only(inputs, "gather"), call.holding));
  comm::View out;
  if (options.rootRank == getRank()) {
    check_count(outputs.size(), 1, "gather: the list of lists of outputs");
    check_count(outputs.front().size(), static_cast<std::size_t>(getSize()), "gather: the list of outputs");
    for (const std::size_t count : counts_of(outputs.front())) check_count(count, in.count, "gather: an output");
    out = moved(to_be_split(outputs.front(), call.holding));
    call.results = outputs.front();
  }
  call.issues.emplace_back([in, out, root = static_cast<int>(options.rootRank)](auto& world, auto how) {
    return world.gather(in, out, root, how);
  });
  return issue(std::move(call));
}

TorchWorkPtr TorchBackend::scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                   const ::c10d::ScatterOptions& options) {
  Call call{OpType::SCATTER, options.timeout, {}, {}, outputs, "scatter"};
  const comm::View out = moved(writable(only(outputs, "scatter"), call.holding, false));
  comm::View in;
  if (options.rootRank == getRank()) {
    check_count(inputs.size(), 1, "scatter: the list of lists of inputs");
    check_count(inputs.front().size(), static_cast<std::size_t>(getSize()), "scatter: the list of inputs");
    for (const std::size_t count : counts_of(inputs.front())) check_count(count, out.count, "scatter: an input");
    in = moved(joined(inputs.front(), call.holding));
    call.inputs = inputs.front();
  }
  call.issues.emplace_back([in, out, root = static_cast<int>(options.rootRank)](auto& world, auto how) {
    return world.scatter(in, out, root, how);
  });
  return issue(std::move(call));
}

TorchWorkPtr TorchBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<std::int64_t>& output_splits,
                                         std::vector<std::int64_t>& input_splits,
                                         const ::c10d::AllToAllOptions& options) {
  Call call{OpType::ALLTOALL_BASE, options.timeout, {}, {}, {output}, "all_to_all_single", {input}};
  const auto to = part_counts(input, input_splits, getSize(), "input");
  const auto from = part_counts(output, output_splits, getSize(), "output");
  const comm::View in = moved(readable(input, call.holding));
  const comm::View out = moved(writable(output, call.holding, false));
  call.issues.emplace_back(
      [in, out, to, from](auto& world, auto how) { return world.all_to_all_v(in, to, out, from, how); });
  return issue(std::move(call));
}

TorchWorkPtr TorchBackend::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                    const ::c10d::AllToAllOptions& options) {
  check_count(inputs.size(), static_cast<std::size_t>(getSize()), "all_to_all: the list of inputs");
  check_count(outputs.size(), static_cast<std::size_t>(getSize()), "all_to_all: the list of outputs");
  Call call{OpType::ALLTOALL, options.timeout, {}, {}, outputs, "all_to_all", inputs};
  const comm::View in = moved(joined(inputs, call.holding));
  const comm::View out = moved(to_be_split(outputs, call.holding));
  call.issues.emplace_back([in, out, to = counts_of(inputs), from = counts_of(outputs)](auto& world, auto how) {
    return world.all_to_all_v(in, to, out, from, how);
  });
  return issue(std::move(call));
}

TorchWorkPtr TorchBackend::send(std::vector<at::Tensor>& tensors, int peer, int tag) {
  Call call{OpType::SEND, ::c10d::kUnsetTimeout, {}, {}, {}, "send", tensors};
  const comm::View data = moved(readable(only(tensors, "send"), call.holding));
  call.issues.emplace_back([data, peer, tag](auto& world, auto how) {
    how.tag = tag;
    return world.send(data, peer, how);
  });
  return issue(std::move(call));
}

TorchWorkPtr TorchBackend::receive(std::vector<at::Tensor>& tensors, int peer, int tag, ::c10d::OpType type) {
  Call call{type, ::c10d::kUnsetTimeout, {}, {}, tensors, peer == comm::kAnyRank ? "recvAnySource" : "recv"};
  const comm::View data = moved(writable(only(tensors, "recv"), call.holding, false));
  call.holding.source = std::make_shared<int>(peer);
  call.issues.emplace_back([data, peer, tag, source = call.holding.source](auto& world, auto how) {
    how.tag = tag;
    how.source = source.get();
    return world.recv(data, peer, how);
  });
  return issue(std::move(call));
}

TorchWorkPtr TorchBackend::recv(std::vector<at::Tensor>& tensors, int peer, int tag) {
  return receive(tensors, peer, tag, OpType::RECV);
}

TorchWorkPtr TorchBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return receive(tensors, comm::kAnyRank, tag, OpType::RECVANYSOURCE);
}

}  // namespace tessera::c10d_backend
