#include "tessera/nn/kernels/cuda/cudnn_graph.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/nn/kernels/vendor_library.h"

namespace tessera::nn::cuda {
namespace {

constexpr std::int64_t kAlignment = 16;  // bytes: what the tensor memory accelerator and wide loads need
constexpr std::int64_t kMaxConfigs = 64;

}  // namespace

CudnnDescriptor::CudnnDescriptor(const Cudnn& api, cudnnBackendDescriptorType_t type) : api_(&api) {
  check(api, api.cudnnBackendCreateDescriptor(type, &descriptor_), "cudnnBackendCreateDescriptor");
}
CudnnDescriptor::~CudnnDescriptor() {
  if (descriptor_ != nullptr) api_->cudnnBackendDestroyDescriptor(descriptor_);
}
CudnnDescriptor::CudnnDescriptor(CudnnDescriptor&& other) noexcept
    : api_(other.api_), descriptor_(std::exchange(other.descriptor_, nullptr)) {}

void CudnnDescriptor::finalize() { check(*api_, api_->cudnnBackendFinalize(descriptor_), "cudnnBackendFinalize"); }

void CudnnDescriptor::set_raw(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::size_t count,
                              const void* values) {
  check(*api_, api_->cudnnBackendSetAttribute(descriptor_, name, type, static_cast<std::int64_t>(count), values),
        "cudnnBackendSetAttribute");
}

std::int64_t CudnnDescriptor::read(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                   std::int64_t count, void* values) const {
  std::int64_t found = 0;
  check(*api_, api_->cudnnBackendGetAttribute(descriptor_, name, type, count, &found, values),
        "cudnnBackendGetAttribute");
  return found;
}

CudnnLayout CudnnLayout::packed(std::int64_t batch, std::int64_t heads, std::int64_t rows, std::int64_t columns) {
  return {{batch, heads, rows, columns}, {heads * rows * columns, rows * columns, columns, 1}};
}

CudnnLayout CudnnLayout::transposed() const {
  CudnnLayout other = *this;
  std::swap(other.extents[2], other.extents[3]);
  std::swap(other.strides[2], other.strides[3]);
  return other;
}

CudnnTensor CudnnGraph::add_tensor(cudnnDataType_t type, const CudnnLayout& layout, std::int64_t id, bool is_virtual) {
  CudnnDescriptor& made = add(tensors_, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  made.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, id);
  made.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
  made.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, std::span<const std::int64_t>(layout.extents));
  made.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, std::span<const std::int64_t>(layout.strides));
  made.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, kAlignment);
  made.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, is_virtual);
  return {id, layout, &made};
}

CudnnTensor CudnnGraph::tensor(std::int64_t id, cudnnDataType_t type, const CudnnLayout& layout) {
  const CudnnTensor made = add_tensor(type, layout, id, false);
  tensors_.back()->finalize();
  return made;
}

CudnnTensor CudnnGraph::intermediate(cudnnDataType_t type, const CudnnLayout& layout) {
  const CudnnTensor made = add_tensor(type, layout, next_id_++, true);
  tensors_.back()->finalize();
  return made;
}

CudnnTensor CudnnGraph::scalar(float value) {
  const CudnnTensor made = add_tensor(CUDNN_DATA_FLOAT, CudnnLayout::packed(1, 1, 1, 1), next_id_++, false);
  tensors_.back()->set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, true);
  tensors_.back()->finalize();
  scalars_.push_back({made.id, value});
  return made;
}

CudnnDescriptor& CudnnGraph::add(Descriptors& to, cudnnBackendDescriptorType_t type) {
  to.push_back(std::make_unique<CudnnDescriptor>(api_, type));
  return *to.back();
}

void CudnnGraph::matmul(const CudnnTensor& a, const CudnnTensor& b, const CudnnTensor& c) {
  CudnnDescriptor& product = add(operators_, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  product.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  product.finalize();
  CudnnDescriptor& operation = add(operations_, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, *a.descriptor);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, *b.descriptor);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, *c.descriptor);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, product);
  operation.finalize();
}

void CudnnGraph::pointwise(cudnnPointwiseMode_t mode, const CudnnTensor& x, const CudnnTensor& y,
                           const CudnnOperands& more) {
  CudnnDescriptor& function = add(operators_, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  function.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
  const cudnnDataType_t precision = mode == CUDNN_POINTWISE_CMP_GE ? CUDNN_DATA_BOOLEAN : CUDNN_DATA_FLOAT;
  function.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, precision);
  if (more.axis) function.set(CUDNN_ATTR_POINTWISE_AXIS, *more.axis);
  function.finalize();
  CudnnDescriptor& operation = add(operations_, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, function);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, *x.descriptor);
  if (more.b != nullptr) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *more.b->descriptor);
  if (more.t != nullptr) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, *more.t->descriptor);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, *y.descriptor);
  operation.finalize();
}

