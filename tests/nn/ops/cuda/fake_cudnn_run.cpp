#include "tests/nn/ops/cuda/fake_cudnn_run.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>

#include "tessera/base/dtype.h"

namespace tessera::nn::test {
namespace {

using base::bf16;
using base::f16;
using Index = std::array<std::int64_t, 4>;

/// A tensor, or a view of another one's memory.
struct Tensor {
  Index extents{}, strides{};
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  void* memory = nullptr;  ///< of the caller; null: `own`
  std::shared_ptr<std::vector<double>> own;

  std::size_t offset(const Index& at) const {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < 4; ++i) sum += (extents[i] == 1 ? 0 : at[i]) * strides[i];
    return static_cast<std::size_t>(sum);
  }
  double read(const Index& at) const {
    const std::size_t i = offset(at);
    if (memory == nullptr) return own->at(i);
    if (type == CUDNN_DATA_HALF) return static_cast<double>(static_cast<float>(static_cast<const f16*>(memory)[i]));
    if (type == CUDNN_DATA_BFLOAT16)
      return static_cast<double>(static_cast<float>(static_cast<const bf16*>(memory)[i]));
    return static_cast<double>(static_cast<const float*>(memory)[i]);
  }
  void write(const Index& at, double value) const {
    const std::size_t i = offset(at);
    const auto rounded = static_cast<float>(value);
    if (memory == nullptr) {
      own->at(i) = type == CUDNN_DATA_HALF       ? static_cast<double>(static_cast<float>(f16(rounded)))
                   : type == CUDNN_DATA_BFLOAT16 ? static_cast<double>(static_cast<float>(bf16(rounded)))
                                                 : value;
    } else if (type == CUDNN_DATA_HALF) {
      static_cast<f16*>(memory)[i] = f16(rounded);
    } else if (type == CUDNN_DATA_BFLOAT16) {
      static_cast<bf16*>(memory)[i] = bf16(rounded);
    } else {
      static_cast<float*>(memory)[i] = rounded;
    }
  }
  template <class Function>
  void for_each(Function function) const {
    Index at{};
    for (at[0] = 0; at[0] < extents[0]; ++at[0])
      for (at[1] = 0; at[1] < extents[1]; ++at[1])
        for (at[2] = 0; at[2] < extents[2]; ++at[2])
          for (at[3] = 0; at[3] < extents[3]; ++at[3]) function(at);
  }
};

double pointwise(cudnnPointwiseMode_t mode, double x, double b, double t) {
  switch (mode) {
    case CUDNN_POINTWISE_ADD:
      return x + b;
    case CUDNN_POINTWISE_SUB:
      return x - b;
    case CUDNN_POINTWISE_MUL:
      return x * b;
    case CUDNN_POINTWISE_DIV:
      return x / b;
    case CUDNN_POINTWISE_EXP:
      return std::exp(x);
    case CUDNN_POINTWISE_LOG:
      return std::log(x);
    case CUDNN_POINTWISE_IDENTITY:
      return x;
    case CUDNN_POINTWISE_CMP_GE:
      return x >= b ? 1 : 0;
    case CUDNN_POINTWISE_BINARY_SELECT:
      return t != 0 ? x : b;
    default:
      throw std::logic_error("fake cuDNN: unknown function");
  }
}

class Run {
 public:
  explicit Run(const FakeDescriptor& pack) {
    const auto ids = pack.all<std::int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const auto data = pack.all<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    for (std::size_t i = 0; i < ids.size(); ++i) memory_[ids[i]] = data.at(i);
  }

  void operator()(const FakeDescriptor& operation) {
    switch (operation.type) {
      case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
        return matmul(operation);
      case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
        return apply(operation);
      case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
        return reduce(operation);
      case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
        return view(operation);
      default:
        throw std::logic_error("fake cuDNN: unknown operation");
    }
  }
  bool sums_in_memory = false;

