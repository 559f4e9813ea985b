// cuDNN's backend functions on ordinary memory. Graphs are computed as they are described, in double.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/nn/kernels/cuda/cudnn_graph.h"

namespace tessera::nn::test {

/// An engine that the fake's heuristics propose.
struct FakeEngine {
  std::int64_t index = 2;
  bool is_deterministic = true;
  bool can_plan = true;
};

/// What the fake offers and refuses, and what it was asked for. One per process.
struct FakeCudnn {
  std::size_t version = 92600;
  std::vector<FakeEngine> engines = {FakeEngine{}};
  std::int64_t workspace = 256;      ///< of every plan
  bool rejects_graphs = false;       ///< no graph is finalized
  bool fails_to_run = false;         ///< every execution ends with an error
  int opened = 0;                    ///< handles created
  int plans = 0;                     ///< plans made ...
  int runs = 0;                      ///< ... and run
  int sums_in_memory = 0;            ///< runs in which a product went to f32 memory of the caller, where blocks add
                                     ///< their parts in any order
  std::vector<std::int64_t> chosen;  ///< the engine of each run
  std::int64_t live = 0;             ///< descriptors that exist
};
FakeCudnn& fake_cudnn();

const cuda::Cudnn& fake_cudnn_api();

}  // namespace tessera::nn::test
