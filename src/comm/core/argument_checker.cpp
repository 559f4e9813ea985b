#include "tessera/comm/core/argument_checker.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "tessera/base/deadline.h"
#include "tessera/comm/core/op_traits.h"

namespace tessera::comm {
namespace {

std::string number(std::size_t value) { return std::to_string(value); }

/// The sum of counts that elements() has checked.
std::size_t sum_of(std::span<const std::size_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

}  // namespace

void ArgumentChecker::check(bool by_counts) const {
  const OpKind kind = call_.kind;
  if (kind == OpKind::barrier) return;
  if (is_message(kind)) peer();
  if (has_root(kind)) root();
  if (reduces(kind)) reduce_op();
  views();
  const bool is_complete = !has_root(kind) || rank_ == call_.root;  // in and out are both used
  if (kind == OpKind::all_to_all) return exchange(by_counts);
  if (parts_of_in(kind) || parts_of_out(kind)) return division(by_counts, is_complete);
  if (is_message(kind) || !is_complete) return;
  equal_counts();
  if (call_.in.data != call_.out.data && overlap(call_))
    fail("in and out overlap; in place means that they are the same");
}

void ArgumentChecker::fail(const std::string& text) const {
  throw InvalidUsage(std::string(name_of(call_.kind)) + ": " + text);
}

void ArgumentChecker::unsupported(const std::string& what) const {
  throw Unsupported(std::string(name_of(call_.kind)) + ": backend " + capabilities_.backend + " does not support " +
                    what);
}

void ArgumentChecker::reduce_op() const {
  const ReduceOp& op = call_.op;
  if (!is_defined(op.kind, call_.in.dtype))
    fail(std::string(name_of(op.kind)) + " of " + std::string(name_of(call_.in.dtype)) + " is not defined");
  if (op.kind == ReduceOp::Kind::avg &&
      (op.scalar < 0 || !std::isfinite(op.scalar) || op.scalar != std::floor(op.scalar)))
    fail("avg divides by a whole number above 0, not " + std::to_string(op.scalar));
  // Processors differ in the integer that they make of any other number.
  constexpr double kIntegers = 0x1p63;
  if ((op.kind == ReduceOp::Kind::avg || op.kind == ReduceOp::Kind::premul_sum) && !is_floating(call_.in.dtype) &&
      !(std::abs(op.scalar) < kIntegers))
    fail(std::string(name_of(op.kind)) + " of " + std::string(name_of(call_.in.dtype)) +
         " needs a number between -2^63 and 2^63, not " + std::to_string(op.scalar));
  if (op.kind == ReduceOp::Kind::premul_sum && !is_floating(call_.in.dtype) && op.scalar != std::floor(op.scalar))
    fail("premul_sum of " + std::string(name_of(call_.in.dtype)) + " multiplies by a whole number, not " +
         std::to_string(op.scalar));
}

void ArgumentChecker::root() const {
  if (call_.root < 0 || call_.root >= size_)
    fail("root is " + std::to_string(call_.root) + ", needs 0 to " + std::to_string(size_ - 1));
}

void ArgumentChecker::peer() const {
  if (call_.tag < 0 || call_.tag > kMaxTag)
    fail("tag is " + std::to_string(call_.tag) + ", needs 0 to " + std::to_string(kMaxTag));
  if (call_.tag != 0 && !capabilities_.message_tags) unsupported("tags other than 0");
  if (call_.kind == OpKind::recv && call_.root == kAnyRank) {
    if (!capabilities_.any_source) unsupported("receiving from any rank");
    return;
  }
  if (call_.root < 0 || call_.root >= size_ || call_.root == rank_)
    fail("peer is " + std::to_string(call_.root) + ", needs another rank than " + std::to_string(rank_) + ", 0 to " +
         std::to_string(size_ - 1));
}

void ArgumentChecker::views() const {
  if (call_.in.dtype != call_.out.dtype)
    fail("in is " + std::string(name_of(call_.in.dtype)) + " but out is " + std::string(name_of(call_.out.dtype)));
  const auto& dtypes = capabilities_.dtypes;
  if (std::ranges::find(dtypes, call_.in.dtype) == dtypes.end()) {
    std::string known;
    for (const DType dtype : dtypes) known += " " + std::string(name_of(dtype));
    throw Unsupported(std::string(name_of(call_.kind)) + ": backend " + capabilities_.backend + " does not support " +
                      std::string(name_of(call_.in.dtype)) + "; supported:" + known);
  }
  elements("in", call_.in.count);
  elements("out", call_.out.count);
  if (call_.in.data == nullptr && call_.in.count != 0) fail("in is null with " + number(call_.in.count) + " elements");
  if (call_.out.data == nullptr && call_.out.count != 0)
    fail("out is null with " + number(call_.out.count) + " elements");
  for (const Device& device : {call_.in.device, call_.out.device}) {
    if (device.type == DeviceType::meta && capabilities_.moves_nothing) continue;
    const MemoryKind needs = device.type == DeviceType::cpu ? MemoryKind::host : MemoryKind::device;
    const auto& memory = capabilities_.memory;
    if (device.type == DeviceType::meta || std::ranges::find(memory, needs) == memory.end())
      throw Unsupported(std::string(name_of(call_.kind)) + ": backend " + capabilities_.backend +
                        " does not support memory of device " + name_of(device) +
                        (device.type == DeviceType::cuda ? "; pass the device to init() as InitOptions::device" : ""));
  }
}

void ArgumentChecker::require_room(std::string_view which, std::size_t count, std::size_t ranks) const {
  if (count <= PTRDIFF_MAX / size_of(call_.in.dtype) / ranks) return;
  fail(std::string(which) + (ranks == 1 ? " has " : " needs ") + number(count) + " " +
       std::string(name_of(call_.in.dtype)) + (ranks == 1 ? "" : " per rank x " + number(ranks) + " ranks") +
       ", more than memory can hold; was the count negative, or did it overflow?");
}

void ArgumentChecker::equal_counts() const {
  if (call_.out.count != call_.in.count)
    fail("out has " + number(call_.out.count) + " elements, needs " + number(call_.in.count) + " (as many as in)");
}

void ArgumentChecker::division(bool by_counts, bool has_whole) const {
  const bool gathers = parts_of_out(call_.kind);
  const ConstView out = call_.out;
  const ConstView& whole = gathers ? out : call_.in;
  const ConstView& part = gathers ? call_.in : out;
  const std::string_view whole_name = gathers ? "out" : "in";
  const std::string_view part_name = gathers ? "in" : "out";
  if (!by_counts) elements(whole_name, part.count, static_cast<std::size_t>(size_));
  std::size_t begin = part.count * static_cast<std::size_t>(rank_);
  if (by_counts) {
    const std::span<const std::size_t> lengths = gathers ? call_.out_counts : call_.in_counts;
    counts(lengths, has_whole ? std::optional(whole.count) : std::nullopt, whole_name);
    const std::size_t own = lengths[static_cast<std::size_t>(rank_)];
    if (own != part.count)
      fail(std::string(part_name) + " has " + number(part.count) + " elements, needs " + number(own) + " (counts[" +
           std::to_string(rank_) + "])");
    begin = sum_of(lengths.first(static_cast<std::size_t>(rank_)));
  } else if (const std::size_t needed = part.count * static_cast<std::size_t>(size_);
             has_whole && whole.count != needed) {
    fail(std::string(whole_name) + " has " + number(whole.count) + " elements, needs " + number(needed) + " (" +
         number(part.count) + " per rank x " + std::to_string(size_) + " ranks)");
  }
  if (!has_whole) return;
  const std::byte* const place = static_cast<const std::byte*>(whole.data) + begin * size_of(whole.dtype);
  if (part.data != place && overlap(call_))
    fail("in and out overlap; in place means that " + std::string(part_name) + " is this rank's part of " +
         std::string(whole_name));
}

void ArgumentChecker::exchange(bool by_counts) const {
  if (by_counts) {
    counts(call_.in_counts, call_.in.count, "in");
    counts(call_.out_counts, call_.out.count, "out");
    const auto own = static_cast<std::size_t>(rank_);
    if (call_.in_counts[own] != call_.out_counts[own])
      fail("in_counts[" + number(own) + "] is " + number(call_.in_counts[own]) +
           " but out_counts of the same rank is " + number(call_.out_counts[own]));
  } else {
    equal_counts();
    if (call_.in.count % static_cast<std::size_t>(size_) != 0)
      fail("in has " + number(call_.in.count) + " elements, needs a multiple of the " + std::to_string(size_) +
           " ranks");
  }
  if (overlap(call_)) fail("in and out overlap; this operation does not work in place");
}

void ArgumentChecker::counts(std::span<const std::size_t> counts, std::optional<std::size_t> total,
                             std::string_view which) const {
  if (counts.size() != static_cast<std::size_t>(size_))
    fail(number(counts.size()) + " counts given, needs one for each of the " + std::to_string(size_) + " ranks");
  std::size_t sum = 0;
  for (const std::size_t count : counts) {
    elements("a part of " + std::string(which), count);
    elements("the sum of the counts of " + std::string(which), sum += count);  // two checked ones don't overflow
  }
  if (total && sum != *total)
    fail(std::string(which) + " has " + number(*total) + " elements, the counts add up to " + number(sum));
}

std::chrono::milliseconds checked_timeout(std::string_view call, std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0)
    throw InvalidUsage(std::string(call) + ": timeout is " + std::to_string(timeout.count()) +
                       " ms, needs 1 ms or more; leave it out for the communicator's own");
  return std::min(timeout, base::kLongestTime);
}

void check_bytes(std::string_view call, std::size_t bytes) {
  if (bytes > PTRDIFF_MAX)
    throw InvalidUsage(std::string(call) + ": " + number(bytes) +
                       " bytes are more than memory can hold; was the size negative, or did it overflow?");
}

void check_group(std::span<const int> members, const OpOptions& options, int rank, int size) {
  const auto fail = [](const std::string& text) { throw InvalidUsage("create_group: " + text); };
  if (options.tag < 0 || options.tag > kMaxTag)
    fail("tag is " + std::to_string(options.tag) + ", needs 0 to " + std::to_string(kMaxTag));
  if (options.after != nullptr || options.source != nullptr) fail("after and source are not for it");
  std::vector<bool> listed(static_cast<std::size_t>(size));
  for (const int member : members) {
    if (member < 0 || member >= size)
      fail("member is " + std::to_string(member) + ", needs 0 to " + std::to_string(size - 1));
    if (listed[static_cast<std::size_t>(member)]) fail("rank " + std::to_string(member) + " is listed twice");
    listed[static_cast<std::size_t>(member)] = true;
  }
  if (!listed[static_cast<std::size_t>(rank)])
    fail("this rank, " + std::to_string(rank) + ", is not a member; only members call it");
}

bool overlap(const OpDesc& call) {
  const auto* in = static_cast<const std::byte*>(call.in.data);
  const auto* out = static_cast<const std::byte*>(call.out.data);
  const std::less<> before;  // orders unrelated pointers too
  return call.in.count != 0 && call.out.count != 0 && before(in, out + call.out.bytes()) &&
         before(out, in + call.in.bytes());
}

}  // namespace tessera::comm
