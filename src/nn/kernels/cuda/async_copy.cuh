// Copies of 16 bytes from global to shared memory that run while their thread continues: cp.async of NVIDIA's PTX ISA.
// The thread that started a copy may read its bytes after wait_copies(), the other threads of the block after a barrier
// that follows it.
#pragma once

#include "tessera/nn/kernels/cuda/portable.cuh"

namespace tessera::nn::cuda {

#if defined(__CUDACC__)

/// The address of an object in shared memory, as instructions expect it.
TESSERA_DEVICE std::uint32_t shared_address(const void* object) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(object));
}

/// Copies 16 bytes, or writes 16 bytes of zeros and reads nothing if not `inside`. Both addresses are aligned to 16.
TESSERA_DEVICE void copy_async(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(inside ? 16 : 0)
               : "memory");
}
/// The thread's copies since the last call become one group.
TESSERA_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
/// Waits until at most the last `pending` groups of the thread are incomplete.
template <unsigned pending>
TESSERA_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory");
}

#else

using emulation::commit_copies;
using emulation::copy_async;
template <unsigned pending>
void wait_copies() {
  emulation::wait_copies(pending);
}

#endif

}  // namespace tessera::nn::cuda
