#include "tessera/nn/kernels/cpu/openblas.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/thread.h"
#include "tessera/nn/kernels/vendor_library.h"

namespace tessera::nn::kernels {
namespace {

/// What it maps for each thread.
constexpr std::size_t kBuffer = (std::size_t{128} << 20) + (std::size_t{64} << 10);

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

}  // namespace

const OpenBlas& open_blas() {
  static const OpenBlas blas = load();
  return blas;
}

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

}  // namespace tessera::nn::kernels
