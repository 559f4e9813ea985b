// A collective as data: what one rank sends, receives, copies and reduces, and in which order.
//
// An algorithm is a function that builds a schedule; it accesses no memory and no transport. So one executor runs all
// algorithms, tests run the schedules of all ranks in memory, and diagrams are drawn from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/types.h"

namespace tessera::comm {

/// The memory of a BufferRegion.
enum class BufferId : std::uint8_t {
  in,       ///< the call's input
  out,      ///< the call's output
  scratch,  ///< the operation's scratch memory
  factor    ///< 8 bytes: this rank's factor of premul_sum, a double
};

/// Bytes of the call's buffers or of the operation's scratch memory.
struct BufferRegion {
  BufferId place = BufferId::in;                         ///< buffer of the region
  std::size_t offset = 0;                                ///< offset in bytes from the buffer's start
  std::size_t bytes = 0;                                 ///< length
  bool operator==(const BufferRegion&) const = default;  ///< compares all members
};

/// What a reduce step computes from its sources.
enum class ReducePhase : std::uint8_t {
  partial,  ///< the plain sum (also for avg and premul_sum), product, minimum or maximum
  last,     ///< the same, then avg's division
  whole,    ///< the complete operation at once: avg divides, premul_sum multiplies by `factors`
};

/// One step of a schedule: a message, or work on this rank's buffers.
struct ScheduleStep {
  /// What a step does.
  enum class Kind : std::uint8_t {
    send,     ///< sends `from` to `peer`
    receive,  ///< receives into `to` from `peer`
    copy,     ///< copies `from` to `to`
    reduce,   ///< reduces the sources into `to`
    native    ///< the whole operation, by the library under the transport (native_collectives.h); at most one
  };
  Kind kind = Kind::copy;                         ///< selects which of the other fields have a meaning
  ReducePhase arithmetic = ReducePhase::partial;  ///< arithmetic of reduce steps
  int peer = 0;                                   ///< peer of send and receive
  std::uint32_t number = 0;        ///< send, receive: the message's index between the two ranks in this direction
  BufferRegion from;               ///< read by send, copy and native
  BufferRegion to;                 ///< written by receive, copy, reduce and native
  std::uint32_t first_source = 0;  ///< reduce: the index in Schedule::sources of the first source, in rank order
  std::uint32_t sources = 0;       ///< reduce: how many, each as long as `to`; `to` may equal one, else overlaps none
  BufferRegion factors;         ///< premul_sum in phase `whole`: one double per source, in scratch; bytes 0 otherwise
  std::uint32_t waits_for = 0;  ///< number of steps that must be done before
  std::uint32_t first_dependent = 0;  ///< index in Schedule::dependents of the first step that waits for this one
  std::uint32_t dependents = 0;       ///< how many steps wait for this one
};

/// The steps of one rank in one collective. A value: it owns no memory of the call.
struct Schedule {
  std::string_view algorithm;             ///< a literal
  std::vector<ScheduleStep> steps;        ///< each step comes after all those that it waits for
  std::vector<BufferRegion> sources;      ///< sources of all reduce steps, one after the other
  std::vector<std::uint32_t> dependents;  ///< indices in `steps`, of all steps, one after the other
  std::size_t scratch_bytes = 0;          ///< the executor allocates it
};

/// Everything that determines a schedule.
struct CollectiveSpec {
  OpKind kind = OpKind::barrier;                ///< the operation; a _v form has the kind of the form without
  DType dtype = DType::f32;                     ///< dtype of the elements
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;  ///< kind of reduction
  int ranks = 1;                                ///< number of ranks in the communicator
  int rank = 0;                                 ///< rank for which the schedule is built
  int root = 0;                                 ///< root of rooted collectives
  /// Elements on a rank that uses both buffers; all_gather: `in` is one part of count / ranks, ...
  std::size_t count = 0;  ///< count of the larger buffer
  bool in_place = false;  ///< whether `in` and `out` overlap as the operation documents
  bool ordered = true;    ///< reductions must follow the tree of slices.h bit for bit
  /// Offsets of the parts of `in` and `out`, ranks + 1 in elements, for the _v forms; empty for equal parts.
  std::vector<std::size_t> in_starts;
  std::vector<std::size_t> out_starts;                     ///< see in_starts
  bool operator==(const CollectiveSpec&) const = default;  ///< compares all members
};

/// "all_reduce=direct", ...: every algorithm, in the spelling of TESSERA_ALGO. `ordered_only`: those that can follow
/// the tree's order.
TESSERA_API std::vector<std::string> known_algorithms(bool ordered_only);

/// The fastest known algorithm for this operation; the same on all ranks.
TESSERA_API std::string_view default_algorithm(const CollectiveSpec& spec);

/// Why `algorithm` can't run this operation (order, number of ranks, dtype), or "" if it can. The same on all ranks.
TESSERA_API std::string refusal(const CollectiveSpec& spec, std::string_view algorithm);

/// Builds this rank's schedule. Throws InvalidUsage with the refusal.
TESSERA_API Schedule build_schedule(const CollectiveSpec& spec, std::string_view algorithm);

}  // namespace tessera::comm
