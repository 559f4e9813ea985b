// Arguments of collectives. comm knows pointer, count, dtype and device; never tensors.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/device.h"
#include "tessera/base/dtype.h"
#include "tessera/base/export.h"
#include "tessera/base/stream.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// `count` elements at `data`, read by the operation. Must stay valid and unchanged until the Work is done.
struct ConstView {
  const void* data = nullptr;  ///< first element; may be null if `count` is 0
  std::size_t count = 0;       ///< number of elements
  DType dtype = DType::f32;    ///< dtype of the elements
  Device device = {};          ///< device to which the memory belongs; default: the host
  std::size_t bytes() const { return count * size_of(dtype); }  ///< size of all elements
};

/// The same, written by the operation. The content is undefined until the Work is done, and after a failure.
struct View {
  void* data = nullptr;      ///< first element; may be null if `count` is 0
  std::size_t count = 0;     ///< number of elements
  DType dtype = DType::f32;  ///< dtype of the elements
  Device device = {};        ///< device to which the memory belongs; default: the host
  std::size_t bytes() const { return count * size_of(dtype); }  ///< size of all elements
  /// The same memory for reading.
  operator ConstView() const { return {data, count, dtype, device}; }  // NOLINT(google-explicit-constructor)
};

/// Elements in host memory.
template <class T>
ConstView view_of(const T* data, std::size_t count) {
  return {data, count, dtype_of<T>, {}};
}
/// Elements in host memory.
template <class T>
View view_of(T* data, std::size_t count) {
  return {data, count, dtype_of<T>, {}};
}

/// How elements of several ranks are reduced to one. Sums and products of integers wrap; f16 and bf16 are added in f32
/// and rounded once; minimum and maximum propagate NaN. Which payload and sign a NaN result has is not defined. Of
/// bool, sum and max are `or`, prod and min are `and`.
struct ReduceOp {
  /// The arithmetic of a reduction.
  enum class Kind : std::uint8_t {
    sum,         ///< a + b
    avg,         ///< the sum divided by ReduceOp::scalar, or by the number of ranks if that is 0
    prod,        ///< a * b
    min,         ///< the smaller element
    max,         ///< the larger element
    premul_sum,  ///< the sum of each rank's input times its ReduceOp::scalar
    bit_and,     ///< a & b, of integers and bool
    bit_or,      ///< a | b, of integers and bool
    bit_xor      ///< a ^ b, of integers and bool
  };
  Kind kind = Kind::sum;  ///< default: sum
  /// avg: the divisor of the sum (applied once, before rounding; integers truncate), 0 for the number of ranks. It may
  /// be larger than an integer element can be. premul_sum: the factor of this rank's input (may differ per rank), a
  /// whole number for integers, whose products wrap. Otherwise unused.
  double scalar = 0;

  static constexpr ReduceOp sum() { return {Kind::sum, 0}; }  ///< the plain sum
  static constexpr ReduceOp avg() { return {Kind::avg, 0}; }  ///< the sum divided by the number of ranks
  /// The average over more ranks than one communicator has: hsdp adds over two axes and divides once, at the end, by
  /// the number of all ranks.
  static constexpr ReduceOp average_over(std::int64_t n) { return {Kind::avg, static_cast<double>(n)}; }
  static constexpr ReduceOp prod() { return {Kind::prod, 0}; }  ///< the product
  static constexpr ReduceOp min() { return {Kind::min, 0}; }    ///< the smallest element
  static constexpr ReduceOp max() { return {Kind::max, 0}; }    ///< the largest element
  /// The sum of each rank's input times that rank's `factor`.
  static constexpr ReduceOp premul_sum(double factor) { return {Kind::premul_sum, factor}; }
  static constexpr ReduceOp bit_and() { return {Kind::bit_and, 0}; }  ///< the bits that all ranks have set
  static constexpr ReduceOp bit_or() { return {Kind::bit_or, 0}; }    ///< the bits that any rank has set
  static constexpr ReduceOp bit_xor() { return {Kind::bit_xor, 0}; }  ///< the bits that an odd number of ranks has set
  bool operator==(const ReduceOp&) const = default;                   ///< compares all members
};
/// Number of ReduceOp::Kind values.
inline constexpr std::size_t kReduceKinds = 9;
/// Whether the reduction is defined for elements of this type: bits of integers and bool only, no average of bool.
constexpr bool is_defined(ReduceOp::Kind kind, DType dtype) {
  if (kind >= ReduceOp::Kind::bit_and) return !is_floating(dtype);
  return dtype != DType::boolean || (kind != ReduceOp::Kind::avg && kind != ReduceOp::Kind::premul_sum);
}

