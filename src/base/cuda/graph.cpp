#include "tessera/base/cuda/graph.h"

#include "tessera/base/cuda/runtime.h"

namespace tessera::base::cuda {
namespace {

class CudaGraph final : public Graph {
 public:
  explicit CudaGraph(cudaGraph_t recorded) {
    check(cudaGraphInstantiate(&graph_, recorded, 0), "cudaGraphInstantiate");
  }
  ~CudaGraph() override { cudaGraphExecDestroy(graph_); }
  void launch(Stream& stream) override { check(cudaGraphLaunch(graph_, native(stream)), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace

/// Relaxed, so that pools may allocate memory meanwhile.
void begin_capture(cudaStream_t stream) {
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
}

std::unique_ptr<Graph> end_capture(cudaStream_t stream) {
  struct Recorded {
    cudaGraph_t graph = nullptr;
    ~Recorded() {
      if (graph != nullptr) cudaGraphDestroy(graph);
    }
  } recorded;
  check(cudaStreamEndCapture(stream, &recorded.graph), "cudaStreamEndCapture");
  return std::make_unique<CudaGraph>(recorded.graph);
}

}  // namespace tessera::base::cuda
