// Every operation x dtype x reduce op x size x in place x memory, compared bitwise with a serial reference; and the
// behavior of a communicator with several operations in flight. For any backend: ranks may be threads or processes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/comm/communicator.h"
#include "tests/conformance/reference.h"

namespace tessera::conformance {

struct Case {
  OpKind kind;
  DType dtype;
  ReduceOp::Kind reduce;
  std::size_t count;  ///< per rank's part
  bool in_place;
  bool window_in;  ///< memory of the communicator; false: ordinary memory
  bool window_out;
  std::uint64_t seed;

  std::string name(int ranks) const;
};

/// For each operation and dtype, every size, every reduce op and every combination of memory at least once, in seeded
/// order. `full`: all combinations. `stride`: only every stride-th case of the small set.
std::vector<Case> cases_for(OpKind kind, bool full, std::size_t stride = 1);
std::vector<OpKind> all_kinds();

/// The device of a case's buffers, which `stream` fills and reads; null: host memory.
struct OnDevice {
  DeviceRuntime& runtime;
  Stream& stream;
};

/// Runs the case on every rank of `comm`. Returns "" or the error of this rank.
std::string run_case(Communicator& comm, const Case& c, const OnDevice* device = nullptr);

/// Starts the case's operation.
Work issue(Communicator& comm, const Case& c, ConstView in, View out, ReduceOp op, int root, OpOptions options = {});

/// Runs one case of i8 with at least `bytes` in the larger buffer, in ordinary memory; the check holds no more memory
/// than the two buffers. Returns "" or the error of this rank. `tamper` may damage the output: the check must detect
/// it.
using Tamper = std::function<void(std::byte* out, std::size_t bytes)>;
inline constexpr std::size_t kHugeBytes = (std::size_t{1} << 31) + 17;
inline constexpr int kHugeRoot = 1;
std::string run_huge(Communicator& comm, OpKind kind, std::size_t bytes = kHugeBytes, const Tamper& tamper = {});

/// Further behavior that every backend must have. `run` returns "" or the error of this rank.
struct Behaviour {
  std::string_view name;
  std::string (*run)(Communicator& world);
  int least_ranks;
};
std::vector<Behaviour> behaviours();
/// Those of operations that nobody waits for.
std::vector<Behaviour> callback_behaviours();
/// Those of messages with tags and from any rank.
std::vector<Behaviour> tag_behaviours();
/// Those of one-sided operations.
std::vector<Behaviour> window_behaviours();
/// Those of Communicator::create_group().
std::vector<Behaviour> group_behaviours();

}  // namespace tessera::conformance
