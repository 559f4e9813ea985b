#include "tests/backends/nccl/fake_clique.h"

#include <algorithm>
#include <cstring>

namespace tessera::nccl_test {
namespace {

using Kind = Contribution::Kind;

Bytes bytes_at(const void* data, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  return {begin, begin + bytes};
}

/// Reduces elements `first` .. of all inputs.
Bytes reduced(const std::vector<Contribution>& parts, const std::vector<Bytes>& inputs) {
  const DType dtype = dtype_of_vendor(parts.front().type);
  Bytes out(inputs.front().size());
  conformance::with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = conformance::SumOf<T>;
    std::vector<S> values(inputs.size());
    for (std::size_t i = 0; i < out.size() / sizeof(T); ++i) {
      for (std::size_t r = 0; r < inputs.size(); ++r) {
        T raw;
        std::memcpy(&raw, inputs[r].data() + i * sizeof(T), sizeof(T));
        values[r] = static_cast<S>(raw);
        if (parts[r].op.kind == ReduceOp::Kind::premul_sum)
          values[r] = conformance::combine<S>(ReduceOp::Kind::prod, values[r], static_cast<S>(parts[r].op.scalar));
      }
      S sum = conformance::tree(parts.front().op.kind, values, 0, values.size());
      if constexpr (!std::is_same_v<S, bool>)
        if (parts.front().op.kind == ReduceOp::Kind::avg) sum = static_cast<S>(sum / static_cast<S>(values.size()));
      const T result = static_cast<T>(sum);
      std::memcpy(out.data() + i * sizeof(T), &result, sizeof(T));
    }
  });
  return out;
}

void put(void* to, const Bytes& from, std::size_t offset, std::size_t bytes) {
  if (to != nullptr)
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(offset), bytes, static_cast<std::byte*>(to));
}

void compute(const std::vector<Contribution>& parts) {
  const Contribution& first = parts.front();
  const auto n = parts.size();
  const std::size_t bytes = first.count * base::size_of(dtype_of_vendor(first.type));
  const auto root = static_cast<std::size_t>(first.root);
  if (first.kind == Kind::broadcast) {
    const Bytes whole = bytes_at(parts[root].in, bytes);
    for (const Contribution& part : parts) put(part.out, whole, 0, bytes);
    return;
  }
  std::vector<Bytes> inputs;  // copies: outputs may overlap them
  for (const Contribution& part : parts)
    inputs.push_back(bytes_at(part.in, first.kind == Kind::reduce_scatter ? bytes * n : bytes));
  if (first.kind == Kind::all_gather) {
    for (const Contribution& part : parts)
      for (std::size_t r = 0; r < n; ++r) put(static_cast<std::byte*>(part.out) + r * bytes, inputs[r], 0, bytes);
    return;
  }
  const Bytes sum = reduced(parts, inputs);
  for (std::size_t r = 0; r < n; ++r) {
    if (first.kind == Kind::reduce && r != root) continue;
    put(parts[r].out, sum, first.kind == Kind::reduce_scatter ? r * bytes : 0, bytes);
  }
}

bool same_call(const Contribution& a, const Contribution& b) {
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op.kind == b.op.kind && a.root == b.root;
}

}  // namespace

bool Clique::join(std::uint64_t number, int rank, const Contribution& part) {
  Round& round = rounds[number];
  round.parts.resize(static_cast<std::size_t>(size));
  round.parts[static_cast<std::size_t>(rank)] = part;
  if (round.done) return true;
  std::vector<Contribution> parts;
  for (const auto& one : round.parts)
    if (one && same_call(*one, part)) parts.push_back(*one);
  if (parts.size() < static_cast<std::size_t>(size)) return false;
  if (std::any_of(parts.begin(), parts.end(), [&](const auto& one) { return one.offset != part.offset; }))
    fake_state().complain("a reduction adds other memory of a rank, since its windows have other offsets");
  compute(parts);
  round.done = true;
  return true;
}

void Clique::match(int sender, int receiver) {
  auto& from = sent[{sender, receiver}];
  auto& to = received[{sender, receiver}];
  while (!from.empty() && !to.empty() && from.front()->bytes == to.front()->bytes) {
    std::memcpy(to.front()->data, from.front()->data, from.front()->bytes);
    from.front()->done = to.front()->done = true;
    from.pop_front();
    to.pop_front();
  }
}

DType dtype_of_vendor(ncclDataType_t type) {
  switch (type) {
    case ncclFloat64:
      return DType::f64;
    case ncclFloat16:
      return DType::f16;
    case ncclBfloat16:
      return DType::bf16;
    case ncclInt8:
      return DType::i8;
    case ncclUint8:
      return DType::u8;
    case ncclInt32:
      return DType::i32;
    case ncclInt64:
      return DType::i64;
    case ncclUint32:
      return DType::u32;
    case ncclUint64:
      return DType::u64;
    default:
      return DType::f32;
  }
}

}  // namespace tessera::nccl_test
