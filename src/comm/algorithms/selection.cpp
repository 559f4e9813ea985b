// Selects an algorithm if the user doesn't. All ranks select the same one: only properties known to all are used, so
// not the lengths of an all_to_all with unequal parts.
#include <initializer_list>

#include "tessera/comm/schedule.h"

namespace tessera::comm {
namespace {

// Few ranks can all exchange at once; more contend for each other's links.
constexpr int kFew = 8;
// Up to this many bytes, the number of messages matters more than their size.
constexpr std::size_t kSmall = std::size_t{16} << 10;
// Up to this many bytes, two ranks that exchange everything and both add it are faster than two that exchange halves
// twice: equal bytes sent, half the rounds. Measured over tcp and ucx; at 1 MiB they are equal.
constexpr std::size_t kAddTwice = std::size_t{512} << 10;
// Up to this many bytes of one all_to_all block, Bruck's algorithm, which sends a block several times, is faster.
constexpr std::size_t kSmallBlock = 256;
// From this many bytes on, a chain fills quickly enough to be faster than a tree.
constexpr std::size_t kLong = std::size_t{4} << 20;

bool power_of_two(int ranks) { return (ranks & (ranks - 1)) == 0; }

std::string_view first_accepted(const CollectiveSpec& spec, std::initializer_list<std::string_view> wanted) {
  for (const std::string_view name : wanted)
    if (refusal(spec, name).empty()) return name;
  return "direct";
}

std::string_view choose_all_reduce(const CollectiveSpec& spec, std::size_t bytes) {
  if (spec.ranks == 2 && bytes <= kAddTwice) return "symmetric";
  if (bytes <= kSmall) {
    if (spec.ranks <= kFew) return first_accepted(spec, {"recursive_doubling", "symmetric"});
    return first_accepted(spec, {"recursive_doubling"});
  }
  if (spec.ranks <= kFew) return "direct";
  // If the number of ranks is not a power of two, halving sends everything once more.
  if (power_of_two(spec.ranks)) return first_accepted(spec, {"rabenseifner", "ring"});
  return first_accepted(spec, {"ring"});
}

}  // namespace

std::string_view default_algorithm(const CollectiveSpec& spec) {
  const std::size_t bytes = spec.count * size_of(spec.dtype);
  const bool few = spec.ranks <= kFew;
  const bool small = bytes <= kSmall;
  switch (spec.kind) {
    case OpKind::all_reduce:
      return choose_all_reduce(spec, bytes);
    case OpKind::reduce_scatter:
      if (small && spec.ranks > 2 && power_of_two(spec.ranks)) return first_accepted(spec, {"recursive_halving"});
      return few ? "direct" : first_accepted(spec, {"ring"});
    case OpKind::all_gather:
      if (small && spec.ranks > 2) return power_of_two(spec.ranks) ? "recursive_doubling" : "bruck";
      return few ? "direct" : "ring";
    case OpKind::broadcast:
      if (spec.ranks == 2) return "direct";
      return bytes < kLong ? "binomial" : "pipelined";
    case OpKind::reduce:
      return spec.ranks == 2 ? "direct" : first_accepted(spec, {"binomial"});
    case OpKind::gather:
    case OpKind::scatter:
      return small && spec.ranks > 2 ? "binomial" : "direct";
    case OpKind::all_to_all:
      if (!spec.in_starts.empty()) return few ? "direct" : "pairwise";
      if (!few && bytes / static_cast<std::size_t>(spec.ranks) <= kSmallBlock) return "bruck";
      return few ? "direct" : "pairwise";
    case OpKind::barrier:
      return "dissemination";
    case OpKind::send:
    case OpKind::recv:
      break;
  }
  return "direct";
}

}  // namespace tessera::comm
