// Optimizer steps whose parts differ in weight decay, on CUDA, emulated.
#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

constexpr std::size_t kCount = 2061;

/// Parts of `length` elements, with and without decay in turn.
std::vector<kernels::DecayPart> parts_of(std::size_t length) {
  std::vector<kernels::DecayPart> parts;
  for (std::size_t end = length; parts.empty() || parts.back().end < kCount; end += length)
    parts.push_back({std::min(end, kCount), parts.size() % 2 == 0 ? 0.1 : 0.0});
  return parts;
}

// Whole vectors and not; more parts than fit a launch; one part.
constexpr std::size_t kLengths[] = {296, 133, 8, 3, kCount};

/// A step of each optimizer; `split`: one call for each part instead of one for all.
template <class U>
std::vector<double> both_steps(KernelTable<U>& k, Stream& s, std::size_t length, bool split) {
  const auto p = numbers<float>("p", kCount), g = numbers<float>("g", kCount);
  Array<U> parameter(p), gradient(g), m(std::vector<double>(p.size())), v(std::vector<double>(p.size())), plain(p),
      buffer(std::vector<double>(p.size()));
  const std::vector<kernels::DecayPart> parts = parts_of(length);
  kernels::AdamStep<U> adam{parameter.data(), gradient.data(), m.data(), v.data(), nullptr, kCount};
  kernels::SgdStep<U> sgd{plain.data(), gradient.data(), buffer.data(), kCount};
  sgd.momentum = 0.9, sgd.first_step = true, sgd.weight_decay = adam.weight_decay = 7;  // unused
  adam.parts = sgd.parts = parts;
  for (const bool decoupled : {true, false}) {
    adam.decoupled = decoupled;
    if (split) {
      kernels::for_each_part(adam, [&](const kernels::AdamStep<U>& part) { k.adam_step(s, part); });
      kernels::for_each_part(sgd, [&](const kernels::SgdStep<U>& part) { k.sgd_step(s, part); });
    } else {
      k.adam_step(s, adam);
      k.sgd_step(s, sgd);
    }
    ++adam.step;
    sgd.first_step = false;
  }
  return parameter.values() + m.values() + v.values() + plain.values() + buffer.values();
}

TEST(CudaDecayParts, OneLaunchHasTheBitsOfTheHostAndOfMany) {
  for (const std::size_t length : kLengths) {
    expect_bits_of_the_host([&]<class U>(KernelTable<U>& k, Stream& s) { return both_steps(k, s, length, false); });
    Devices().on_device([&](DeviceKernels& kernels, Stream& s) {
      EXPECT_TRUE(same_bits(both_steps(*kernels.f32_kernels(), s, length, false),
                            both_steps(*kernels.f32_kernels(), s, length, true)))
          << length;
    });
  }
}

TEST(CudaDecayParts, PartsDecayDifferently) {
  Devices().on_device([&](DeviceKernels& kernels, Stream& s) {
    EXPECT_FALSE(same_bits(both_steps(*kernels.f32_kernels(), s, 296, false),
                           both_steps(*kernels.f32_kernels(), s, 304, false)));
  });
}

/// Half-precision gradients and copies move with the parts.
TEST(CudaDecayParts, HalfPrecisionArraysFollow) {
  for (const std::size_t length : {std::size_t{296}, std::size_t{3}})
    expect_bits_of_the_host([&]<class U>(KernelTable<U>& k, Stream& s) {
      const auto p = numbers<float>("p", kCount);
      Array<float> parameter(p), m(std::vector<double>(p.size())), v(std::vector<double>(p.size()));
      Array<bf16> gradient(numbers<bf16>("g", kCount));
      Array<bf16> copy = Array<bf16>::poisoned(kCount);
      const std::vector<kernels::DecayPart> parts = parts_of(length);
      kernels::AdamStep<float> adam{parameter.data(), nullptr, m.data(), v.data(), nullptr, kCount};
      adam.half = {DType::bf16, gradient.data(), copy.data()};
      adam.parts = parts;
      k.adam_step(s, adam);
      std::vector<double> rounded_masters;
      for (const double value : parameter.values()) rounded_masters.push_back(as_double(rounded<bf16>(value)));
      EXPECT_TRUE(same_bits(copy.values(), rounded_masters));
      return parameter.values() + m.values() + v.values();
    });
}

#if !defined(TESSERA_TEST_HOST) && !defined(TESSERA_TEST_HARDWARE)
TEST(CudaDecayParts, AFewLaunchesHaveAllParts) {
  const auto launches = [](std::size_t length) {
    const std::size_t before = kernel_launches();
    Devices().on_device(
        [&](DeviceKernels& kernels, Stream& s) { both_steps(*kernels.f32_kernels(), s, length, false); });
    return kernel_launches() - before;
  };
  EXPECT_EQ(launches(kCount), 4U) << "two steps of each optimizer";
  EXPECT_EQ(launches(296), 4U) << "7 parts";
  EXPECT_EQ(launches(8), 4U * 5) << "258 parts";
}
#endif

}  // namespace
}  // namespace tessera::nn::test
