#include "tessera/nn/kernels/cuda/matmul.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "tessera/base/device_stream.h"

namespace tessera::nn::cuda {
namespace {

constexpr std::size_t kWorkspace = std::size_t{32} << 20;  // recommended by the vendor for this generation
constexpr double kFaster = 0.97;  // an algorithm must take at most this part of the first choice's time

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return CUDA_R_64F;
    case DType::f16:
      return CUDA_R_16F;
    case DType::bf16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_32F;
  }
}

cudaDataType_t type_of(Fp8Format format) { return format == Fp8Format::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }

/// Sums are f32 (f64 for f64). No TF32, so that f32 products agree with the host's.
cublasComputeType_t compute_of(DType dtype) { return dtype == DType::f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F; }

/// The library's bias: read, or written with the sums of an operand.
const void* vector_of(const MatmulArgs& p) {
  if (p.a_sums != nullptr) return p.a_sums;
  return p.b_sums != nullptr ? p.b_sums : p.bias;
}
/// The operands are exchanged (see below), so the library's A is B.
cublasLtEpilogue_t epilogue_of(const MatmulArgs& p) {
  if (p.a_sums != nullptr) return CUBLASLT_EPILOGUE_BGRADB;
  if (p.b_sums != nullptr) return CUBLASLT_EPILOGUE_BGRADA;
  if (p.bias == nullptr) return CUBLASLT_EPILOGUE_DEFAULT;
  return p.before_gelu != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_BIAS;
}

}  // namespace

// cuBLASLt's matrices are column-major, and a row-major matrix is the transpose of its column-major view. C = A B is
// therefore computed as C^T = B^T A^T, with A and B, and m and n, exchanged.
struct CublasLtMatmul::AlgorithmChoice {
  explicit AlgorithmChoice(const CublasLt& functions) : api(functions) {}
  ~AlgorithmChoice() {
    for (cublasLtMatrixLayout_t layout : {a, b, c})
      if (layout != nullptr) api.cublasLtMatrixLayoutDestroy(layout);
    if (operation != nullptr) api.cublasLtMatmulDescDestroy(operation);
  }
  AlgorithmChoice(const AlgorithmChoice&) = delete;
  AlgorithmChoice& operator=(const AlgorithmChoice&) = delete;

  void describe(const MatmulArgs& p) {
    const cudaDataType_t type = type_of(p.dtype);
    const cudaDataType_t scale = p.dtype == DType::f64 ? CUDA_R_64F : CUDA_R_32F;
    check(api, api.cublasLtMatmulDescCreate(&operation, compute_of(p.dtype), scale), "cublasLtMatmulDescCreate");
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (vector_of(p) != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
    }
    if (p.before_gelu != nullptr) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<std::int64_t>(p.n));
    if (p.fp8 != nullptr) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<std::int8_t>(p.fp8->fast ? 1 : 0));
    // The choice depends on the alignment of these pointers, and on whether operands have factors.
    point(p);
    make(a, p.fp8 != nullptr ? type_of(p.fp8->b) : type,
         {p.b.transposed ? p.k : p.n, p.b.transposed ? p.n : p.k, p.b.stride});
    make(b, p.fp8 != nullptr ? type_of(p.fp8->a) : type,
         {p.a.transposed ? p.m : p.k, p.a.transposed ? p.k : p.m, p.a.stride});
    make(c, type, {p.n, p.m, p.c_stride});
    if (size_of(p.dtype) == 2) schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  }

  /// Sets the pointers of the epilogue and of factors, which differ between calls.
  void point(const MatmulArgs& p) {
    if (p.fp8 != nullptr) {
      set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.fp8->b_descale);
      set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.fp8->a_descale);
    }
    if (const void* vector = vector_of(p)) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector);
    if (p.before_gelu != nullptr) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.before_gelu);
  }

  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    check(api, api.cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)),
          "cublasLtMatmulDescSetAttribute");
  }

  /// Finds up to `most` algorithms for pointers that are multiples of `alignment` (they must not assume more), and
  /// selects the one that the library prefers. `found` stays false if there is none.
  void choose(cublasLtHandle_t handle, std::uint32_t alignment, int most) {
    cublasLtMatmulPreference_t preference = nullptr;
    check(api, api.cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const std::size_t workspace = kWorkspace;
    int count = 0;
    candidates.resize(MatmulChoices::kTried);
    cublasStatus_t status = api.cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace));
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      if (status == CUBLAS_STATUS_SUCCESS)
        status = api.cublasLtMatmulPreferenceSetAttribute(preference, attribute, &alignment, sizeof(alignment));
    if (status == CUBLAS_STATUS_SUCCESS)
      status = api.cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                        &schemes, sizeof(schemes));
    if (status == CUBLAS_STATUS_SUCCESS)
      status = api.cublasLtMatmulAlgoGetHeuristic(handle, operation, a, b, c, c, preference, MatmulChoices::kTried,
                                                  candidates.data(), &count);
    api.cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(api, status, "cublasLtMatmulAlgoGetHeuristic");
    candidates.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<std::size_t>(count) : 0);
    std::erase_if(candidates, [](const auto& one) { return one.state != CUBLAS_STATUS_SUCCESS; });
    if (candidates.size() > static_cast<std::size_t>(most)) candidates.resize(static_cast<std::size_t>(most));
    found = !candidates.empty();
    if (found) algorithm = candidates.front();
  }

  /// Selects an algorithm of a file. Throws InvalidUsage if the library can't run it.
  void choose(cublasLtHandle_t handle, const MatmulChoices::Algorithm& known) {
    std::memcpy(&algorithm.algo, known.data(), sizeof(known));
    cublasLtMatmulHeuristicResult_t checked{};
    const cublasStatus_t status = api.cublasLtMatmulAlgoCheck(handle, operation, a, b, c, c, &algorithm.algo, &checked);
    if (status != CUBLAS_STATUS_SUCCESS || checked.workspaceSize > kWorkspace)
      throw InvalidUsage("TESSERA_MATMUL: cuBLASLt can't run an algorithm of the file; write it anew");
    found = true;
    candidates = {algorithm};
  }

  const CublasLt& api;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  MatmulChoices::Key key{};
  std::vector<cublasLtMatmulHeuristicResult_t> candidates;  ///< more than one: to be tried
  cublasLtMatmulHeuristicResult_t algorithm{};
  bool found = false;
  /// How parts of a sum over k may be added: in f32 too, where the result has fewer bits.
  std::uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK;

 private:
  /// A column-major matrix. Its columns, our rows, are `stride` elements apart: cuBLASLt's leading dimension.
  struct Extents {
    std::size_t rows, columns, stride;
  };
  void make(cublasLtMatrixLayout_t& layout, cudaDataType_t type, const Extents& of) {
    const std::size_t stride = of.stride != 0 ? of.stride : of.rows;
    check(api, api.cublasLtMatrixLayoutCreate(&layout, type, of.rows, of.columns, static_cast<std::int64_t>(stride)),
          "cublasLtMatrixLayoutCreate");
  }
};