/// "sum", "avg", "prod", "min", "max", "premul_sum", "bit_and", ...: the spelling of options, errors and JSON.
TESSERA_API std::string_view name_of(ReduceOp::Kind kind);
/// The inverse of name_of. Throws InvalidUsage listing the known names.
TESSERA_API ReduceOp::Kind parse_reduce_op(std::string_view name);

/// The operation called. A _v form counts as the form without.
enum class OpKind : std::uint8_t {
  all_reduce,      ///< Communicator::all_reduce()
  all_gather,      ///< Communicator::all_gather()
  reduce_scatter,  ///< Communicator::reduce_scatter()
  broadcast,       ///< Communicator::broadcast()
  reduce,          ///< Communicator::reduce()
  gather,          ///< Communicator::gather()
  scatter,         ///< Communicator::scatter()
  all_to_all,      ///< Communicator::all_to_all()
  send,            ///< Communicator::send()
  recv,            ///< Communicator::recv()
  barrier,         ///< Communicator::barrier()
};
/// Number of OpKind values.
inline constexpr std::size_t kOpKinds = 11;
/// "all_reduce", ...: the spelling of options, errors and JSON.
TESSERA_API std::string_view name_of(OpKind kind);
/// The inverse of name_of. Throws InvalidUsage listing the known names.
TESSERA_API OpKind parse_op_kind(std::string_view name);

/// The peer of a recv() from any rank.
inline constexpr int kAnyRank = -1;
/// The largest tag of a message.
inline constexpr int kMaxTag = (1 << 20) - 1;

/// Settings of one operation; all are optional.
struct OpOptions {
  /// The operation starts after the work that this stream holds now. Host backends run that work before they start: an
  /// immediate stream has none left; a lazy one runs its queue up to this point.
  Stream* after = nullptr;
  /// Overrides the communicator's timeout (TESSERA_TIMEOUT). 1 ms or more.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// Appears in errors and traces beside the operation's name. Must stay valid until the Work is done: a literal or a
  /// unit's name.
  std::string_view label = {};
  /// The tag of send() and recv(): 0 to kMaxTag. A receive takes messages of its tag only. Not for the parts of a
  /// batch, which have tags of their own.
  int tag = 0;
  /// The place where recv() writes the rank of the sender before the Work is done, for kAnyRank; may be null. Must stay
  /// valid until then.
  int* source = nullptr;
};

/// One operation of a batch.
struct P2POp {
  /// Reads `data`; a send to rank `peer`.
  static P2POp send(ConstView data, int peer, int tag = 0) { return {true, data, {}, peer, tag}; }
  /// Writes `data`; a receive from rank `peer`.
  static P2POp recv(View data, int peer, int tag = 0) { return {false, {}, data, peer, tag}; }
  bool sends = false;  ///< true: uses `in`; false: uses `out`
  ConstView in = {};   ///< what is sent
  View out = {};       ///< destination of the message
  int peer = 0;        ///< rank in the communicator; of a receive also kAnyRank
  int tag = 0;         ///< see OpOptions::tag
};

/// The memory of Communicator::allocate.
enum class MemoryKind : std::uint8_t {
  host,    ///< host memory: a shared window, registered memory, ... whatever the backend moves fastest
  device,  ///< the memory of the backend's device
};

/// What a backend supports. The same on every rank.
struct Capabilities {
  std::string backend;               ///< the name, as in TESSERA_BACKEND
  std::vector<DType> dtypes;         ///< supported by every operation; engines need f32, f64, u8
  std::vector<MemoryKind> memory;    ///< supported by allocate()
  bool moves_nothing = false;        ///< supports memory of device meta, which has no data
  bool shares_memory = false;        ///< all ranks are on one host and map each other's memory
  bool splits_share_memory = false;  ///< communicators split from it may share memory
  bool message_tags = false;         ///< send() and recv() take tags other than 0
  bool any_source = false;           ///< recv() takes kAnyRank
  bool deterministic = true;         ///< sums follow one tree (docs/collectives.md): bitwise equal everywhere
  std::vector<std::string>
      algorithms;  ///< "all_reduce=direct", "all_reduce=symmetric", ...: what TESSERA_ALGO may name
  /// Largest relative error of a sum of n 16-bit elements, in units of the last place of the result (1/2: rounded
  /// once).
  double rounding_ulps = 0.5;
};

}  // namespace tessera::comm
