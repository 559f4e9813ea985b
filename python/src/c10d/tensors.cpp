#include "c10d/tensors.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "c10d/tensor_device.h"

namespace tessera::c10d_backend {

std::optional<base::DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return base::DType::f32;
    case at::kDouble:
      return base::DType::f64;
    case at::kHalf:
      return base::DType::f16;
    case at::kBFloat16:
      return base::DType::bf16;
    case at::kChar:
      return base::DType::i8;
    case at::kByte:
      return base::DType::u8;
    case at::kInt:
      return base::DType::i32;
    case at::kLong:
      return base::DType::i64;
    case at::kShort:
      return base::DType::i16;
    case at::kBool:
      return base::DType::boolean;
    case at::kUInt32:
      return base::DType::u32;
    case at::kUInt64:
      return base::DType::u64;
    default:
      return std::nullopt;
  }
}

namespace {

/// A view of all tensors together if each one begins where the one before ends.
std::optional<at::Tensor> adjacent(const std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = tensors.front();
  std::int64_t total = 0;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_contiguous() || tensor.scalar_type() != first.scalar_type() ||
        tensor.storage().unsafeGetStorageImpl() != first.storage().unsafeGetStorageImpl() ||
        tensor.storage_offset() != first.storage_offset() + total)
      return std::nullopt;
    total += tensor.numel();
  }
  return first.as_strided({total}, {1}, first.storage_offset());
}

void check_list(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) C10_THROW_ERROR(ValueError, "tessera: the list of tensors is empty");
  static_cast<void>(common_device(tensors));
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor);
    if (tensor.scalar_type() != tensors.front().scalar_type())
      C10_THROW_ERROR(ValueError, "tessera: the tensors of a list must have one dtype");
  }
}

}  // namespace

void check_tensor(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided)
    C10_THROW_ERROR(NotImplementedError, "tessera: sparse tensors are not supported; use dense ones (to_dense())");
  static_cast<void>(device_of(tensor.device()));
}

comm::View moved(const at::Tensor& tensor) {
  const auto count = static_cast<std::size_t>(tensor.numel());
  const base::Device device = device_of(tensor.device());
  if (const auto dtype = dtype_of(tensor.scalar_type())) return {tensor.mutable_data_ptr(), count, *dtype, device};
  return {tensor.mutable_data_ptr(), count * moved_per_element(tensor), base::DType::u8, device};
}

std::size_t moved_per_element(const at::Tensor& tensor) {
  return dtype_of(tensor.scalar_type()) ? 1 : tensor.element_size();
}

at::Tensor readable(const at::Tensor& tensor, Holding& holding) {
  check_tensor(tensor);
  at::Tensor dense = tensor.resolve_conj().resolve_neg().contiguous();
  holding.tensors.push_back(dense);
  return dense;
}

at::Tensor writable(const at::Tensor& tensor, Holding& holding, bool current) {
  check_tensor(tensor);
  holding.tensors.push_back(tensor);
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) return tensor;
  at::Tensor dense =
      current ? tensor.resolve_conj().resolve_neg().contiguous() : at::empty(tensor.sizes(), tensor.options());
  holding.tensors.push_back(dense);
  holding.at_end.emplace_back([tensor, dense] {
    const at::NoGradGuard no_gradients;
    tensor.copy_(dense);
  });
  return dense;
}

at::Tensor joined(const std::vector<at::Tensor>& tensors, Holding& holding) {
  check_list(tensors);
  at::Tensor all;
  if (const auto together = adjacent(tensors)) {
    all = *together;
  } else {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& tensor : tensors) flat.push_back(tensor.detach().reshape({-1}));
    all = at::cat(flat);
  }
  holding.tensors.push_back(all);
  return all;
}

at::Tensor to_be_split(const std::vector<at::Tensor>& tensors, Holding& holding) {
  check_list(tensors);
  for (const at::Tensor& tensor : tensors) holding.tensors.push_back(tensor);
  if (const auto together = adjacent(tensors)) return *together;
  std::int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += tensor.numel();
  const at::Tensor all = at::empty({total}, tensors.front().options().requires_grad(false));
  holding.tensors.push_back(all);
  holding.at_end.emplace_back([tensors, all] {
    const at::NoGradGuard no_gradients;
    std::int64_t at = 0;
    for (const at::Tensor& tensor : tensors) {
      tensor.copy_(all.narrow(0, at, tensor.numel()).view(tensor.sizes()));
      at += tensor.numel();
    }
  });
  return all;
}

bool equal_sizes(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.numel() == tensors.front().numel(); });
}

std::vector<std::size_t> counts_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::size_t> counts;
  for (const at::Tensor& tensor : tensors)
    counts.push_back(static_cast<std::size_t>(tensor.numel()) * moved_per_element(tensor));
  return counts;
}

}  // namespace tessera::c10d_backend