 private:
  Tensor& tensor(const FakeDescriptor& operation, cudnnBackendAttributeName_t name) {
    const FakeDescriptor& from = operation.other(name);
    const std::int64_t id = from.integer(CUDNN_ATTR_TENSOR_UNIQUE_ID);
    const auto [at, is_new] = tensors_.try_emplace(id);
    Tensor& made = at->second;
    if (!is_new) return made;
    const auto extents = from.all<std::int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS),
               strides = from.all<std::int64_t>(CUDNN_ATTR_TENSOR_STRIDES);
    std::copy_n(extents.begin(), 4, made.extents.begin());
    std::copy_n(strides.begin(), 4, made.strides.begin());
    made.type = from.value<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE);
    if (!from.flag(CUDNN_ATTR_TENSOR_IS_VIRTUAL)) {
      made.memory = memory_.at(id);
      if (reinterpret_cast<std::uintptr_t>(made.memory) % 16 != 0 && !from.flag(CUDNN_ATTR_TENSOR_IS_BY_VALUE))
        throw std::logic_error("fake cuDNN: tensor " + std::to_string(id) + " is not aligned to 16 bytes");
    } else {
      std::int64_t last = 0;
      for (std::size_t i = 0; i < 4; ++i) last += (made.extents[i] - 1) * made.strides[i];
      made.own = std::make_shared<std::vector<double>>(static_cast<std::size_t>(last) + 1, NAN);
    }
    return made;
  }

  void matmul(const FakeDescriptor& operation) {
    const Tensor a = tensor(operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC),
                 b = tensor(operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC),
                 c = tensor(operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC);
    if (a.extents[3] != b.extents[2] || a.extents[2] != c.extents[2] || b.extents[3] != c.extents[3] ||
        a.extents[1] != c.extents[1] || c.extents[1] % b.extents[1] != 0)
      throw std::logic_error("fake cuDNN: extents of a product don't match");
    sums_in_memory |= c.memory != nullptr && c.type == CUDNN_DATA_FLOAT;
    c.for_each([&](const Index& at) {
      double sum = 0;
      for (std::int64_t k = 0; k < a.extents[3]; ++k)
        sum += a.read({at[0], at[1], at[2], k}) * b.read({at[0], at[1] / (c.extents[1] / b.extents[1]), k, at[3]});
      c.write(at, sum);
    });
  }

  void apply(const FakeDescriptor& operation) {
    const FakeDescriptor& function = operation.other(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    const auto mode = function.value<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE);
    const Tensor x = tensor(operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC),
                 y = tensor(operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
    const auto operand = [&](cudnnBackendAttributeName_t name) {
      return operation.has(name) ? tensor(operation, name) : x;
    };
    const Tensor b = operand(CUDNN_ATTR_OPERATION_POINTWISE_BDESC), t = operand(CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
    if (mode == CUDNN_POINTWISE_GEN_INDEX) {
      const auto axis = static_cast<std::size_t>(function.integer(CUDNN_ATTR_POINTWISE_AXIS));
      return y.for_each([&](const Index& at) { y.write(at, static_cast<double>(at[axis])); });
    }
    y.for_each([&](const Index& at) { y.write(at, pointwise(mode, x.read(at), b.read(at), t.read(at))); });
  }

  void reduce(const FakeDescriptor& operation) {
    const bool is_max = operation.other(CUDNN_ATTR_OPERATION_REDUCTION_DESC)
                            .value<cudnnReduceTensorOp_t>(CUDNN_ATTR_REDUCTION_OPERATOR) == CUDNN_REDUCE_TENSOR_MAX;
    const Tensor x = tensor(operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC),
                 y = tensor(operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
    std::map<Index, double> results;
    x.for_each([&](const Index& at) {
      Index to{};
      for (std::size_t i = 0; i < 4; ++i) to[i] = at[i] / (x.extents[i] / y.extents[i]);
      const auto [found, is_new] = results.try_emplace(to, x.read(at));
      if (!is_new) found->second = is_max ? std::max(found->second, x.read(at)) : found->second + x.read(at);
    });
    for (const auto& [at, value] : results) y.write(at, value);
  }

  /// The result has the memory of the operand, whose layout is another.
  void view(const FakeDescriptor& operation) {
    const Tensor x = tensor(operation, CUDNN_ATTR_OPERATION_RESHAPE_XDESC);
    Tensor& y = tensor(operation, CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
    if (x.memory != nullptr) {
      y.memory = x.memory;
      return;
    }
    const std::vector<double> from = *x.own;
    if (y.own->size() != from.size()) throw std::logic_error("fake cuDNN: a view of another size");
    Tensor flat = y;  // writes round to y's type
    flat.extents = {1, 1, 1, static_cast<std::int64_t>(from.size())};
    flat.strides = {0, 0, 0, 1};
    flat.for_each([&](const Index& at) { flat.write(at, from[static_cast<std::size_t>(at[3])]); });
  }

  std::map<std::int64_t, void*> memory_;
  std::map<std::int64_t, Tensor> tensors_;
};

}  // namespace

bool run_fake_graph(const FakeDescriptor& graph, const FakeDescriptor& pack) {
  Run run(pack);
  for (const cudnnBackendDescriptor_t operation : graph.all<cudnnBackendDescriptor_t>(CUDNN_ATTR_OPERATIONGRAPH_OPS))
    run(*static_cast<const FakeDescriptor*>(operation));
  return run.sums_in_memory;
}

}  // namespace tessera::nn::test
