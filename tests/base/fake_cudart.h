// The functions of CUDA's run-time library that the device calls, on ordinary memory: they note what they are asked
// for.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <set>
#include <vector>

namespace tessera::base_test {

struct FakeCuda {
  std::set<int> contexts;                    ///< devices on which the process has one
  std::vector<unsigned> event_flags;         ///< of all events made
  int events = 0;                            ///< that exist
  std::vector<unsigned> wait_flags;          ///< of stream waits for memory
  std::vector<cuuint32_t> wait_values;       ///< of the same
  std::vector<cudaStreamCaptureMode> modes;  ///< of captures
  std::vector<unsigned> stream_flags;        ///< of all streams made
  int streams_destroyed = 0;
  std::vector<unsigned> entry_versions;  ///< of the driver's functions that were looked up
  bool has_wait_value = true;            ///< whether the driver has cuStreamWaitValue32
};

/// One for the process; a test begins with a new one.
FakeCuda& fake_cuda();

}  // namespace tessera::base_test
