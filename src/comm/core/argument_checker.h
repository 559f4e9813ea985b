// Validation of an operation's arguments. Each function throws InvalidUsage or Unsupported with the values.
#pragma once

#include <span>
#include <string_view>

#include "tessera/comm/communicator.h"

namespace tessera::comm {

class ArgumentChecker {
 public:
  ArgumentChecker(const OpDesc& call, const Capabilities& capabilities, int rank, int size)
      : call_(call), capabilities_(capabilities), rank_(rank), size_(size) {}

  void reduce_op() const;
  void root() const;
  void peer() const;
  /// Checks that dtypes are equal, that the backend supports them and the devices, and that no pointer with elements is
  /// null.
  void views() const;
  void out_count(std::size_t needed, std::string_view why) const;
  void out_parts(std::size_t per_rank) const;
  void in_parts(std::size_t per_rank) const;
  void multiple_of_size(std::size_t count) const;
  void counts(std::span<const std::size_t> counts, std::size_t total, std::string_view which) const;
  void own_part(std::span<const std::size_t> counts, std::size_t count, std::string_view which) const;
  void overlap_same_start() const;
  void overlap_in_is_part_of_out(std::size_t element) const;
  void overlap_out_is_part_of_in(std::size_t element) const;
  void overlap_never() const;

 private:
  [[noreturn]] void fail(const std::string& text) const;
  void overlap(const void* in_place_in, std::string_view how) const;
  void parts(std::size_t have, std::size_t per_rank, std::string_view which) const;
  const OpDesc& call_;
  const Capabilities& capabilities_;
  const int rank_;
  const int size_;
};

}  // namespace tessera::comm
