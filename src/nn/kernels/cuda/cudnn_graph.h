// Graphs of cuDNN operations and their execution plans.
#pragma once

#include <cudnn_graph.h>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tessera::nn::cuda {

// The functions of cuDNN's backend interface as a table filled when the library is loaded at run time, so the program
// also starts on systems without it.

#define TESSERA_CUDNN_FUNCTIONS(F) \
  F(cudnnBackendCreateDescriptor)  \
  F(cudnnBackendDestroyDescriptor) \
  F(cudnnBackendExecute)           \
  F(cudnnBackendFinalize)          \
  F(cudnnBackendGetAttribute)      \
  F(cudnnBackendSetAttribute)      \
  F(cudnnCreate)                   \
  F(cudnnDestroy)                  \
  F(cudnnGetErrorString)           \
  F(cudnnGetLastErrorString)       \
  F(cudnnGetVersion)               \
  F(cudnnSetStream)

struct Cudnn {
#define TESSERA_MEMBER(name) decltype(&::name) name = nullptr;  // NOLINT(bugprone-macro-parentheses): declares it
  TESSERA_CUDNN_FUNCTIONS(TESSERA_MEMBER)
#undef TESSERA_MEMBER
};

/// The oldest version whose attention is used: earlier ones need a padding mask for sequences that are not a multiple
/// of 128 long, and lack a deterministic backward on newer GPUs.
inline constexpr std::size_t kCudnnMinVersion = 91800;

/// Loads the library at the first call and never unloads it. Throws Unsupported with the reason.
const Cudnn& cudnn();

/// Throws Unsupported if the library is too old.
void require_version(const Cudnn& api);

/// As the vendor writes it: "9.26.0".
std::string version_text(std::size_t version);

/// Throws BackendError "cuda: WHAT: the vendor's text (the vendor's reason)".
void check(const Cudnn& api, cudnnStatus_t status, const char* what);

/// An object of the library.
class CudnnDescriptor {
 public:
  CudnnDescriptor(const Cudnn& api, cudnnBackendDescriptorType_t type);
  ~CudnnDescriptor();
  CudnnDescriptor(CudnnDescriptor&& other) noexcept;
  CudnnDescriptor& operator=(CudnnDescriptor&& other) = delete;

  cudnnBackendDescriptor_t get() const { return descriptor_; }
  void finalize();

  template <class Value>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::span<const Value> values) {
    set_raw(name, type, values.size(), values.data());
  }
  template <class Value>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const Value& value) {
    set_raw(name, type, 1, &value);
  }
  void set(cudnnBackendAttributeName_t name, const CudnnDescriptor& other) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, other.descriptor_);
  }
  void set(cudnnBackendAttributeName_t name, std::int64_t value) { set(name, CUDNN_TYPE_INT64, value); }
  void set(cudnnBackendAttributeName_t name, bool value) { set(name, CUDNN_TYPE_BOOLEAN, value); }

  /// Reads at most `count` values; returns how many there are.
  std::int64_t read(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
                    void* values) const;

 private:
  void set_raw(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::size_t count,
               const void* values);
  const Cudnn* api_;
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

/// What plans are made for: a handle, or a device that is only described (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR).
struct CudnnTarget {
  cudnnHandle_t handle = nullptr;
  const CudnnDescriptor* device = nullptr;
};

/// Extents and strides in elements: batch, head, row, column.
struct CudnnLayout {
  std::array<std::int64_t, 4> extents{}, strides{};
  /// Packed rows of a [batch, head, row, column] tensor.
  static CudnnLayout packed(std::int64_t batch, std::int64_t heads, std::int64_t rows, std::int64_t columns);
  /// The same memory with rows and columns exchanged.
  CudnnLayout transposed() const;
};

/// A tensor of a graph.
struct CudnnTensor {
  std::int64_t id = 0;
  CudnnLayout layout;
  const CudnnDescriptor* descriptor = nullptr;  ///< owned by the graph
};

/// Further operands of a pointwise operation.
struct CudnnOperands {
  const CudnnTensor* b = nullptr;
  const CudnnTensor* t = nullptr;
  std::optional<std::int64_t> axis = {};
};

/// A number that the library reads when a plan runs.
struct CudnnScalar {
  std::int64_t id = 0;
  float value = 0;
};

/// An engine's way to compute a graph.
class CudnnPlan {
 public:
  CudnnPlan(CudnnDescriptor config, CudnnDescriptor plan, std::int64_t engine, std::int64_t workspace)
      : config_(std::move(config)), plan_(std::move(plan)), engine_(engine), workspace_(workspace) {}
  const CudnnDescriptor& descriptor() const { return plan_; }
  std::int64_t engine() const { return engine_; }
  std::size_t workspace() const { return static_cast<std::size_t>(workspace_); }  ///< in bytes

 private:
  CudnnDescriptor config_, plan_;
  std::int64_t engine_, workspace_;
};

/// Operations in the order in which they are added. Computations are f32.
class CudnnGraph {
 public:
  explicit CudnnGraph(const Cudnn& api) : api_(api) {}

  /// Memory of the caller.
  CudnnTensor tensor(std::int64_t id, cudnnDataType_t type, const CudnnLayout& layout);
  /// A result that only the graph's operations see.
  CudnnTensor intermediate(cudnnDataType_t type, const CudnnLayout& layout);
  /// A number of the caller.
  CudnnTensor scalar(float value);

  /// c = a b for each head; heads of `b` are shared if there are fewer.
  void matmul(const CudnnTensor& a, const CudnnTensor& b, const CudnnTensor& c);
  /// y = mode(x, b); select: y = t ? x : b; index: y = that of each element of x along `axis`.
  void pointwise(cudnnPointwiseMode_t mode, const CudnnTensor& x, const CudnnTensor& y, const CudnnOperands& more = {});
  /// Over the axes that y has one element of, or groups of heads.
  void reduce(cudnnReduceTensorOp_t mode, const CudnnTensor& x, const CudnnTensor& y);
  /// y is x's memory in another layout.
  void view(const CudnnTensor& x, const CudnnTensor& y);

  /// The first plan that the library's heuristics propose among those that always compute the same bits; empty if there
  /// is none. Throws if the library rejects the graph.
  std::optional<CudnnPlan> plan(const CudnnTarget& target);

  const std::vector<CudnnScalar>& scalars() const { return scalars_; }

 private:
  CudnnTensor add_tensor(cudnnDataType_t type, const CudnnLayout& layout, std::int64_t id, bool is_virtual);
  using Descriptors = std::vector<std::unique_ptr<CudnnDescriptor>>;
  CudnnDescriptor& add(Descriptors& to, cudnnBackendDescriptorType_t type);
  std::optional<CudnnPlan> plan_of(const CudnnTarget& target, CudnnDescriptor config);

  const Cudnn& api_;
  Descriptors tensors_, operators_, operations_;
  std::vector<CudnnScalar> scalars_;
  std::optional<CudnnDescriptor> graph_;
  std::int64_t next_id_ = 1000;  // above the caller's
};

}  // namespace tessera::nn::cuda
