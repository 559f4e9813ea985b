#include "tests/comm/schedule_support.h"

#include <algorithm>

namespace tessera::comm_test {
namespace {

/// Values +-1, +-2, +-3; for products mostly 1, with factors of 1, so that sixteen of them fit into sixteen bits.
Bytes whole_numbers(const CollectiveSpec& spec, int rank, std::size_t count, std::uint64_t seed) {
  Bytes bytes(count * size_of(spec.dtype));
  conformance::with_type(spec.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t bits = conformance::scramble(seed * 31 + static_cast<std::uint64_t>(rank) * 1009 + i * 13);
      int number = static_cast<int>(bits % 3) + 1;
      if (spec.reduce == ReduceOp::Kind::prod) number = bits % 8 == 0 ? 2 : 1;
      if (spec.reduce == ReduceOp::Kind::premul_sum) number = 1;
      if ((bits & 64) != 0) number = -number;
      T value{};
      if constexpr (std::is_integral_v<T>) {
        value = static_cast<T>(number);
      } else {
        value = T(static_cast<float>(number));
      }
      std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
  });
  return bytes;
}

Bytes slice_bytes(const Bytes& bytes, std::size_t offset, std::size_t count, std::size_t size) {
  const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(offset * size);
  return {first, first + static_cast<std::ptrdiff_t>(count * size)};
}

std::vector<std::size_t> starts_or_equal(const CollectiveSpec& spec, const std::vector<std::size_t>& starts) {
  if (!starts.empty()) return starts;
  std::vector<std::size_t> equal;
  for (int r = 0; r <= spec.ranks; ++r)
    equal.push_back(spec.count / static_cast<std::size_t>(spec.ranks) * static_cast<std::size_t>(r));
  return equal;
}

Bytes joined(const std::vector<Bytes>& parts) {
  Bytes all;
  for (const Bytes& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Bytes expected_of(const ScheduleWorld& world, const std::vector<Bytes>& inputs, std::size_t rank) {
  const CollectiveSpec& spec = world.specs[rank];
  const auto root = static_cast<std::size_t>(spec.root);
  const std::size_t size = size_of(spec.dtype);
  const auto sum = [&] { return conformance::reduce(spec.dtype, {spec.reduce, 0}, inputs); };
  const auto own = [&](const Bytes& all, const std::vector<std::size_t>& starts) {
    const auto at = starts_or_equal(spec, starts);
    return slice_bytes(all, at[rank], at[rank + 1] - at[rank], size);
  };
  switch (spec.kind) {
    case OpKind::all_reduce:
      return sum();
    case OpKind::reduce:
      return rank == root ? sum() : Bytes{};
    case OpKind::reduce_scatter:
      return own(sum(), spec.in_starts);
    case OpKind::all_gather:
      return joined(inputs);
    case OpKind::gather:
      return rank == root ? joined(inputs) : Bytes{};
    case OpKind::broadcast:
      return inputs[root];
    case OpKind::scatter:
      return own(inputs[root], spec.in_starts);
    case OpKind::all_to_all: {
      Bytes all;
      for (std::size_t from = 0; from < inputs.size(); ++from) {
        const auto at = starts_or_equal(spec, world.specs[from].in_starts);
        const Bytes slice = slice_bytes(inputs[from], at[rank], at[rank + 1] - at[rank], size);
        all.insert(all.end(), slice.begin(), slice.end());
      }
      return all;
    }
    default:
      return {};
  }
}

}  // namespace

std::vector<Named> algorithms(bool ordered_only) {
  std::vector<Named> all;
  for (const std::string& text : known_algorithms(ordered_only)) {
    const std::size_t separator = text.find('=');
    all.push_back({parse_op_kind(text.substr(0, separator)), text.substr(separator + 1)});
  }
  return all;
}

std::vector<Bytes> make_inputs(const ScheduleWorld& world, bool exact, std::uint64_t seed) {
  std::vector<Bytes> inputs;
  for (std::size_t r = 0; r < world.specs.size(); ++r) {
    const int rank = static_cast<int>(r);
    const CollectiveSpec& spec = world.specs[r];
    inputs.push_back(exact ? whole_numbers(spec, rank, world.in_count(rank), seed)
                           : conformance::make_input(spec.dtype, seed, rank, world.in_count(rank)));
  }
  return inputs;
}

std::vector<Bytes> expected(const ScheduleWorld& world, const std::vector<Bytes>& inputs) {
  std::vector<Bytes> all;
  for (std::size_t r = 0; r < world.specs.size(); ++r) all.push_back(expected_of(world, inputs, r));
  return all;
}

std::string difference(const ScheduleWorld& world, const std::vector<Bytes>& outputs,
                       const std::vector<Bytes>& wanted) {
  for (std::size_t r = 0; r < outputs.size(); ++r) {
    const DType dtype = world.specs[r].dtype;
    const std::string name = "rank " + std::to_string(r);
    if (outputs[r].size() != wanted[r].size()) return name + " has an output of another length";
    const auto at =
        conformance::first_difference(dtype, outputs[r].data(), wanted[r].data(), wanted[r].size() / size_of(dtype));
    if (at >= 0) return name + " differs at element " + std::to_string(at);
  }
  return "";
}

std::string verify(const ScheduleWorld& world, bool exact, int orders) {
  if (const std::string error = world.check(); !error.empty()) return error;
  if (const std::string error = world.race(); !error.empty()) return error;
  const std::vector<Bytes> inputs = make_inputs(world, exact, 5);
  const std::vector<Bytes> wanted = expected(world, inputs);
  for (int seed = 0; seed < orders; ++seed) {
    std::vector<Bytes> outputs;
    if (const std::string error = world.run(static_cast<std::uint64_t>(seed), inputs, outputs); !error.empty())
      return error;
    if (const std::string error = difference(world, outputs, wanted); !error.empty()) return error;
  }
  return "";
}

std::string describe(const CollectiveSpec& spec, const std::string& algorithm) {
  return std::string(name_of(spec.kind)) + "=" + algorithm + " ranks " + std::to_string(spec.ranks) + " count " +
         std::to_string(spec.count) + " " + std::string(name_of(spec.dtype)) + " " + std::string(name_of(spec.reduce)) +
         " root " + std::to_string(spec.root) + (spec.ordered ? " ordered" : "");
}

std::vector<CollectiveSpec> with_parts(CollectiveSpec spec, std::uint64_t seed) {
  const auto ranks = static_cast<std::size_t>(spec.ranks);
  const auto length = [&](std::size_t a, std::size_t b) {
    const std::uint64_t bits = conformance::scramble(seed * 77 + a * 1000 + b + 1);
    return bits % 4 == 0 ? 0 : static_cast<std::size_t>(bits >> 8) % 40;
  };
  std::vector<CollectiveSpec> all;
  for (std::size_t r = 0; r < ranks; ++r) {
    CollectiveSpec own = spec;
    own.rank = static_cast<int>(r);
    std::vector<std::size_t> in = {0};
    std::vector<std::size_t> out = {0};
    const bool each_its_own = spec.kind == OpKind::all_to_all;
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      in.push_back(in.back() + length(each_its_own ? r : 0, peer));
      out.push_back(out.back() + (each_its_own ? length(peer, r) : length(0, peer)));
    }
    if (spec.kind != OpKind::all_gather && spec.kind != OpKind::gather) own.in_starts = in;
    if (spec.kind != OpKind::reduce_scatter && spec.kind != OpKind::scatter) own.out_starts = out;
    own.count = std::max(in.back(), out.back());
    all.push_back(own);
  }
  return all;
}

}  // namespace tessera::comm_test
