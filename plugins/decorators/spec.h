// Decorators by name: trace a communicator, delay it, or inject faults.
#pragma once

#include <memory>
#include <string_view>

#include "tessera/comm/communicator.h"

namespace tessera::decorators {

/// `spec` is a semicolon-separated list, such as "delay:2ms,seed=1;trace;fault:kill@12,rank=1". Each decorator wraps
/// the result of those before it: the trace above includes the delays. An empty `spec` leaves the communicator
/// unchanged.
///
///   delay:TIME[,seed=N][,bandwidth=SIZE][,op=NAME]   each operation takes at least TIME + bytes / (SIZE per second);
///                                                    with a seed TIME varies by half from call to call; op: delays
///                                                    only this operation
///   fault:KIND@CALL[,rank=N]                         KIND drop, kill or corrupt; at which call of a rank, from 1
///   trace[:FILE]                                     writes each operation to the log, or as a Chrome trace to
///                                                    FILE.rankN.json
///
/// Throws InvalidUsage that says what is wrong with `spec`. Fits InitOptions::decorate:
///   config.decorate = [](auto world) { return decorators::decorate(std::move(world), "delay:2ms"); };
std::unique_ptr<comm::Communicator> decorate(std::unique_ptr<comm::Communicator> communicator, std::string_view spec);

}  // namespace tessera::decorators
