#include "tessera/nn/kernels/cuda/cudnn_attention.h"

#include <cmath>
#include <utility>
#include <vector>

#include "tessera/base/device_stream.h"
#include "tessera/base/error.h"

namespace tessera::nn::cuda {

/// A handle of the opened library.
struct CudnnAttention::Opened {
  explicit Opened(const Cudnn& functions) : api(functions) {
    require_version(api);
    check(api, api.cudnnCreate(&handle), "cudnnCreate");
  }
  ~Opened() {
    if (handle != nullptr) api.cudnnDestroy(handle);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  const Cudnn& api;
  cudnnHandle_t handle = nullptr;
};

/// A graph and its plan.
struct CudnnAttention::Prepared {
  Prepared(CudnnGraph made, CudnnPlan chosen, const CudnnAttentionProblem& problem)
      : graph(std::move(made)), plan(std::move(chosen)) {
    const auto rows = static_cast<std::size_t>(problem.batch * problem.heads * problem.positions);
    row_bytes = (rows * sizeof(float) + 255) / 256 * 256;
  }
  CudnnGraph graph;
  CudnnPlan plan;
  std::size_t row_bytes;  ///< of one f32 per row and head, in front of the library's workspace
};

CudnnAttention::CudnnAttention(const KernelResources& resources, AttentionLibrary library, OpenCudnn open)
    : runtime_(resources.runtime),
      memory_(resources.memory),
      logger_(resources.logger),
      library_(library),
      open_(open) {}

CudnnAttention::~CudnnAttention() = default;

void CudnnAttention::log(const std::string& line) const {
  if (logger_ != nullptr) logger_->write(base::LogLevel::info, "cuda: attention by " + line);
}

bool CudnnAttention::available() {
  if (tried_) return opened_ != nullptr;
  // The two generations for which the vendor documents the graph of this backward as the deterministic one.
  const int generation = runtime_.properties().generation;
  if (generation < 80 || generation >= 100) {
    if (library_ == AttentionLibrary::cudnn)
      throw base::Unsupported("attention: cuDNN is used on GPUs of generation 8 and 9, this one is " +
                              std::to_string(generation / 10));
    tried_ = true;
    return false;
  }
  // Loading the library's code may wait for all streams.
  runtime_.wait_for_host_events();
  try {
    opened_ = std::make_unique<Opened>(open_());
  } catch (const base::Error& error) {
    if (library_ == AttentionLibrary::cudnn) throw;
    log(std::string(kOwnAttention) + ": " + error.what());
  }
  tried_ = true;
  return opened_ != nullptr;
}

std::unique_ptr<CudnnAttention::Prepared> CudnnAttention::prepare(const CudnnAttentionProblem& problem) {
  runtime_.wait_for_host_events();
  std::string why = "no deterministic plan";
  try {
    CudnnGraph graph(opened_->api);
    add_attention(graph, problem);
    std::optional<CudnnPlan> plan = graph.plan({.handle = opened_->handle});
    if (plan && plan->workspace() <= kernels::kMaxAttentionWorkspace)
      return std::make_unique<Prepared>(std::move(graph), std::move(*plan), problem);
    if (plan) why = "a plan with a workspace of " + std::to_string(plan->workspace() >> 20) + " MiB";
  } catch (const base::BackendError& error) {  // the library rejects such a graph
    why = error.what();
  }
  why = "cuDNN has " + why + " for a " + (problem.backward ? "backward" : "forward") + " of " +
        std::to_string(problem.batch) + " x " + std::to_string(problem.positions) + " positions with " +
        std::to_string(problem.heads) + " heads of " + std::to_string(problem.dim);
  if (library_ == AttentionLibrary::cudnn) throw base::Unsupported("attention: " + why);
  log(std::string(kOwnAttention) + ": " + why);
  return nullptr;
}

CudnnAttention::Prepared* CudnnAttention::prepared(const CudnnAttentionProblem& problem) {
  auto at = prepared_.find(problem);
  if (at == prepared_.end()) at = prepared_.emplace(problem, prepare(problem)).first;
  if (name_ == kOwnAttention && at->second != nullptr) {
    name_ = "cuDNN " + version_text(opened_->api.cudnnGetVersion()) + " (engine " +
            std::to_string(at->second->plan.engine()) + ")";
    log(name_);
  }
  return at->second.get();
}

bool CudnnAttention::run(Stream& stream, const CudnnAttentionProblem& problem, const CudnnAttentionMemory& memory) {
  if (!available()) return false;
  Prepared* const plan = prepared(problem);
  if (plan == nullptr) return false;
  execute(stream, *plan, memory);
  return true;
}

void CudnnAttention::execute(Stream& stream, Prepared& prepared, const CudnnAttentionMemory& m) {
  const Cudnn& api = opened_->api;
  // Released when the call returns; later work on the compute stream reuses it. The caller has prepared the stream.
  const Buffer scratch = memory_.allocate(prepared.row_bytes + prepared.plan.workspace(), MemoryCategory::activation);
  auto* const rows = static_cast<std::byte*>(scratch.data());
  std::vector<std::int64_t> ids;
  std::vector<void*> data;
  const auto add = [&](AttentionTensor id, const void* pointer) {
    if (pointer == nullptr) return;
    ids.push_back(static_cast<std::int64_t>(id));
    data.push_back(const_cast<void*>(pointer));  // NOLINT: the library's type for inputs, too
  };
  add(AttentionTensor::q, m.q), add(AttentionTensor::k, m.k), add(AttentionTensor::v, m.v);
  add(AttentionTensor::out, m.out), add(AttentionTensor::log_sum_exp, m.log_sum_exp ? m.log_sum_exp : rows);
  add(AttentionTensor::dout, m.dout), add(AttentionTensor::dq, m.dq);
  add(AttentionTensor::dk, m.dk), add(AttentionTensor::dv, m.dv);
  if (m.dout != nullptr) add(AttentionTensor::row_sums, rows);
  for (const CudnnScalar& scalar : prepared.graph.scalars()) {
    ids.push_back(scalar.id);
    data.push_back(const_cast<float*>(&scalar.value));  // NOLINT: as above
  }
  CudnnDescriptor pack(api, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, std::span<const std::int64_t>(ids));
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, std::span<void* const>(data));
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, static_cast<void*>(rows + prepared.row_bytes));
  pack.finalize();
  void* const native = static_cast<DeviceStream&>(stream).native();
  check(api, api.cudnnSetStream(opened_->handle, static_cast<cudaStream_t>(native)), "cudnnSetStream");
  check(api, api.cudnnBackendExecute(opened_->handle, prepared.plan.descriptor().get(), pack.get()),
        "cudnnBackendExecute");
}

