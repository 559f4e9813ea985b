// The functions of cuDNN's backend interface as a table filled when the library is loaded at run time, so the program
// also starts on systems without it.
#pragma once

#include <cudnn_graph.h>

#include <cstddef>
#include <string>

namespace tessera::nn::cuda {

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

}  // namespace tessera::nn::cuda
