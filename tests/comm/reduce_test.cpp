// The arithmetic of the host backends compared with the plain reference.
#include "tessera/comm/kernels/reduce.h"

#include "tests/comm/support.h"
#include "tests/conformance/reference.h"

namespace tessera::comm_test {
namespace {

namespace reference = tessera::conformance;
using reference::Bytes;

Bytes run(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs, std::size_t skew, bool streaming) {
  std::vector<Bytes> shifted;
  std::vector<const void*> sources;
  std::vector<double> factors;
  for (const Bytes& input : inputs) {
    shifted.emplace_back(skew);
    shifted.back().insert(shifted.back().end(), input.begin(), input.end());
    factors.push_back(reference::factor(static_cast<int>(factors.size())));
  }
  for (const Bytes& input : shifted) sources.push_back(input.data() + skew);
  const std::size_t bytes = inputs.front().size();
  std::vector<std::byte> memory(bytes + 128, std::byte{0xAA});
  const std::size_t line = 64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64;  // where streaming begins
  std::byte* out = memory.data() + line;
  reduce_tree(op, dtype, sources, factors, out, bytes / size_of(dtype), streaming);
  EXPECT_EQ(out[-1], std::byte{0xAA});
  EXPECT_EQ(out[bytes], std::byte{0xAA});
  return {out, out + bytes};
}

TEST(Reduce, SupportsAnyNumberOfSourcesAndOffset) {
  for (const DType dtype : kDTypes)
    for (const std::size_t sources : {1u, 2u, 3u, 4u, 5u, 8u, 13u, 33u})
      for (std::size_t kind = 0; kind < kReduceKinds; ++kind)
        for (const std::size_t count : {1u, 7u, 64u, 1031u, 2500u}) {
          if (!is_defined(static_cast<ReduceOp::Kind>(kind), dtype)) continue;
          std::vector<Bytes> inputs;
          for (std::size_t r = 0; r < sources; ++r)
            inputs.push_back(reference::make_input(dtype, count + kind, static_cast<int>(r), count));
          const ReduceOp op{static_cast<ReduceOp::Kind>(kind), static_cast<double>(sources)};
          const Bytes want = reference::reduce(dtype, op, inputs);
          const Bytes got = run(dtype, op, inputs, count % 3 * size_of(dtype), false);
          ASSERT_EQ(run(dtype, op, inputs, count % 3 * size_of(dtype), true), got);
          ASSERT_EQ(reference::first_difference(dtype, got.data(), want.data(), count), -1)
              << name_of(dtype) << " " << name_of(op.kind) << " sources " << sources << " count " << count;
        }
}

/// Every 16-bit value times factors that reach subnormals, ties and overflow: the kernels' conversions equal those of
/// base.
template <class T>
void every_value_times() {
  std::vector<T> in(65536);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = T::of_bits(static_cast<std::uint16_t>(i));
  for (const double factor : {1.0, 0.5, 1.0 / 3, 0.7501, 3.0, 1e-3, 6.1e-5, 0x1p-24, 0x1p-25, 1e5, -1.0009765625}) {
    std::vector<T> out(in.size());
    const void* source = in.data();
    reduce_tree(ReduceOp::premul_sum(factor), dtype_of<T>, std::span(&source, 1), std::span(&factor, 1), out.data(),
                in.size());
    for (std::size_t i = 0; i < in.size(); ++i) {
      const float product = static_cast<float>(in[i]) * static_cast<float>(factor);
      if (std::isnan(product)) {
        ASSERT_TRUE(std::isnan(static_cast<float>(out[i]))) << i;
      } else {
        ASSERT_EQ(out[i].bits, T(product).bits) << i << " times " << factor;
      }
    }
  }
}

TEST(Reduce, ConvertsEveryF16AsBase) { every_value_times<f16>(); }
TEST(Reduce, ConvertsEveryBf16AsBase) { every_value_times<bf16>(); }

/// The sum is divided by the number itself, also where no element of the type is as large.
TEST(Reduce, DividesIntegersByLargeNumbers) {
  for (const DType dtype : kDTypes)
    with_dtype(dtype, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
        for (const T value : {std::numeric_limits<T>::min(), T{3}, T{100}, std::numeric_limits<T>::max()})
          for (const double divisor : {1.0, 3.0, 127.0, 128.0, 200.0, 255.0, 256.0, 300.0, 32768.0, 65536.0, 0x1p31,
                                       0x1p32 - 1, 0x1p32, 0x1p53}) {
            const std::vector<T> in(70, value);
            std::vector<T> out(70);
            const void* source = in.data();
            reduce_tree(ReduceOp{ReduceOp::Kind::avg, divisor}, dtype, std::span(&source, 1), {}, out.data(), 70);
            const auto wide = static_cast<std::int64_t>(divisor);
            const T want = std::is_signed_v<T>
                               ? static_cast<T>(static_cast<std::int64_t>(value) / wide)
                               : static_cast<T>(static_cast<std::uint64_t>(value) / static_cast<std::uint64_t>(wide));
            EXPECT_EQ(out, std::vector<T>(70, want)) << name_of(dtype) << " " << +value << " / " << divisor;
          }
      }
    });
}

TEST(Reduce, CopiesAnySizeAndAlignment) {
  std::vector<std::byte> in(20'000);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::byte>(i * 7);
  for (const bool streaming : {false, true})
    for (const std::size_t bytes : {0u, 1u, 4095u, 4096u, 4097u, 10'001u})
      for (const std::size_t skew : {0u, 1u, 33u}) {
        std::vector<std::byte> out(in.size() + 64, std::byte{0xAA});
        copy_bytes(out.data() + skew, in.data() + 3, bytes, streaming);
        ASSERT_TRUE(std::equal(out.begin() + static_cast<std::ptrdiff_t>(skew),
                               out.begin() + static_cast<std::ptrdiff_t>(skew + bytes), in.begin() + 3));
        ASSERT_EQ(out[skew + bytes], std::byte{0xAA});
      }
}

}  // namespace
}  // namespace tessera::comm_test
