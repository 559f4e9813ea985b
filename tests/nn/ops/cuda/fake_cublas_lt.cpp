#include "tests/nn/ops/cuda/fake_cublas_lt.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>

#include "tessera/base/dtype.h"

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
};

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
cublasStatus_t set_preference(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*,
                              std::size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t find_algorithm(cublasLtHandle_t, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t,
                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                              cublasLtMatmulPreference_t, int most, cublasLtMatmulHeuristicResult_t found[],
                              int* count) {
  FakeCublasLt& fake = fake_cublas_lt();
  ++fake.choices;
  const bool plain = as<Product>(product).epilogue == CUBLASLT_EPILOGUE_DEFAULT;
  const bool sums = as<Product>(product).sums_a() || as<Product>(product).sums_b();
  *count = fake.no_algorithms || (fake.no_epilogues && !plain) || (fake.no_sums && sums)
               ? 0
               : std::min(most, static_cast<int>(fake.us.size()));
  for (int i = 0; i < *count; ++i) found[i].algo.data[0] = static_cast<std::uint64_t>(i);
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

cublasStatus_t run(cublasLtHandle_t, cublasLtMatmulDesc_t handle, const void*, const void* a,
                   cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                   const void*, cublasLtMatrixLayout_t, void* c, cublasLtMatrixLayout_t c_layout,
                   const cublasLtMatmulAlgo_t* algorithm, void*, std::size_t, cudaStream_t) {
  const auto number = static_cast<std::size_t>(algorithm->data[0]);
  const int us = fake_cublas_lt().us.at(number);
  if (us < 0) return CUBLAS_STATUS_EXECUTION_FAILED;
  fake_cublas_lt().run.push_back(static_cast<int>(number));
  std::this_thread::sleep_for(std::chrono::microseconds(us));
  const Product& product = as<Product>(handle);
  const Layout& layout = as<Layout>(c_layout);
  ++fake_cublas_lt().products;
  const auto shown = [](const Layout& of, const void* data) {
    return FakeMatrix{of.rows, of.columns, of.stride, data};
  };
  fake_cublas_lt().matrices.push_back(
      {shown(as<Layout>(a_layout), a), shown(as<Layout>(b_layout), b), shown(layout, c)});
  if (product.epilogue != CUBLASLT_EPILOGUE_DEFAULT) ++fake_cublas_lt().with_epilogue;
  const auto multiplied = [&](auto zero) {
    using T = decltype(zero);
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
