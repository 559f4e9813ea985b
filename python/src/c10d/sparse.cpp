// The sum of sparse tensors, whose ranks have different numbers of elements at different places.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include "c10d/backend.h"

namespace tessera::c10d_backend {
namespace {

/// The rows of all ranks' tensors, in rank order.
at::Tensor gathered_rows(TorchBackend& backend, const at::Tensor& rows, const std::vector<std::int64_t>& counts,
                         std::chrono::milliseconds timeout) {
  std::vector<at::Tensor> parts;
  for (const std::int64_t count : counts) {
    std::vector<std::int64_t> sizes = rows.sizes().vec();
    sizes[0] = count;
    parts.push_back(at::empty(sizes, rows.options()));
  }
  std::vector<std::vector<at::Tensor>> outputs{parts};
  std::vector<at::Tensor> inputs{rows};
  backend.allgather(outputs, inputs, {timeout})->wait();
  return at::cat(parts);
}

}  // namespace

/// Waits for the ranks' numbers of elements, then for the elements. Each place is added in rank order.
c10::intrusive_ptr<::c10d::Work> TorchBackend::allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                                const ::c10d::AllreduceOptions& options) {
  if (tensors.size() != 1 || options.reduceOp.op_ != ::c10d::ReduceOp::SUM || !tensors.front().device().is_cpu())
    C10_THROW_ERROR(NotImplementedError, "tessera: of sparse tensors only the sum of one in host memory is supported");
  const at::Tensor mine = tensors.front().coalesce();
  at::Tensor count = at::full({1}, mine._nnz(), at::kLong);
  at::Tensor every = at::empty({getSize()}, at::kLong);
  _allgather_base(every, count, {options.timeout})->wait();
  const std::vector<std::int64_t> counts(every.data_ptr<std::int64_t>(), every.data_ptr<std::int64_t>() + getSize());
  const at::Tensor indices = gathered_rows(*this, mine.indices().t().contiguous(), counts, options.timeout);
  const at::Tensor values = gathered_rows(*this, mine.values().contiguous(), counts, options.timeout);
  const at::Tensor sum = at::sparse_coo_tensor(indices.t(), values, mine.sizes(), mine.options()).coalesce();
  tensors.front().copy_(sum);
  Call call{::c10d::OpType::_ALLREDUCE_SPARSE, options.timeout, {}, {}, tensors, "all_reduce_sparse"};
  return issue(std::move(call));
}

}  // namespace tessera::c10d_backend
