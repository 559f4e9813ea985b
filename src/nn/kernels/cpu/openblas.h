// OpenBLAS, loaded at its first use. While it is loaded it maps a buffer for each of its threads, and where the system
// refuses one, it tries again for ever: so its buffers are tried beforehand, and programs without its products start.
#pragma once

#include <cblas.h>

#include <cstddef>
#include <string>

namespace tessera::nn::kernels {

/// Its functions. It computes in the thread that calls: the pool has the threads.
struct OpenBlas {
  decltype(&::cblas_sgemm) sgemm = nullptr;
  decltype(&::cblas_dgemm) dgemm = nullptr;
  std::string name;  ///< with the kernels for this processor: "OpenBLAS 0.3.21 (Zen)"
};

/// Loads it, once in a process; a failure is tried again. Throws SystemError if there is no address space for its
/// buffers, Unsupported if it is not there.
const OpenBlas& open_blas();

/// Throws SystemError if the system refuses address space for as many more buffers of BLAS, one for each thread.
void require_blas_buffers(std::size_t count);

}  // namespace tessera::nn::kernels