namespace {

constexpr std::size_t kVector = 8;  ///< elements of 16 bytes: heads, rows and tensors begin at multiples of it
constexpr std::size_t kMaxDim = 128;

template <class T>
bool aligned(const kernels::HeadsView<T>& view) {
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
         (view.batch_stride | view.position_stride | view.head_stride) % kVector == 0;
}

template <class T>
HeadsStrides strides(const kernels::HeadsView<T>& view) {
  const auto integer = [](std::size_t value) { return static_cast<std::int64_t>(value); };
  return {integer(view.batch_stride), integer(view.position_stride), integer(view.head_stride)};
}

template <class T>
class CudnnAttentionKernels final : public AttentionKernels<T> {
 public:
  explicit CudnnAttentionKernels(CudnnAttention& attention) : attention_(attention) {}

  bool supports(const kernels::AttentionShape& s) const override {
    // One position has no plan: the weights are 1.
    return s.causal && s.batch > 0 && s.positions > 1 && s.kv_heads > 0 && s.heads % s.kv_heads == 0 && s.dim > 0 &&
           s.dim % kVector == 0 && s.dim <= kMaxDim && s.scale >= 0 && attention_.available();
  }

  bool forward(Stream& stream, const kernels::AttentionForward<T>& a) override {
    // cuDNN draws other masks than this library, whose masks are the same on every device.
    if (a.dropout.probability > 0 || !supports(a.shape)) return false;
    if (!(aligned(a.q) && aligned(a.k) && aligned(a.v) && aligned(a.out))) return false;
    CudnnAttentionProblem problem = problem_of(a.shape, false);
    problem.q = strides(a.q), problem.k = strides(a.k), problem.v = strides(a.v), problem.out = strides(a.out);
    return attention_.run(
        stream, problem,
        {.q = a.q.data, .k = a.k.data, .v = a.v.data, .out = a.out.data, .log_sum_exp = a.log_sum_exp});
  }

