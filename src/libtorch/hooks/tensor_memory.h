// The memory of one tensor of a libtorch model.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace tessera::libtorch {

/// An engine moves it from place to place: the tensor's, that of its views, and of what autograd has saved. Keeps the
/// values from the tensor's construction until they are released.
class TensorMemory {
 public:
  /// Throws InvalidUsage by `name` for one that is not contiguous, no leaf of autograd, or does not fill its storage. A
  /// view that does, such as zeros(4).view({2, 2}), moves with the tensor that it is a view of.
  TensorMemory(const std::string& name, const at::Tensor& tensor);
  /// Gives the values from the construction back, if they are still here: the engine has not been made.
  ~TensorMemory();
  TensorMemory(const TensorMemory&) = delete;
  TensorMemory& operator=(const TensorMemory&) = delete;

  const void* identity() const { return storage_.unsafeGetStorageImpl(); }
  /// Whether the tensor still has this memory: set_data() and Module::to() give it another.
  bool is_of(const at::Tensor& tensor) const;
  void* data() const { return data_; }
  const void* initial() const { return initial_.get(); }
  void release_initial() { initial_.clear(); }
  /// Null: the tensor has no memory, because of `why`.
  void move_to(void* data, std::string_view why);

 private:
  at::DataPtr set(at::DataPtr data) { return storage_.unsafeGetStorageImpl()->set_data_ptr(std::move(data)); }

  at::Storage storage_;
  const at::Device device_;
  at::DataPtr initial_;
  bool moved_ = false;
  void* data_ = nullptr;
};

}  // namespace tessera::libtorch
