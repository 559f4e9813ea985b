// A collective as data: what one rank sends, receives, copies and reduces, and in which order.
//
// An algorithm is a function that builds a schedule; it accesses no memory and no transport. So one executor runs all
// algorithms, tests run the schedules of all ranks in memory, and diagrams are drawn from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/types.h"

namespace tessera::comm {

/// `factor` holds 8 bytes: this rank's factor of premul_sum, a double.
enum class BufferId : std::uint8_t { in, out, scratch, factor };

/// Bytes of the call's buffers or of the operation's scratch memory.
struct BufferRegion {
  BufferId place = BufferId::in;
  std::size_t offset = 0;
  std::size_t bytes = 0;
  bool operator==(const BufferRegion&) const = default;
};

/// What a reduce step computes from its sources.
enum class ReducePhase : std::uint8_t {
  partial,  ///< the plain sum (also for avg and premul_sum), product, minimum or maximum
  last,     ///< the same, then avg's division
  whole,    ///< the complete operation at once: avg divides, premul_sum multiplies by `factors`
};

struct ScheduleStep {
  enum class Kind : std::uint8_t {
    send,
    receive,
    copy,
    reduce,
    native  ///< the whole operation, by the library under the transport (native_collectives.h); at most one
  };
  Kind kind = Kind::copy;
  ReducePhase arithmetic = ReducePhase::partial;
  int peer = 0;                    ///< of send and receive
  std::uint32_t number = 0;        ///< send, receive: the message's index between the two ranks in this direction
  BufferRegion from;               ///< read by send, copy and native
  BufferRegion to;                 ///< written by receive, copy, reduce and native
  std::uint32_t first_source = 0;  ///< reduce: the index in Schedule::sources of the first source, in rank order
  std::uint32_t sources = 0;       ///< reduce: how many, each as long as `to`; `to` may equal one, else overlaps none
  BufferRegion factors;         ///< premul_sum in phase `whole`: one double per source, in scratch; bytes 0 otherwise
  std::uint32_t waits_for = 0;  ///< number of steps that must be done before
  std::uint32_t first_follower = 0;  ///< index in Schedule::followers of the first step that waits for this one
  std::uint32_t followers = 0;
};

struct Schedule {
  std::string_view algorithm;       ///< a literal
  std::vector<ScheduleStep> steps;  ///< each step comes after all those that it waits for
  std::vector<BufferRegion> sources;
  std::vector<std::uint32_t> followers;
  std::size_t scratch_bytes = 0;
};

/// Everything that determines a schedule.
struct CollectiveSpec {
  OpKind kind = OpKind::barrier;
  DType dtype = DType::f32;
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;
  int ranks = 1;
  int rank = 0;
  int root = 0;
  /// Elements on a rank that uses both buffers; all_gather: `in` is one part of count / ranks, ...
  std::size_t count = 0;  ///< of the larger buffer
  bool in_place = false;  ///< in the way that the operation documents
  bool ordered = true;    ///< reductions must follow the tree of slices.h bit for bit
  /// For the _v forms: ranks + 1 offsets, in elements, of the parts of `in` and `out`; empty for equal parts.
  std::vector<std::size_t> in_starts;
  std::vector<std::size_t> out_starts;
  bool operator==(const CollectiveSpec&) const = default;
};

/// "all_reduce=direct", ...: every algorithm, in the spelling of TESSERA_ALGO. `ordered_only`: those that can follow
/// the tree's order.
TESSERA_API std::vector<std::string> known_algorithms(bool ordered_only);

/// The fastest known algorithm for this operation; the same on all ranks.
TESSERA_API std::string_view default_algorithm(const CollectiveSpec& problem);

/// Why `algorithm` can't run this operation (order, number of ranks, dtype), or "" if it can. The same on all ranks.
TESSERA_API std::string refusal(const CollectiveSpec& problem, std::string_view algorithm);

/// Builds this rank's schedule. Throws InvalidUsage with the refusal.
TESSERA_API Schedule build_schedule(const CollectiveSpec& problem, std::string_view algorithm);

}  // namespace tessera::comm
