#include "tests/nn/ops/cuda/fake_cublas_lt.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>

#include "tessera/base/dtype.h"
#include "tessera/nn/fp8.h"

namespace tessera::nn::test {
namespace {

using base::bf16;

struct Layout {
  cudaDataType_t type;
  std::uint64_t rows, columns;
  std::int64_t stride;  ///< elements from a column to the next
};

struct Product {
  cublasOperation_t trans_a = CUBLAS_OP_N;
  cublasOperation_t trans_b = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;  ///< read, or written with the sums of an operand
  bool sums_a() const { return epilogue == CUBLASLT_EPILOGUE_BGRADA; }
  bool sums_b() const { return epilogue == CUBLASLT_EPILOGUE_BGRADB; }
  bool adds_bias() const { return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS; }
  void* before_gelu = nullptr;
  std::int64_t before_gelu_stride = 0;
  const float* a_scale = nullptr;  ///< factors of 8-bit operands
  const float* b_scale = nullptr;
  std::int8_t fast = 0;
};

bool is_fp8(const Layout& layout) { return layout.type == CUDA_R_8F_E4M3 || layout.type == CUDA_R_8F_E5M2; }

/// What the library requires of 8-bit operands below Blackwell: A transposed, B not, at most one E5M2, factors, whole
/// vectors of 16 bytes, and no f32 bias.
bool supports_fp8(const Product& product, const Layout& a, const Layout& b, const Layout& c) {
  const bool whole = a.stride % 16 == 0 && b.stride % 16 == 0 && a.rows % 16 == 0 && a.columns % 16 == 0;
  return is_fp8(a) && is_fp8(b) && !(a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2) && whole &&
         product.trans_a == CUBLAS_OP_T && product.trans_b == CUBLAS_OP_N && product.a_scale != nullptr &&
         product.b_scale != nullptr && !(product.epilogue != CUBLASLT_EPILOGUE_DEFAULT && c.type == CUDA_R_32F);
}

template <class T>
T& as(void* handle) {
  return *static_cast<T*>(handle);
}

cublasStatus_t create(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t destroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }
std::size_t version() { return 130000; }
const char* status_string(cublasStatus_t) { return "a fake's error"; }

cublasStatus_t create_product(cublasLtMatmulDesc_t* product, cublasComputeType_t, cudaDataType_t) {
  *product = reinterpret_cast<cublasLtMatmulDesc_t>(new Product);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t destroy_product(cublasLtMatmulDesc_t product) {
  delete reinterpret_cast<Product*>(product);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t set_product(cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t attribute, const void* value,
                           std::size_t bytes) {
  Product& product = as<Product>(handle);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      std::memcpy(&product.trans_a, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_TRANSB:
      std::memcpy(&product.trans_b, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      std::memcpy(&product.epilogue, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      std::memcpy(&product.bias, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      std::memcpy(&product.before_gelu, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      std::memcpy(&product.before_gelu_stride, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
      std::memcpy(&product.a_scale, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
      std::memcpy(&product.b_scale, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
      std::memcpy(&product.fast, value, bytes);
      break;
    default:
      break;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t create_layout(cublasLtMatrixLayout_t* layout, cudaDataType type, std::uint64_t rows,
                             std::uint64_t columns, std::int64_t stride) {
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, stride});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t destroy_layout(cublasLtMatrixLayout_t layout) {
  delete reinterpret_cast<Layout*>(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t create_preference(cublasLtMatmulPreference_t* preference) {
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t destroy_preference(cublasLtMatmulPreference_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t set_preference(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t attribute,
                              const void* value, std::size_t bytes) {
  if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) std::memcpy(&fake_cublas_lt().schemes, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t find_algorithm(cublasLtHandle_t, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t,
                              cublasLtMatmulPreference_t, int most, cublasLtMatmulHeuristicResult_t found[],
                              int* count) {
  FakeCublasLt& fake = fake_cublas_lt();
  ++fake.choices;
  const bool plain = as<Product>(product).epilogue == CUBLASLT_EPILOGUE_DEFAULT;
  const bool sums = as<Product>(product).sums_a() || as<Product>(product).sums_b();
  const bool fp8 = is_fp8(as<Layout>(a)) || is_fp8(as<Layout>(b));
  const bool unsupported = fp8 && !supports_fp8(as<Product>(product), as<Layout>(a), as<Layout>(b), as<Layout>(c));
  *count = unsupported || fake.no_algorithms || (fake.no_epilogues && !plain) || (fake.no_sums && sums)
               ? 0
               : std::min(most, static_cast<int>(fake.us.size()));
  fake.vector = as<Product>(product).bias;
  for (int i = 0; i < *count; ++i) {
    found[i].algo.data[0] = static_cast<std::uint64_t>(i);
    found[i].state = i < fake.failed_choices ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
  }
  return *count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_algorithm(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                               cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t* algorithm,
                               cublasLtMatmulHeuristicResult_t*) {
  return algorithm->data[0] < fake_cublas_lt().us.size() ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/// C = op(A) op(B) + beta C, column-major. The bias has an element for each row.
template <class T>
void multiply(const Product& product, const T* a, const Layout& a_layout, const T* b, const Layout& b_layout,
              float beta, T* c, const Layout& c_layout) {
  const bool ta = product.trans_a != CUBLAS_OP_N;
  const bool tb = product.trans_b != CUBLAS_OP_N;
  const auto at = [](const Layout& layout, std::uint64_t row, std::uint64_t column) {
    return row + column * static_cast<std::uint64_t>(layout.stride);
  };
  const std::uint64_t inner = ta ? a_layout.rows : a_layout.columns;
  for (std::uint64_t column = 0; column < c_layout.columns; ++column)
    for (std::uint64_t row = 0; row < c_layout.rows; ++row) {
      float sum = 0;
      for (std::uint64_t k = 0; k < inner; ++k)
        sum += static_cast<float>(a[ta ? at(a_layout, k, row) : at(a_layout, row, k)]) *
               static_cast<float>(b[tb ? at(b_layout, column, k) : at(b_layout, k, column)]);
      T& out = c[at(c_layout, row, column)];
      if (beta != 0) sum += beta * static_cast<float>(out);
      if (product.adds_bias()) sum += static_cast<float>(static_cast<const T*>(product.bias)[row]);
      if (product.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
        static_cast<T*>(product.before_gelu)[row + column * static_cast<std::uint64_t>(product.before_gelu_stride)] =
            T(sum);
        sum = 0.5F * sum * (1 + std::tanh(0.7978845608F * (sum + 0.044715F * sum * sum * sum)));
      }
      out = T(sum);
    }
  // Over k, one for each row of op(A) or column of op(B). They overwrite, whatever beta is.
  const auto sums = [&](std::uint64_t count, const auto& element) {
    for (std::uint64_t i = 0; i < count; ++i) {
      float sum = 0;
      for (std::uint64_t k = 0; k < inner; ++k) sum += static_cast<float>(element(i, k));
      static_cast<T*>(product.bias)[i] = T(sum);
    }
  };
  if (product.sums_a())
    sums(c_layout.rows,
         [&](std::uint64_t row, std::uint64_t k) { return a[ta ? at(a_layout, k, row) : at(a_layout, row, k)]; });
  if (product.sums_b())
    sums(c_layout.columns, [&](std::uint64_t column, std::uint64_t k) {
      return b[tb ? at(b_layout, column, k) : at(b_layout, k, column)];
    });
}

/// C = A^T B times the factors, plus bias and C, in double.
template <class T>
void multiply_fp8(const Product& product, const FakeMatrix& a, Fp8Format a_format, const FakeMatrix& b,
                  Fp8Format b_format, float beta, const FakeMatrix& c) {
  const auto value = [](const FakeMatrix& of, Fp8Format format, std::uint64_t row, std::uint64_t column) {
    const auto* codes = static_cast<const std::uint8_t*>(of.data);
    return static_cast<double>(decode_fp8(format, codes[row + column * static_cast<std::uint64_t>(of.stride)]));
  };
  T* const to = static_cast<T*>(const_cast<void*>(c.data));
  for (std::uint64_t column = 0; column < c.columns; ++column)
    for (std::uint64_t row = 0; row < c.rows; ++row) {
      double sum = 0;
      for (std::uint64_t k = 0; k < a.rows; ++k) sum += value(a, a_format, k, row) * value(b, b_format, k, column);
      sum *= static_cast<double>(*product.a_scale) * *product.b_scale;
      if (product.adds_bias()) sum += static_cast<float>(static_cast<const T*>(product.bias)[row]);
      T& out = to[row + column * static_cast<std::uint64_t>(c.stride)];
      if (beta != 0) sum += beta * static_cast<float>(out);
      out = T(static_cast<float>(sum));
    }
}

cublasStatus_t run(cublasLtHandle_t, cublasLtMatmulDesc_t handle, const void*, const void* a,
                   cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                   const void*, cublasLtMatrixLayout_t, void* c, cublasLtMatrixLayout_t c_layout,
                   const cublasLtMatmulAlgo_t* algorithm, void*, std::size_t, cudaStream_t) {
  const auto number = static_cast<std::size_t>(algorithm->data[0]);
  const int us = fake_cublas_lt().us.at(number);
  if (us < 0) return CUBLAS_STATUS_EXECUTION_FAILED;
  for (const float* factor : {as<Product>(handle).a_scale, as<Product>(handle).b_scale})
    if (reinterpret_cast<std::uintptr_t>(factor) % 16 != 0) return CUBLAS_STATUS_NOT_SUPPORTED;  // seen with 13.1
  fake_cublas_lt().run.push_back(static_cast<int>(number));
  std::this_thread::sleep_for(std::chrono::microseconds(us));
  const Product& product = as<Product>(handle);
  const Layout& layout = as<Layout>(c_layout);
  ++fake_cublas_lt().products;
  const auto shown = [](const Layout& of, const void* data) {
    return FakeMatrix{of.rows, of.columns, of.stride, data};
  };
  fake_cublas_lt().matrices.push_back(
      {shown(as<Layout>(a_layout), a), shown(as<Layout>(b_layout), b), shown(layout, c), product.fast != 0});
  if (product.epilogue != CUBLASLT_EPILOGUE_DEFAULT) ++fake_cublas_lt().with_epilogue;
  const auto multiplied = [&](auto zero) {
    using T = decltype(zero);
    const auto format = [](const Layout& of) { return of.type == CUDA_R_8F_E4M3 ? Fp8Format::e4m3 : Fp8Format::e5m2; };
    if (is_fp8(as<Layout>(a_layout))) {
      const FakeProduct& last = fake_cublas_lt().matrices.back();
      multiply_fp8<T>(product, last.a, format(as<Layout>(a_layout)), last.b, format(as<Layout>(b_layout)),
                      *static_cast<const float*>(beta), last.c);
      return CUBLAS_STATUS_SUCCESS;
    }
    multiply<T>(product, static_cast<const T*>(a), as<Layout>(a_layout), static_cast<const T*>(b), as<Layout>(b_layout),
                *static_cast<const float*>(beta), static_cast<T*>(c), layout);
    return CUBLAS_STATUS_SUCCESS;
  };
  if (layout.type == CUDA_R_32F) return multiplied(0.0F);
  return layout.type == CUDA_R_16BF ? multiplied(bf16(0.0F)) : CUBLAS_STATUS_NOT_SUPPORTED;
}

}  // namespace

FakeCublasLt& fake_cublas_lt() {
  static FakeCublasLt fake;
  return fake;
}

const cuda::CublasLt& fake_cublas_lt_api() {
  static const cuda::CublasLt kApi{.cublasLtCreate = create,
                                   .cublasLtDestroy = destroy,
                                   .cublasLtGetStatusString = status_string,
                                   .cublasLtGetVersion = version,
                                   .cublasLtMatmul = run,
                                   .cublasLtMatmulAlgoCheck = check_algorithm,
                                   .cublasLtMatmulAlgoGetHeuristic = find_algorithm,
                                   .cublasLtMatmulDescCreate = create_product,
                                   .cublasLtMatmulDescDestroy = destroy_product,
                                   .cublasLtMatmulDescSetAttribute = set_product,
                                   .cublasLtMatmulPreferenceCreate = create_preference,
                                   .cublasLtMatmulPreferenceDestroy = destroy_preference,
                                   .cublasLtMatmulPreferenceSetAttribute = set_preference,
                                   .cublasLtMatrixLayoutCreate = create_layout,
                                   .cublasLtMatrixLayoutDestroy = destroy_layout};
  return kApi;
}

}  // namespace tessera::nn::test
