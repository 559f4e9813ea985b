// Collectives that the library below a transport carries out as a whole: the algorithm `native`, beside our schedules.
// Only for communicators of all ranks of a world, in its order.
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

inline constexpr std::string_view kNativeAlgorithm = "native";

/// What such a library may have: all collectives.
TESSERA_API std::span<const OpKind> native_kinds() noexcept;

/// That library's own name for the ranks of a world, with an order of operations of its own. Destroyed under the
/// engine's lock, when nothing of it is under way.
class TESSERA_API NativeCommunicator {
 public:
  virtual ~NativeCommunicator();
  /// An operation has failed, so that a part of it may still be under way somewhere: nothing is given back.
  virtual void abandon() noexcept = 0;
};

struct NativeRequest;

/// Who started one, and is told when it is through.
class TESSERA_API NativeOwner {
 public:
  /// The buffers are the caller's again. Under the engine's lock, from within Transport::poll().
  virtual void native_done(NativeRequest& collective) noexcept = 0;

 protected:
  ~NativeOwner() = default;
};

/// One under way. Belongs to its owner, and stays where it is until native_done() or give_up().
struct NativeRequest {
  OpKind kind = OpKind::barrier;
  DType dtype = DType::f32;
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;  ///< sum, prod, min or max
  std::size_t count = 0;                        ///< elements of one rank's part, of everything where there are no parts
  int root = 0;
  const std::byte* in = nullptr;  ///< where the operation looks at it on this rank
  std::byte* out = nullptr;       ///< the same; overlaps `in` where the operation can be done in place, as it says
  NativeCommunicator* group = nullptr;
  /// Not null: instead of all that, makes another group of the same ranks. Null is put there where the library has no
  /// more of them, perhaps not on all ranks.
  std::unique_ptr<NativeCommunicator>* copy = nullptr;
  NativeOwner* owner = nullptr;
  std::uint32_t index = 0;    ///< the owner's
  std::uint32_t pending = 0;  ///< the library's
};

/// Offered by a transport. All ranks start the operations of a group in the same order; those of several groups are
/// independent. Everything runs under the engine's lock.
class TESSERA_API NativeCollectives {
 public:
  /// The first group. Called once, alike on all ranks.
  virtual std::unique_ptr<NativeCommunicator> whole_world() = 0;
  /// Whether it is known to be faster than our schedules here. Decides alike on all ranks.
  virtual bool prefers(const CollectiveSpec& problem) const noexcept = 0;
  virtual void start(NativeRequest& collective) noexcept = 0;
  /// On return its memory is not touched any more, which may cost the whole transport: what a library has begun it may
  /// not be able to take back.
  virtual void give_up(NativeRequest& collective) noexcept = 0;

 protected:
  ~NativeCollectives() = default;
};

/// The schedule around one: what comes before (premul_sum) and after it (avg). Parts of equal length only.
TESSERA_API Schedule build_native_schedule(const CollectiveSpec& problem);

}  // namespace tessera::comm
