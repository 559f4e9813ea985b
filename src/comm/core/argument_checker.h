// Validation of an operation's arguments.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// Throws InvalidUsage or Unsupported with the values.
class ArgumentChecker {
 public:
  ArgumentChecker(const OpDesc& call, const Capabilities& capabilities, int rank, int size)
      : call_(call), capabilities_(capabilities), rank_(rank), size_(size) {}

  /// `by_counts`: the call is a _v form, whose parts have the lengths of its counts.
  void check(bool by_counts) const;

 private:
  [[noreturn]] void fail(const std::string& text) const;
  [[noreturn]] void unsupported(const std::string& what) const;
  void root() const;
  void peer() const;
  void reduce_op() const;
  /// Checks that dtypes are equal, that the backend supports them and the devices, and that no pointer with elements is
  /// null.
  void views() const;
  /// Throws unless `ranks` times `count` elements of `which` can be memory.
  void elements(std::string_view which, std::size_t count, std::size_t ranks = 1) const {
    // 2^39 elements of at most 8 bytes fit for 2^20 ranks, and every call comes here.
    if (count >= std::size_t{1} << 39 || ranks > std::size_t{1} << 20) require_room(which, count, ranks);
  }
  void require_room(std::string_view which, std::size_t count, std::size_t ranks) const;  ///< what elements() does
  void equal_counts() const;
  /// One of in and out has a part for each rank, the other is this rank's. Without `has_whole`, only the root has the
  /// former.
  void division(bool by_counts, bool has_whole) const;
  void exchange(bool by_counts) const;
  /// The counts of the parts of `which`, which has `total` elements; none: it is another rank's.
  void counts(std::span<const std::size_t> counts, std::optional<std::size_t> total, std::string_view which) const;

  const OpDesc& call_;
  const Capabilities& capabilities_;
  const int rank_;
  const int size_;
};

/// The timeout, at most base::kLongestTime, so that any point in time plus it exists. Throws InvalidUsage for 0 or
/// less, which would end an operation before it begins.
std::chrono::milliseconds checked_timeout(std::string_view call, std::chrono::milliseconds timeout);
/// Throws InvalidUsage for more bytes than an object can have: a negative number or an overflow, most likely.
void check_bytes(std::string_view call, std::size_t bytes);
/// Throws InvalidUsage unless these are valid arguments of create_group().
void check_group(std::span<const int> members, const OpOptions& options, int rank, int size);

/// Whether `in` and `out` share memory.
bool overlap(const OpDesc& call);

}  // namespace tessera::comm