void CudnnGraph::reduce(cudnnReduceTensorOp_t mode, const CudnnTensor& x, const CudnnTensor& y) {
  CudnnDescriptor& reduction = add(operators_, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  reduction.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, mode);
  reduction.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  reduction.finalize();
  CudnnDescriptor& operation = add(operations_, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, reduction);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, *x.descriptor);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, *y.descriptor);
  operation.finalize();
}

void CudnnGraph::view(const CudnnTensor& x, const CudnnTensor& y) {
  CudnnDescriptor& operation = add(operations_, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, *x.descriptor);
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, *y.descriptor);
  operation.finalize();
}

std::optional<CudnnPlan> CudnnGraph::plan_of(const CudnnTarget& target, CudnnDescriptor config) {
  CudnnDescriptor engine(api_, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t into = engine.get();
  config.read(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &into);
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes{};
  const std::int64_t count =
      engine.read(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, std::ssize(notes), notes.data());
  const auto end = notes.begin() + std::min<std::int64_t>(count, std::ssize(notes));
  if (std::find(notes.begin(), end, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) != end) return {};
  std::int64_t index = 0, workspace = 0;
  engine.read(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &index);
  CudnnDescriptor plan(api_, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
  if (target.handle != nullptr) plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, target.handle);
  if (target.device != nullptr) plan.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, *target.device);
  if (api_.cudnnBackendFinalize(plan.get()) != CUDNN_STATUS_SUCCESS) return {};  // this engine can't; the next may
  plan.read(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &workspace);
  return CudnnPlan(std::move(config), std::move(plan), index, workspace);
}

std::optional<CudnnPlan> CudnnGraph::plan(const CudnnTarget& target) {
  std::vector<cudnnBackendDescriptor_t> operations;
  for (const auto& operation : operations_) operations.push_back(operation->get());
  graph_.emplace(api_, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph_->set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
              std::span<const cudnnBackendDescriptor_t>(operations));
  if (target.handle != nullptr) graph_->set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, target.handle);
  graph_->finalize();

  CudnnDescriptor heuristics(api_, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, *graph_);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
  if (target.device != nullptr) heuristics.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *target.device);
  heuristics.finalize();
  const std::int64_t count =
      std::min(kMaxConfigs, heuristics.read(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, nullptr));
  std::vector<CudnnDescriptor> configs;
  std::vector<cudnnBackendDescriptor_t> into;
  for (std::int64_t i = 0; i < count; ++i) {
    configs.emplace_back(api_, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    into.push_back(configs.back().get());
  }
  const std::int64_t found =
      count == 0 ? 0
                 : heuristics.read(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count, into.data());
  for (std::int64_t i = 0; i < std::min(count, found); ++i)
    if (std::optional<CudnnPlan> made = plan_of(target, std::move(configs[static_cast<std::size_t>(i)]))) return made;
  return {};
}

const Cudnn& cudnn() {
  static const Cudnn loaded = [] {  // once per process, as by dlopen() itself; a failure is tried again
    Cudnn api;
    kernels::VendorLibrary library("libcudnn.so." + std::to_string(CUDNN_MAJOR), "cuDNN");
#define TESSERA_FIND(function) library.find(#function, api.function);
    TESSERA_CUDNN_FUNCTIONS(TESSERA_FIND)
#undef TESSERA_FIND
    if (!library.problem().empty()) throw base::Unsupported("cuda: no cuDNN: " + library.problem());
    return api;
  }();
  return loaded;
}

void require_version(const Cudnn& api) {
  const std::size_t version = api.cudnnGetVersion();
  if (version < kCudnnMinVersion || version / 10000 != CUDNN_MAJOR)
    throw base::Unsupported("cuda: cuDNN is version " + version_text(version) + ", needs " +
                            version_text(kCudnnMinVersion) + " or newer of its generation");
}

std::string version_text(std::size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void check(const Cudnn& api, cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::array<char, 512> reason{};
  api.cudnnGetLastErrorString(reason.data(), reason.size() - 1);
  const std::string_view line = std::string_view(reason.data()).substr(0, std::string_view(reason.data()).find('\n'));
  throw base::BackendError(std::string("cuda: ") + what + ": " + api.cudnnGetErrorString(status) +
                           (line.empty() ? "" : " (" + std::string(line) + ")"));
}

}  // namespace tessera::nn::cuda
