// Collectives that the library under a transport implements as a whole: the algorithm `native`, beside the project's
// schedules. Only for communicators of all ranks of a world, in its rank order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/comm/schedule.h"
#include "tessera/comm/types.h"

namespace tessera::comm {

/// The name of the algorithm in TESSERA_ALGO and last_algorithm().
inline constexpr std::string_view kNativeAlgorithm = "native";

/// The collectives that such a library may implement: all of them.
TESSERA_API std::span<const OpKind> native_kinds() noexcept;

/// The library's communicator of all ranks of a world, with its own order of operations. Destroyed under the engine's
/// lock, when none of its operations is in flight.
class TESSERA_API NativeCommunicator {
 public:
  virtual ~NativeCommunicator();
  /// Called after a failed operation, parts of which may still be in flight: the library's resources are not released.
  virtual void abandon() noexcept = 0;
};

struct NativeRequest;

/// The component that starts a request and is notified of its completion.
class TESSERA_API NativeOwner {
 public:
  /// The buffers belong to the caller again. Called under the engine's lock, from within Transport::poll().
  virtual void native_done(NativeRequest& collective) noexcept = 0;

 protected:
  ~NativeOwner() = default;
};

/// One operation in flight. Its owner keeps it in place until native_done() or cancel().
struct NativeRequest {
  OpKind kind = OpKind::barrier;                ///< one of native_kinds()
  DType dtype = DType::f32;                     ///< dtype of `in` and `out`
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;  ///< sum, prod, min or max
  std::size_t count = 0;                        ///< elements of one rank's part, or of everything if there are no parts
  int root = 0;                                 ///< rank of the root in rooted collectives
  const std::byte* in = nullptr;                ///< if the operation reads it on this rank
  /// If the operation writes it on this rank; overlaps `in` only as the operation documents (in place).
  std::byte* out = nullptr;
  NativeCommunicator* group = nullptr;  ///< group of the operation; outlives the request
  /// If not null, the request is not an operation: it creates another group of the same ranks and stores it here, or
  /// null if the library has no more groups, perhaps not on all ranks.
  std::unique_ptr<NativeCommunicator>* copy = nullptr;
  NativeOwner* owner = nullptr;  ///< notified of the completion
  std::uint32_t index = 0;       ///< number that the owner sets and reads
  std::uint32_t pending = 0;     ///< number that the library sets and reads
};

/// Provided by a transport. All ranks start the operations of a group in the same order; different groups are
/// independent. Every function runs under the engine's lock.
class TESSERA_API NativeCollectives {
 public:
  /// The first group. Called once, on all ranks.
  virtual std::unique_ptr<NativeCommunicator> whole_world() = 0;
  /// Whether the library is known to be faster than the project's schedules. The same result on all ranks.
  virtual bool prefers(const CollectiveSpec& spec) const noexcept = 0;
  /// Starts the request. Its owner is notified from within a later Transport::poll().
  virtual void start(NativeRequest& collective) noexcept = 0;
  /// After return, the operation's memory is no longer accessed. This may make the whole transport fail, since the
  /// library may be unable to cancel an operation.
  virtual void cancel(NativeRequest& collective) noexcept = 0;

 protected:
  ~NativeCollectives() = default;
};

/// The schedule around a native operation, with the steps before (premul_sum) and after it (avg). Parts of equal length
/// only.
TESSERA_API Schedule build_native_schedule(const CollectiveSpec& spec);

}  // namespace tessera::comm
