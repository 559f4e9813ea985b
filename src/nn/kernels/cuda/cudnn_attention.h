// Attention by cuDNN's fused engines.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "tessera/nn/kernels/cuda/cudnn_attention_graph.h"
#include "tessera/nn/kernels/cuda/library_tables.h"

namespace tessera::nn::cuda {

/// Opens the library; throws Unsupported with the reason if it can't be used.
using OpenCudnn = const Cudnn& (*)();

/// Memory of a call; null where the direction has none.
struct CudnnAttentionMemory {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* out = nullptr;          ///< written by the forward
  const void* log_sum_exp = nullptr;  ///< written by the forward; null there: not kept
  const void* dout = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
};

/// Keeps a plan for each problem. One per context, used by its thread; its calls must run on the compute stream.
class CudnnAttention {
 public:
  CudnnAttention(const KernelResources& resources, AttentionLibrary library, OpenCudnn open);
  ~CudnnAttention();
  CudnnAttention(const CudnnAttention&) = delete;
  CudnnAttention& operator=(const CudnnAttention&) = delete;

  /// True if the library can be used at all; opens it at the first call.
  bool available();
  /// False if the library has no plan of at most kernels::kMaxAttentionWorkspace bytes. The stream must be prepared for
  /// a launch.
  bool run(Stream& stream, const CudnnAttentionProblem& problem, const CudnnAttentionMemory& memory);
  const std::string& name() const { return name_; }  ///< AttentionTable::name()

 private:
  struct Prepared;
  struct Opened;
  std::unique_ptr<Prepared> prepare(const CudnnAttentionProblem& problem);
  Prepared* prepared(const CudnnAttentionProblem& problem);
  void execute(Stream& stream, Prepared& plan, const CudnnAttentionMemory& memory);
  void log(const std::string& line) const;

  DeviceRuntime& runtime_;
  MemoryPool& memory_;
  const std::shared_ptr<base::Logger> logger_;  ///< may be null
  const AttentionLibrary library_;
  const OpenCudnn open_;
  bool tried_ = false;
  std::unique_ptr<Opened> opened_;  ///< null: not usable, or not tried yet
  std::string name_{kOwnAttention};
  std::map<CudnnAttentionProblem, std::unique_ptr<Prepared>> prepared_;  ///< null: has no plan
};

/// A table over cuDNN as `open` finds it.
std::unique_ptr<AttentionTable> make_cudnn_attention(const KernelResources& resources, AttentionLibrary library,
                                                     OpenCudnn open);

}  // namespace tessera::nn::cuda