CublasLtMatmul::CublasLtMatmul(const KernelResources& resources, const CublasLt& api, std::string_view setting)
    : api_(api),
      runtime_(resources.runtime),
      memory_(resources.memory),
      logger_(resources.logger),
      workspace_(resources.memory.allocate(kWorkspace, MemoryCategory::other)),
      choices_(setting, resources.runtime.properties().name, api.cublasLtGetVersion()) {
  check(api_, api_.cublasLtCreate(&handle_), "cublasLtCreate");
}

CublasLtMatmul::~CublasLtMatmul() {
  chosen_.clear();
  api_.cublasLtDestroy(handle_);
}

CublasLtMatmul::AlgorithmChoice& CublasLtMatmul::chosen(const MatmulArgs& p) {
  const auto e5m2 = [](Fp8Format format) { return format == Fp8Format::e5m2 ? 1U : 0U; };
  const std::size_t types = p.fp8 == nullptr ? 0 : 8U | e5m2(p.fp8->a) | e5m2(p.fp8->b) << 1U | (p.fp8->fast ? 4U : 0U);
  const std::size_t flags = (p.a.transposed ? 1U : 0U) | (p.b.transposed ? 2U : 0U) | types << 2U |
                            static_cast<std::size_t>(epilogue_of(p)) << 6U;
  // Parameters are views of flat buffers that begin at any multiple of 8 elements, so the algorithm depends on the
  // alignment.
  std::uintptr_t bits = 256;
  for (const void* pointer :
       {p.a.data, p.b.data, static_cast<const void*>(p.c), vector_of(p), static_cast<const void*>(p.before_gelu)})
    bits |= reinterpret_cast<std::uintptr_t>(pointer);
  const auto alignment = static_cast<std::uint32_t>(bits & (~bits + 1));  // the lowest set bit
  const Key key = {p.m,      p.n, p.k, p.a.stride, p.b.stride, p.c_stride, flags, static_cast<std::size_t>(p.dtype),
                   alignment};
  std::unique_ptr<AlgorithmChoice>& entry = chosen_[key];
  if (entry == nullptr) {
    // The first launch of an algorithm loads its code, for which CUDA may wait for all streams.
    runtime_.wait_for_host_events();
    auto made = std::make_unique<AlgorithmChoice>(api_);
    made->key = key;
    made->describe(p);
    if (const MatmulChoices::Choice* known = choices_.find(key)) {
      made->choose(handle_, known->algorithm);
    } else {
      made->choose(handle_, alignment, choices_.tries() ? MatmulChoices::kTried : 1);
    }
    entry = std::move(made);
  }
  return *entry;
}

