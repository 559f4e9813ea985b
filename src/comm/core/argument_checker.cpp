#include "tessera/comm/core/argument_checker.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace tessera::comm {
namespace {

std::string number(std::size_t value) { return std::to_string(value); }

/// Uses std::less, which also orders unrelated pointers.
bool overlaps(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  if (a_bytes == 0 || b_bytes == 0) return false;
  const auto* a_first = static_cast<const std::byte*>(a);
  const auto* b_first = static_cast<const std::byte*>(b);
  const std::less<> before;
  return before(a_first, b_first + b_bytes) && before(b_first, a_first + a_bytes);
}

}  // namespace

void ArgumentChecker::fail(const std::string& text) const {
  throw InvalidUsage(std::string(name_of(call_.kind)) + ": " + text);
}

void ArgumentChecker::reduce_op() const {
  const ReduceOp& op = call_.op;
  if (op.kind == ReduceOp::Kind::avg &&
      (op.scalar < 0 || !std::isfinite(op.scalar) || op.scalar != std::floor(op.scalar)))
    fail("avg divides by a whole number above 0, not " + std::to_string(op.scalar));
}

void ArgumentChecker::root() const {
  if (call_.root < 0 || call_.root >= size_)
    fail("root is " + std::to_string(call_.root) + ", needs 0 to " + std::to_string(size_ - 1));
}

void ArgumentChecker::peer() const {
  if (call_.root < 0 || call_.root >= size_ || call_.root == rank_)
    fail("peer is " + std::to_string(call_.root) + ", needs another rank than " + std::to_string(rank_) + ", 0 to " +
         std::to_string(size_ - 1));
}

void ArgumentChecker::views() const {
  if (call_.in.dtype != call_.out.dtype)
    fail("in is " + std::string(name_of(call_.in.dtype)) + " but out is " + std::string(name_of(call_.out.dtype)));
  const auto& dtypes = capabilities_.dtypes;
  if (std::find(dtypes.begin(), dtypes.end(), call_.in.dtype) == dtypes.end()) {
    std::string known;
    for (const DType dtype : dtypes) known += " " + std::string(name_of(dtype));
    throw Unsupported(std::string(name_of(call_.kind)) + ": backend " + capabilities_.backend + " does not support " +
                      std::string(name_of(call_.in.dtype)) + "; supported:" + known);
  }
  if (call_.in.data == nullptr && call_.in.count != 0) fail("in is null with " + number(call_.in.count) + " elements");
  if (call_.out.data == nullptr && call_.out.count != 0)
    fail("out is null with " + number(call_.out.count) + " elements");
  for (const Device& device : {call_.in.device, call_.out.device}) {
    if (device.type == DeviceType::meta && capabilities_.moves_nothing) continue;
    const MemoryKind needs = device.type == DeviceType::cpu ? MemoryKind::host : MemoryKind::device;
    const auto& memory = capabilities_.memory;
    if (device.type == DeviceType::meta || std::find(memory.begin(), memory.end(), needs) == memory.end())
      throw Unsupported(std::string(name_of(call_.kind)) + ": backend " + capabilities_.backend +
                        " does not support memory of device " + name_of(device));
  }
}

void ArgumentChecker::out_count(std::size_t needed, std::string_view why) const {
  if (call_.out.count != needed)
    fail("out has " + number(call_.out.count) + " elements, needs " + number(needed) + " (" + std::string(why) + ")");
}

void ArgumentChecker::parts(std::size_t have, std::size_t per_rank, std::string_view which) const {
  const std::size_t needed = per_rank * static_cast<std::size_t>(size_);
  if (have != needed)
    fail(std::string(which) + " has " + number(have) + " elements, needs " + number(needed) + " (" + number(per_rank) +
         " per rank x " + std::to_string(size_) + " ranks)");
}

void ArgumentChecker::out_parts(std::size_t per_rank) const { parts(call_.out.count, per_rank, "out"); }
void ArgumentChecker::in_parts(std::size_t per_rank) const { parts(call_.in.count, per_rank, "in"); }

void ArgumentChecker::multiple_of_size(std::size_t count) const {
  if (count % static_cast<std::size_t>(size_) != 0)
    fail("in has " + number(count) + " elements, needs a multiple of the " + std::to_string(size_) + " ranks");
}

void ArgumentChecker::counts(std::span<const std::size_t> counts, std::size_t total, std::string_view which) const {
  if (counts.size() != static_cast<std::size_t>(size_))
    fail(number(counts.size()) + " counts given, needs one for each of the " + std::to_string(size_) + " ranks");
  const std::size_t sum = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  if (sum != total)
    fail(std::string(which) + " has " + number(total) + " elements, the counts add up to " + number(sum));
}

void ArgumentChecker::own_part(std::span<const std::size_t> counts, std::size_t count, std::string_view which) const {
  const std::size_t own = counts[static_cast<std::size_t>(rank_)];
  if (own != count)
    fail(std::string(which) + " has " + number(count) + " elements, needs " + number(own) + " (counts[" +
         std::to_string(rank_) + "])");
}

void ArgumentChecker::overlap(const void* in_place_in, std::string_view how) const {
  if (!overlaps(call_.in.data, call_.in.bytes(), call_.out.data, call_.out.bytes())) return;
  if (call_.in.data != in_place_in) fail("in and out overlap; " + std::string(how));
}

void ArgumentChecker::overlap_same_start() const { overlap(call_.out.data, "in place means that they are the same"); }

void ArgumentChecker::overlap_in_is_part_of_out(std::size_t element) const {
  overlap(static_cast<const std::byte*>(call_.out.data) + element * size_of(call_.out.dtype),
          "in place means that in is this rank's part of out");
}

void ArgumentChecker::overlap_out_is_part_of_in(std::size_t element) const {
  const auto* start = static_cast<const std::byte*>(call_.in.data) + element * size_of(call_.in.dtype);
  if (overlaps(call_.in.data, call_.in.bytes(), call_.out.data, call_.out.bytes()) && call_.out.data != start)
    fail("in and out overlap; in place means that out is this rank's part of in");
}

void ArgumentChecker::overlap_never() const { overlap(nullptr, "this operation does not work in place"); }

}  // namespace tessera::comm
