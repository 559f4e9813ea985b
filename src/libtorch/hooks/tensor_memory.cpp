#include "tessera/libtorch/hooks/tensor_memory.h"

#include <utility>

#include "tessera/base/error.h"

namespace tessera::libtorch {
namespace {

/// Where Torch can, reading a tensor without memory throws `why`; older ones throw or crash.
template <class Storage>
void explain(Storage& storage, std::string_view why) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    if (why.empty())
      storage.clear_data_ptr_access_error_msg_();
    else
      storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(why) + ": its data is not allocated");
  }
}

}  // namespace

TensorMemory::TensorMemory(const std::string& name, const at::Tensor& tensor)
    : storage_(tensor.storage()), device_(tensor.device()) {
  if (!tensor.is_leaf())
    throw base::InvalidUsage(name +
                             " is computed from a tensor with gradients, which autograd would train; register "
                             "tensor.detach().clone() instead");
  if (tensor.layout() != at::kStrided || !tensor.is_contiguous() || tensor.storage_offset() != 0 ||
      storage_.nbytes() != static_cast<std::size_t>(tensor.numel()) * tensor.element_size())
    throw base::InvalidUsage(
        name + " is not contiguous, or a part of another tensor; register tensor.detach().clone() instead");
}

TensorMemory::~TensorMemory() {
  if (initial_) set(std::move(initial_));
}

bool TensorMemory::is_of(const at::Tensor& tensor) const {
  return tensor.storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl();
}

void TensorMemory::move_to(void* data, std::string_view why) {
  at::DataPtr before = set({data, device_});
  if (!std::exchange(moved_, true)) initial_ = std::move(before);
  data_ = data;
  explain(*storage_.unsafeGetStorageImpl(), data == nullptr ? why : "");
}

}  // namespace tessera::libtorch