bool CublasLtMatmul::can(const MatmulArgs& p) {
  // For the matrix before GELU, the library requires rows of a multiple of 8 elements that are aligned to 16 bytes. f32
  // and f64 use this project's kernel, whose formula gives the host's bits.
  const bool fits_gelu = p.before_gelu == nullptr || (size_of(p.dtype) == 2 && p.n % 8 == 0 &&
                                                      reinterpret_cast<std::uintptr_t>(p.before_gelu) % 16 == 0);
  const bool has_epilogues = p.dtype != DType::f64;  // the library's are for f32 and half precision
  if (!fits_gelu || !has_epilogues || vector_of(p) == nullptr || p.m == 0 || p.n == 0 || p.k == 0) return false;
  const bool found = chosen(p).found;
  if (!found) log_lacking(p);
  return found;
}

void CublasLtMatmul::log_lacking(const MatmulArgs& p) {
  if (std::exchange(lacked_epilogue_, true) || logger_ == nullptr) return;
  const std::string with = p.bias == nullptr          ? "the sums of an operand"
                           : p.before_gelu != nullptr ? "a bias and GELU"
                                                      : "a bias";
  logger_->write(base::LogLevel::info, "cuda: cuBLASLt has no product of " + std::string(name_of(p.dtype)) + " with " +
                                           with + " for " + std::to_string(p.m) + " x " + std::to_string(p.n) + " x " +
                                           std::to_string(p.k) + "; this library's kernels compute it");
}

void CublasLtMatmul::run(Stream& stream, const MatmulArgs& p) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {  // an empty sum; can() allows no bias
    const std::size_t stride = p.c_stride != 0 ? p.c_stride : p.n;
    if (!p.accumulate) runtime_.fill(stream, p.c, 0, ((p.m - 1) * stride + p.n) * size_of(p.dtype));
    return;
  }
  AlgorithmChoice& chosen = this->chosen(p);
  if (!chosen.found) throw Unsupported("cuda: cuBLASLt has no algorithm for this product");
  chosen.point(p);
  if (chosen.candidates.size() > 1) try_all(stream, p, chosen);
  launch(stream, p, chosen);
}

/// Selects the fastest candidate and keeps it in the file. C is left as it was.
void CublasLtMatmul::try_all(Stream& stream, const MatmulArgs& p, AlgorithmChoice& choice) {
  const std::size_t bytes = ((p.m - 1) * (p.c_stride != 0 ? p.c_stride : p.n) + p.n) * size_of(p.dtype);
  Buffer before;
  if (p.accumulate) {
    before = memory_.allocate(bytes, MemoryCategory::other);
    runtime_.copy(stream, base::CopyDirection::device_to_device, before.data(), p.c, bytes);
  }
  const auto candidates = std::exchange(choice.candidates, {});
  MatmulChoices::Choice best;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const auto previous = std::exchange(choice.algorithm, candidates[i]);
    const double us = time_of(stream, p, choice);
    if (i == 0) best.us = best.first_us = us;
    // Noise must not replace the first choice.
    if (i == 0 || us < std::min(best.us, kFaster * best.first_us))
      best.us = us;
    else
      choice.algorithm = previous;
  }
  if (!std::isfinite(best.us)) throw base::BackendError("cuda: cuBLASLt runs none of its algorithms for a product");
  std::memcpy(best.algorithm.data(), &choice.algorithm.algo, sizeof(best.algorithm));
  if (p.accumulate) {
    runtime_.copy(stream, base::CopyDirection::device_to_device, p.c, before.data(), bytes);
    stream.synchronize();
  }
  choices_.add(choice.key, best);
}

/// Microseconds, the least of several series of launches. An algorithm that cuBLASLt refuses to launch takes forever;
/// an error of the device ends the trial.
double CublasLtMatmul::time_of(Stream& stream, const MatmulArgs& p, const AlgorithmChoice& choice) {
  constexpr int kSeries = 3, kLaunches = 8;
  double least = std::numeric_limits<double>::infinity();
  try {
    launch(stream, p, choice);  // loads the code
  } catch (const base::BackendError&) {
    return least;  // nothing ran
  }
  stream.synchronize();
  for (int series = 0; series < kSeries; ++series) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kLaunches; ++i) launch(stream, p, choice);
    stream.synchronize();
    const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - begin;
    least = std::min(least, taken.count() / kLaunches);
  }
  return least;
}

void CublasLtMatmul::launch(Stream& stream, const MatmulArgs& p, const AlgorithmChoice& chosen) {
  const float one = 1, beta = p.accumulate ? 1 : 0;
  const double f64_one = 1, f64_beta = beta;
  const bool is_f64 = p.dtype == DType::f64;
  const void* alpha = is_f64 ? static_cast<const void*>(&f64_one) : &one;
  const void* factor = is_f64 ? static_cast<const void*>(&f64_beta) : &beta;
  auto& device_stream = static_cast<DeviceStream&>(stream);
  device_stream.prepare_launch();
  auto* native = static_cast<cudaStream_t>(device_stream.native());
  check(api_,
        api_.cublasLtMatmul(handle_, chosen.operation, alpha, p.b.data, chosen.a, p.a.data, chosen.b, factor, p.c,
                            chosen.c, p.c, chosen.c, &chosen.algorithm.algo, workspace_.data(), kWorkspace, native),
        "cublasLtMatmul");
}

}  // namespace tessera::nn::cuda