  bool backward(Stream& stream, const kernels::AttentionBackward<T>& a) override {
    if (a.dropout.probability > 0 || a.accumulate_dq || a.accumulate_dk || a.accumulate_dv || !supports(a.shape))
      return false;
    if (!(aligned(a.q) && aligned(a.k) && aligned(a.v) && aligned(a.out) && aligned(a.dout) && aligned(a.dq) &&
          aligned(a.dk) && aligned(a.dv)))
      return false;
    CudnnAttentionProblem problem = problem_of(a.shape, true);
    problem.q = strides(a.q), problem.k = strides(a.k), problem.v = strides(a.v), problem.out = strides(a.out);
    problem.dout = strides(a.dout), problem.dq = strides(a.dq), problem.dk = strides(a.dk), problem.dv = strides(a.dv);
    return attention_.run(stream, problem,
                          {.q = a.q.data,
                           .k = a.k.data,
                           .v = a.v.data,
                           .out = a.out.data,
                           .log_sum_exp = a.log_sum_exp,
                           .dout = a.dout.data,
                           .dq = a.dq.data,
                           .dk = a.dk.data,
                           .dv = a.dv.data});
  }

 private:
  static CudnnAttentionProblem problem_of(const kernels::AttentionShape& s, bool backward) {
    const auto integer = [](std::size_t value) { return static_cast<std::int64_t>(value); };
    const double scale = s.scale != 0 ? s.scale : 1 / std::sqrt(static_cast<double>(s.dim));
    return {.backward = backward,
            .dtype = dtype_of<T>,
            .batch = integer(s.batch),
            .positions = integer(s.positions),
            .heads = integer(s.heads),
            .kv_heads = integer(s.kv_heads),
            .dim = integer(s.dim),
            .scale = static_cast<float>(scale)};
  }
  CudnnAttention& attention_;
};

class CudnnAttentionTable final : public AttentionTable {
 public:
  CudnnAttentionTable(const KernelResources& resources, AttentionLibrary library, OpenCudnn open)
      : attention_(resources, library, open), f16_(attention_), bf16_(attention_) {}
  AttentionKernels<f16>& f16_kernels() override { return f16_; }
  AttentionKernels<bf16>& bf16_kernels() override { return bf16_; }
  std::string name() const override { return attention_.name(); }

 private:
  CudnnAttention attention_;
  CudnnAttentionKernels<f16> f16_;
  CudnnAttentionKernels<bf16> bf16_;
};

}  // namespace

std::unique_ptr<AttentionTable> make_cudnn_attention(const KernelResources& resources, AttentionLibrary library,
                                                     OpenCudnn open) {
  return std::make_unique<CudnnAttentionTable>(resources, library, open);
}

std::unique_ptr<AttentionTable> make_attention(const KernelResources& resources, AttentionLibrary library) {
  if (library == AttentionLibrary::own) return nullptr;
  return make_cudnn_attention(resources, library, &cudnn);
}

std::string describe_attention() noexcept {
  try {
    if (attention_library_of_environment() == AttentionLibrary::own)
      return "attention by " + std::string(kOwnAttention) + ", as TESSERA_ATTENTION demands";
    const Cudnn& api = cudnn();
    require_version(api);
    return "attention by cuDNN " + version_text(api.cudnnGetVersion());
  } catch (const base::Error& error) {
    return "attention by " + std::string(kOwnAttention) + ": " + error.what();
  }
}

}  // namespace tessera::nn::cuda
