// The flight recorder: the last calls of each rank in a file that outlives the rank, even if it is killed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/base/device_runtime.h"
#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// Records the calls of `world` and of all communicators split from it in `directory`/rank-R.flight, which a new world
/// replaces. The file is mapped memory: nothing has to be written when a rank ends. It holds the last 1024 calls with
/// their operation, bytes, dtype, label, step, state and times; `tessera report --postmortem` compares those of all
/// ranks (docs/postmortem.md has the format). Results, bytes and errors are unchanged. Works on any backend; `device`
/// is needed by those without host memory, else it may be null. Collective; creates the directory. Throws
/// InvalidUsage if the file can't be created.
TESSERA_API std::unique_ptr<Communicator> record_flight(std::unique_ptr<Communicator> world,
                                                        const std::string& directory,
                                                        std::shared_ptr<base::DeviceRuntime> device = nullptr);

/// The calls that follow, of all communicators of this rank's world, belong to this step. No effect on a communicator
/// that isn't recorded.
TESSERA_API void record_step(Communicator& communicator, std::int64_t step);

/// Adds the reason for which this rank gives up to its file. No effect on a communicator that isn't recorded.
TESSERA_API void record_failure(Communicator& communicator, std::string_view reason);

}  // namespace tessera::comm
