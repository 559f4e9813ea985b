// Compressed encodings: decoded values, their error, and bitwise equality of device and host.
#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

using kernels::compressed_bytes;
using kernels::Compression;
using kernels::kCompressionBlock;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

/// `x` encoded and decoded, in f32; with error feedback also the kept error.
std::vector<double> there_and_back(DeviceKernels& k, Stream& stream, Compression compression,
                                   const std::vector<double>& x, const std::vector<double>& error = {}) {
  Array<float> in(x);
  Array<float> kept(error.empty() ? std::vector<double>(1) : error);
  Array<float> wire(std::vector<double>(compressed_bytes(compression, x.size()) / 4 + 1));
  Array<float> back = Array<float>::poisoned(x.size());
  k.compress(stream,
             {compression, in.data(), DType::f32, x.size(), wire.data(), error.empty() ? nullptr : kept.data()});
  k.sum_compressed(stream, {.compression = compression, .in = wire.data(), .out = back.data(), .count = x.size()});
  return error.empty() ? back.values() : back.values() + kept.values();
}

std::vector<double> there_and_back(Devices& devices, Compression compression, const std::vector<double>& x,
                                   const std::vector<double>& error = {}) {
  return devices.on_device([&](DeviceKernels& k, Stream& s) { return there_and_back(k, s, compression, x, error); });
}

TEST(Compression, SizeEqualsStatedBytes) {
  EXPECT_EQ(compressed_bytes(Compression::bf16, 1000), 2000U);
  EXPECT_EQ(compressed_bytes(Compression::int8, 256), 256U + 4);
  EXPECT_EQ(compressed_bytes(Compression::int8, 257), 257U + 8);
  EXPECT_EQ(compressed_bytes(Compression::int8, 0), 0U);
}

TEST(Compression, ErrorIsAtMostHalfStep) {
  Devices devices;
  for (const std::size_t count : {1U, 255U, 256U, 1031U, 40000U}) {
    const auto x = numbers<float>("x", count);
    const auto int8 = there_and_back(devices, Compression::int8, x);
    const auto bf16_values = there_and_back(devices, Compression::bf16, x);
    for (std::size_t first = 0; first < count; first += kCompressionBlock) {
      const std::size_t last = std::min(count, first + kCompressionBlock);
      double most = 0;
      for (std::size_t i = first; i < last; ++i) most = std::max(most, std::abs(x[i]));
      for (std::size_t i = first; i < last; ++i) {
        ASSERT_NEAR(int8[i], x[i], most / 127 * 0.50001) << i;
        ASSERT_EQ(bf16_values[i], as_double(bf16(static_cast<float>(x[i])))) << i;
      }
    }
  }
}

/// The negative control: with one scale for all, a block of small numbers is lost.
TEST(Compression, BlocksKeepSmallValuesBesideLargeOnes) {
  Devices devices;
  std::vector<double> x(2 * kCompressionBlock, 1e-3);
  x[0] = 100;
  const auto back = there_and_back(devices, Compression::int8, x);
  EXPECT_EQ(back[1], 0.0) << "in the block of the large one";
  EXPECT_NEAR(back[kCompressionBlock], 1e-3, 1e-8);
}

TEST(Compression, KeepsNonFiniteValues) {
  Devices devices;
  for (const float bad : {kInfinity, -kInfinity, kNan}) {
    std::vector<double> x(2 * kCompressionBlock + 9, 1.0);
    x[kCompressionBlock + 7] = static_cast<double>(bad);
    const auto back = there_and_back(devices, Compression::int8, x, std::vector<double>(x.size()));
    EXPECT_EQ(back[0], 1.0);
    EXPECT_TRUE(std::isnan(back[kCompressionBlock]));
    EXPECT_EQ(back[2 * kCompressionBlock], 1.0);
    for (std::size_t i = x.size(); i < back.size(); ++i) ASSERT_EQ(back[i], 0.0) << "nothing of it is kept";
  }
  const auto small = there_and_back(devices, Compression::int8, {0.0, -0.0, 1e-38, -1e-42});
  for (const double value : small) EXPECT_EQ(value, 0.0);
}

TEST(Compression, ErrorFeedbackKeepsError) {
  Devices devices;
  for (const Compression compression : {Compression::int8, Compression::bf16}) {
    const auto x = numbers<float>("x", 1000), before = numbers<float>("e", 1000, 0.01);
    const auto both = there_and_back(devices, compression, x, before);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float sum = static_cast<float>(x[i]) + static_cast<float>(before[i]);
      ASSERT_EQ(static_cast<float>(both[x.size() + i]), sum - static_cast<float>(both[i]));
      ASSERT_NEAR(both[i] + both[x.size() + i], x[i] + before[i], 1e-6);
    }
  }
}

/// Every type, encoding and sum: the device's bits equal the host's, in any order of threads.
template <class T>
std::vector<double> sums(DeviceKernels& k, Stream& stream, Compression compression, std::size_t count) {
  constexpr std::size_t kSources = 3;
  const std::size_t bytes = compressed_bytes(compression, count);
  Array<T> in(numbers<T>("in", kSources * count));
  Array<float> error(numbers<float>("error", kSources * count, 0.01));
  Array<float> wire(std::vector<double>(kSources * bytes / 4 + 1));
  Array<T> out = Array<T>::poisoned(count);
  for (std::size_t s = 0; s < kSources; ++s)
    k.compress(stream, {compression, in.data() + s * count, dtype_of<T>, count,
                        reinterpret_cast<std::byte*>(wire.data()) + s * bytes, error.data() + s * count, 0.5F});
  k.sum_compressed(stream, {compression, wire.data(), bytes, kSources, 3.0F, out.data(), dtype_of<T>, count});
  return out.values() + error.values();
}

template <class T>
void check_sums() {
  Devices devices;
  for (const Compression compression : {Compression::int8, Compression::bf16})
    for (const std::size_t count : {8U, 264U, 1032U, 33000U}) {
      const auto expected = sums<T>(devices.host.device_kernels(), devices.host.stream(), compression, count);
      for (int order = 0; order < kThreadOrders; ++order) {
        set_thread_order(order);
        const auto got =
            devices.on_device([&](DeviceKernels& k, Stream& s) { return sums<T>(k, s, compression, count); });
        EXPECT_TRUE(same_bits(got, expected)) << count;
      }
      set_thread_order(0);
      // ... which equal those of decoding and adding one after the other.
      const auto in = numbers<T>("in", 3 * count), error = numbers<float>("error", 3 * count, 0.01);
      std::vector<float> sum(count, -0.0F);
      for (std::size_t s = 0; s < 3; ++s) {
        std::vector<double> part(count);
        for (std::size_t i = 0; i < count; ++i)
          part[i] = static_cast<double>(0.5F * static_cast<float>(in[s * count + i]) +
                                        static_cast<float>(error[s * count + i]));
        const auto decoded = there_and_back(devices.host.device_kernels(), devices.host.stream(), compression, part);
        for (std::size_t i = 0; i < count; ++i) sum[i] += static_cast<float>(decoded[i]);
      }
      for (std::size_t i = 0; i < count; ++i)
        ASSERT_EQ(expected[i], as_double(rounded<T>(static_cast<double>(sum[i] / 3.0F)))) << i;
    }
}

TEST(CompressedSums, AreBitwiseEqualToHostAndSequentialSum) {
  check_sums<float>();
  check_sums<bf16>();
  check_sums<f16>();
}

}  // namespace
}  // namespace tessera::nn::test
