#include <cblas.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <system_error>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/thread.h"
#include "tessera/nn/kernels/cpu/products.h"
#include "tessera/nn/kernels/vendor_library.h"

namespace tessera::nn::kernels {
namespace {

/// The library's functions.
struct OpenBlas {
  decltype(&::cblas_sgemm) sgemm = nullptr;
  decltype(&::cblas_dgemm) dgemm = nullptr;
  std::string name;  ///< with the kernels for this processor: "OpenBLAS 0.3.21 (Zen)"
};

/// What it maps for each thread.
constexpr std::size_t kBuffer = (std::size_t{128} << 20) + (std::size_t{64} << 10);

/// Throws SystemError if the system refuses address space for as many more buffers of BLAS, one for each thread.
void require_blas_buffers(std::size_t count) {
  const std::size_t bytes = count * kBuffer;
  void* const room = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED)
    throw base::SystemError(
        "gemm: BLAS needs 128 MiB of address space for each computing thread, and the system refuses " +
        std::to_string(bytes >> 20) + " MiB: " + std::generic_category().message(errno) +
        "; allow more (ulimit -v, vm.overcommit_memory), use fewer --threads and "
        "OPENBLAS_NUM_THREADS=1, or set TESSERA_PRODUCTS=own");
  ::munmap(room, bytes);
}

/// As many threads as it has while it is loaded.
std::size_t threads_at_load() {
  cpu_set_t cores;
  const int found = ::sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
  const std::optional<std::string> asked = base::read_foreign_env("OPENBLAS_NUM_THREADS");
  const int limit = asked ? std::atoi(asked->c_str()) : 0;
  return static_cast<std::size_t>(limit > 0 ? std::min(limit, found) : found);
}

OpenBlas load() {
  require_blas_buffers(threads_at_load() + 1);
  const base::SignalBlock without;  // which its threads inherit
  VendorLibrary library(TESSERA_OPENBLAS_NAME, "OpenBLAS");
  if (!library.problem().empty()) library = VendorLibrary(TESSERA_OPENBLAS_FILE, "OpenBLAS");
  OpenBlas blas;
  decltype(&::openblas_set_num_threads) set_threads = nullptr;
  decltype(&::openblas_get_config) get_config = nullptr;
  decltype(&::openblas_get_corename) get_core = nullptr;
  library.find("cblas_sgemm", blas.sgemm);
  library.find("cblas_dgemm", blas.dgemm);
  library.find("openblas_set_num_threads", set_threads);
  library.find("openblas_get_config", get_config);
  library.find("openblas_get_corename", get_core);
  if (!library.problem().empty())
    throw base::Unsupported("no matrix products by a library: " + library.problem() +
                            "; install libopenblas0-pthread, or set TESSERA_PRODUCTS=own");
  set_threads(1);
  const std::string config = get_config();  // "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH .."
  blas.name = config.substr(0, config.find(' ', config.find(' ') + 1)) + " (" + get_core() + ")";
  return blas;
}

const OpenBlas& open_blas() {
  static const OpenBlas blas = load();
  return blas;
}

/// Guards a thread's first product, in which BLAS maps its buffer. Throws SystemError if there is no address space for
/// its buffer and for those of other threads that are in their first product.
class FirstProduct {
 public:
  FirstProduct() {
    if (done()) return;
    const std::lock_guard lock(pending().mutex);
    require_blas_buffers(pending().threads + 1);
    ++pending().threads;
    counted_ = true;
  }
  ~FirstProduct() {
    if (!counted_) return;
    done() = true;
    const std::lock_guard lock(pending().mutex);
    --pending().threads;
  }
  FirstProduct(const FirstProduct&) = delete;
  FirstProduct& operator=(const FirstProduct&) = delete;

 private:
  struct Pending {
    std::mutex mutex;
    std::size_t threads = 0;
  };
  static Pending& pending() {
    static Pending the;
    return the;
  }
  static bool& done() {
    thread_local bool the = false;
    return the;
  }
  bool counted_ = false;
};

blasint blas_int(std::size_t value) {
  if (value > 0x7fffffff)
    throw base::InvalidUsage("gemm: size " + std::to_string(value) + " exceeds the limit of BLAS, 2^31 - 1");
  return static_cast<blasint>(value);
}

}  // namespace

const std::string& blas_name() { return open_blas().name; }

template <class T>
void multiply_by_blas(const GemmArgs<T>& g) {
  const auto ta = g.trans_a == Transpose::yes ? CblasTrans : CblasNoTrans;
  const auto tb = g.trans_b == Transpose::yes ? CblasTrans : CblasNoTrans;
  const blasint m = blas_int(g.m), n = blas_int(g.n), k = blas_int(g.k);
  const OpenBlas& blas = open_blas();
  const FirstProduct first;
  const blasint lda = blas_int(g.lda), ldb = blas_int(g.ldb), ldc = blas_int(g.ldc);
  const T beta = g.accumulate ? T(1) : T(0);
  if constexpr (std::is_same_v<T, float>)
    blas.sgemm(CblasRowMajor, ta, tb, m, n, k, 1, g.a, lda, g.b, ldb, beta, g.c, ldc);
  else
    blas.dgemm(CblasRowMajor, ta, tb, m, n, k, 1, g.a, lda, g.b, ldb, beta, g.c, ldc);
}

template void multiply_by_blas<float>(const GemmArgs<float>&);
template void multiply_by_blas<double>(const GemmArgs<double>&);

}  // namespace tessera::nn::kernels
