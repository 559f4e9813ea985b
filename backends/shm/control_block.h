// The control data that a rank publishes on one communicator: flags, announcements, staging. It lies in the rank's
// arena; only the rank writes it, and its peers read it. Flags are monotonic: operation number and round share one
// word, which is never reset.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "tessera/comm/failure.h"
#include "tessera/comm/types.h"

namespace tessera::comm::shm {

inline constexpr std::size_t kLine = 128;  ///< two cache lines: the prefetcher fetches them in pairs
inline constexpr std::size_t kEagerBytes = 16 * 1024;
inline constexpr std::uint64_t kViaTiles = ~std::uint64_t{0};    ///< as an offset: the data comes through tiles
inline constexpr std::uint64_t kViaCma = ~std::uint64_t{0} - 1;  ///< as an offset: read from the owner's process

/// in_offset or out_offset names a copy, which does not change until its slot is reused.
inline constexpr std::uint8_t kCopiedIn = 1;
inline constexpr std::uint8_t kCopiedOut = 2;
inline constexpr std::uint8_t kAwaitsReaders = 4;  ///< no copy: the owner waits until it has been read
inline constexpr std::uint8_t kAllThere = 8;       ///< the whole input is readable: `staged` need not be checked

/// Operation number in the upper 40 bits, its finished rounds in the lower 24.
inline constexpr std::uint64_t kRoundBits = 24;
inline constexpr std::uint64_t kAllRounds = (std::uint64_t{1} << kRoundBits) - 1;
constexpr std::uint64_t encode(std::uint64_t operation, std::uint64_t rounds) {
  return operation << kRoundBits | rounds;
}
/// Rounds of `operation` that a flag reports: none if its owner has not reached it, all if its owner is past it.
constexpr std::uint64_t rounds_of(std::uint64_t flag, std::uint64_t operation) {
  const std::uint64_t at = flag >> kRoundBits;
  return at < operation ? 0 : (at > operation ? kAllRounds : flag & kAllRounds);
}

/// Processes map these words at different addresses, and in part without the permission to write.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

struct alignas(kLine) Flag {
  std::atomic<std::uint64_t> value{0};
};

/// Addresses in the announcing process.
struct CmaBuffers {
  const std::byte* in;
  const std::byte* out;
};

/// The announcement of one collective, followed by the payload of a small one. Two slots alternate: operation s is
/// announced once all ranks have announced s - 1 and hence finished s - 2.
struct CollectiveSlot {
  std::atomic<std::uint64_t> sequence{0};  ///< stored last
  std::uint64_t fingerprint = 0;
  std::uint64_t in_offset = 0;     ///< in the arena, or kViaTiles, or kViaCma
  std::uint64_t out_offset = 0;    ///< the same, for what the second half of all_reduce reads
  std::uint64_t stage_offset = 0;  ///< of the tiles
  double factor = 1;               ///< premul_sum
  std::uint64_t count = 0;         ///< for the table of a mismatch, as are the next four fields
  OpKind kind = OpKind::barrier;
  DType dtype = DType::f32;
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;
  std::uint8_t hints = 0;  ///< kCopiedIn, kCopiedOut, kAwaitsReaders, kAllThere
  std::int32_t root = 0;
  union {
    CmaBuffers cma;  ///< if an offset is kViaCma
    std::byte payload[kEagerBytes];
  };
};
static_assert(offsetof(CollectiveSlot, payload) == 64);

struct alignas(kLine) FailureRecord {
  std::atomic<std::uint32_t> state{0};  ///< 1: the rest is valid
  FailureKind kind = FailureKind::none;
  std::array<char, 1000> text{};
};

/// One direction of a pair of ranks, on the sender's side.
struct alignas(kLine) SendSlot {
  std::atomic<std::uint64_t> sent{0};  ///< message number and tiles staged
  std::uint64_t bytes = 0;
  std::uint64_t in_offset = 0;  ///< as in a CollectiveSlot
  std::uint64_t stage_offset = 0;
  const std::byte* cma = nullptr;
  DType dtype = DType::f32;
  std::int32_t tag = 0;
};

/// The part that peers use until they are done with the communicator.
struct alignas(kLine) ControlHeader {
  Flag staged;
  Flag phase_a;  ///< inputs read; for all_reduce also: results available
  Flag phase_b;  ///< results read
  Flag done;     ///< members that don't use this block any more; each adds itself as the last thing that it does
  FailureRecord failure;
};

/// What the owner publishes of its operations.
struct PortSlots {
  alignas(kLine) CollectiveSlot slots[2];
};

/// Counters of the bytes that this rank read from one peer. Written by one rank only.
struct alignas(kLine) ByteCounts {
  std::array<std::atomic<std::uint64_t>, kOpKinds> bytes{};
};

/// A control block in an arena: ControlHeader, then for each member a ByteCounts, a SendSlot, a Flag (messages
/// received) and an offset table of two entries (all_to_all_v: where in its input the part for that member begins).
class ControlBlock {
 public:
  ControlBlock() = default;
  ControlBlock(std::byte* head, std::byte* slots, int members) : head_(head), slots_(slots), members_(members) {}
  static std::size_t head_bytes(int members) {
    return sizeof(ControlHeader) +
           static_cast<std::size_t>(members) * (sizeof(ByteCounts) + sizeof(SendSlot) + sizeof(Flag) + kLine);
  }

  ControlHeader& head() const { return *reinterpret_cast<ControlHeader*>(head_); }
  CollectiveSlot& slot(std::uint64_t sequence) const {
    return reinterpret_cast<PortSlots*>(slots_)->slots[sequence % 2];
  }
  ByteCounts& credit(int peer) const { return at<ByteCounts>(0, peer); }
  SendSlot& sends(int peer) const { return at<SendSlot>(sizeof(ByteCounts), peer); }
  std::atomic<std::uint64_t>& received(int peer) const {
    return at<Flag>(sizeof(ByteCounts) + sizeof(SendSlot), peer).value;
  }
  std::uint64_t* part_offsets(int peer) const {
    return &at<std::uint64_t>(sizeof(ByteCounts) + sizeof(SendSlot) + sizeof(Flag), peer, kLine);
  }

 private:
  template <class T>
  T& at(std::size_t before, int peer, std::size_t stride = sizeof(T)) const {
    const std::size_t offset =
        sizeof(ControlHeader) + static_cast<std::size_t>(members_) * before + static_cast<std::size_t>(peer) * stride;
    return *reinterpret_cast<T*>(head_ + offset);
  }
  std::byte* head_ = nullptr;
  std::byte* slots_ = nullptr;
  int members_ = 0;
};

}  // namespace tessera::comm::shm
