// One case beyond 2^31 bytes for each operation. Only the two buffers are held: the data has a prime period, so that
// data displaced by a power of two is detected, and it is compared one period at a time.
#include <algorithm>
#include <cstring>
#include <memory>

#include "tests/conformance/cases.h"

namespace tessera::conformance {
namespace {

constexpr std::size_t kPeriod = 1000003;

/// The input of one rank, or the sum of the inputs of several.
class Pattern {
 public:
  explicit Pattern(const std::vector<int>& ranks) : period_(kPeriod) {
    for (std::size_t i = 0; i < kPeriod; ++i) {
      unsigned sum = 0;
      for (const int rank : ranks)
        sum += static_cast<unsigned>(scramble(static_cast<std::uint64_t>(rank) * 7919 + i + 1));
      period_[i] = static_cast<std::byte>(sum);
    }
  }
  /// Writes elements [first, first + count).
  void fill(std::byte* to, std::size_t first, std::size_t count) const {
    for_each_chunk(first, count, [&](std::size_t done, const std::byte* from, std::size_t length) {
      std::memcpy(to + done, from, length);
      return true;
    });
  }
  bool equals(const std::byte* data, std::size_t first, std::size_t count) const {
    return for_each_chunk(first, count, [&](std::size_t done, const std::byte* want, std::size_t length) {
      return std::memcmp(data + done, want, length) == 0;
    });
  }

 private:
  template <class F>
  bool for_each_chunk(std::size_t first, std::size_t count, F&& use) const {
    for (std::size_t done = 0; done < count;) {
      const std::size_t at = (first + done) % kPeriod;
      const std::size_t length = std::min(kPeriod - at, count - done);
      if (!use(done, period_.data() + at, length)) return false;
      done += length;
    }
    return true;
  }
  Bytes period_;
};

/// Memory whose pages are touched only by writes.
using Block = std::unique_ptr<std::byte[]>;
Block block(std::size_t bytes) { return Block(new std::byte[bytes]); }

bool out_is_right(OpKind kind, const std::byte* out, int ranks, int rank, std::size_t count) {
  const auto own = static_cast<std::size_t>(rank) * count;
  std::vector<int> all;
  for (int r = 0; r < ranks; ++r) all.push_back(r);
  switch (kind) {
    case OpKind::all_reduce:
      return Pattern(all).equals(out, 0, count);
    case OpKind::reduce:
      return rank != kHugeRoot || Pattern(all).equals(out, 0, count);
    case OpKind::reduce_scatter:
      return Pattern(all).equals(out, own, count);
    case OpKind::broadcast:
      return Pattern({kHugeRoot}).equals(out, 0, count);
    case OpKind::scatter:
      return Pattern({kHugeRoot}).equals(out, own, count);
    default:
      break;
  }
  if (kind == OpKind::gather && rank != kHugeRoot) return true;
  const std::size_t first = kind == OpKind::all_to_all ? own : 0;
  return std::all_of(all.begin(), all.end(), [&](int r) {
    return Pattern({r}).equals(out + static_cast<std::size_t>(r) * count, first, count);
  });
}

}  // namespace

std::string run_huge(Communicator& comm, OpKind kind, std::size_t bytes, const Tamper& tamper) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  const bool in_parts = kind == OpKind::reduce_scatter || kind == OpKind::scatter || kind == OpKind::all_to_all;
  const bool out_parts = kind == OpKind::all_gather || kind == OpKind::gather || kind == OpKind::all_to_all;
  const std::size_t count = in_parts || out_parts ? bytes / ranks + 1 : bytes;
  const std::size_t in_count = in_parts ? count * ranks : count;
  const std::size_t out_count = out_parts ? count * ranks : count;
  const Block in = block(in_count);
  const Block out = block(out_count);
  const Pattern own({comm.rank()});
  own.fill(in.get(), 0, in_count);
  const Case c{kind, DType::i8, ReduceOp::Kind::sum, count, false, false, false, 0};
  issue(comm, c, {in.get(), in_count, DType::i8, {}}, {out.get(), out_count, DType::i8, {}}, ReduceOp::sum(), kHugeRoot)
      .wait();
  if (tamper) tamper(out.get(), out_count);
  const std::string where = c.name(comm.size()) + " on rank " + std::to_string(comm.rank());
  if (!out_is_right(kind, out.get(), comm.size(), comm.rank(), count)) return where + ": wrong";
  return own.equals(in.get(), 0, in_count) ? "" : where + ": the input was changed";
}

}  // namespace tessera::conformance
