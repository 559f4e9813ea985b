// NF4 weights on a device: bitwise the host's decoding, and a whole training with them.
#include "tessera/nn/nf4.h"

#include "tests/fsdp/models.h"
#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

/// Encoded blocks of all magnitudes, including a block of zeros.
std::vector<std::byte> encoding_of(std::size_t count) {
  std::vector<float> values(count);
  fill_normal({"x", 5, 0, count}, 0.0F, 0.02F, values.data());
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t block = i / static_cast<std::size_t>(kNf4Block);
    values[i] *= block == 1 ? 0.0F : block % 7 == 3 ? 40.0F : 1.0F;
  }
  std::vector<std::byte> bytes(nf4_bytes(static_cast<std::int64_t>(count)));
  encode_nf4(values, bytes);
  return bytes;
}

/// Bytes as the numbers of an array that may lie on a device.
std::vector<double> as_numbers(std::vector<std::byte> bytes) {
  bytes.resize((bytes.size() + 3) / 4 * 4);
  std::vector<double> numbers;
  for (std::size_t i = 0; i < bytes.size(); i += 4) {
    std::int32_t number;
    std::memcpy(&number, &bytes[i], sizeof(number));
    numbers.push_back(number);
  }
  return numbers;
}

template <class T>
std::vector<double> decoded(Devices& devices, const std::vector<std::byte>& bytes, std::size_t count,
                            std::size_t offset) {
  return devices.on_device([&](DeviceKernels& k, Stream& stream) {
    Array<std::int32_t> encoded(as_numbers(bytes));
    Array<T> out = Array<T>::poisoned(count, offset);
    k.decode_nf4(stream, {encoded.data(), static_cast<std::int64_t>(count), out.data(), dtype_of<T>});
    return out.values();
  });
}

template <class T>
void check_decoding() {
  Devices devices;
  for (const std::size_t count : {1U, 63U, 64U, 65U, 1001U, 16384U, 16385U, 50000U}) {
    std::vector<std::byte> bytes = encoding_of(count);
    std::vector<float> values(count);
    decode_nf4(bytes, static_cast<std::int64_t>(count), {0, static_cast<std::int64_t>(count)}, values.data());
    std::vector<double> expected;
    for (const float value : values) expected.push_back(as_double(rounded<T>(static_cast<double>(value))));
    for (int order = 0; order < kThreadOrders; ++order) {
      set_thread_order(order);
      for (const std::size_t offset : {0U, 1U})
        EXPECT_TRUE(same_bits(decoded<T>(devices, bytes, count, offset), expected)) << count;
    }
    set_thread_order(0);
    bytes.back() ^= std::byte{1};  // the negative control: the code of the last value, or of the one before it
    EXPECT_FALSE(same_bits(decoded<T>(devices, bytes, count, 0), expected)) << count;
  }
}

TEST(Nf4OnDevices, DecodesBitwiseEqualToHost) {
  check_decoding<float>();
  check_decoding<double>();
  check_decoding<bf16>();
  check_decoding<f16>();
}

#if !defined(TESSERA_TEST_HOST)
TEST(Nf4OnDevices, TrainingLossesEqualHost) {
  for (const char* model : {"gpt-nano", "llama-nano"}) {
    harness::TrainingSpec spec = fsdp::quantized(fsdp::lora_spec("ddp", 1, model));
    const harness::TrainingRecord host = harness::train(spec);
#if defined(TESSERA_TEST_HARDWARE)
    spec.runtime = base::open_device({DeviceType::cuda, 0});
#else
    spec.runtime = harness::make_guarded_device({.kernels = make_emulated_kernels});
#endif
    const harness::TrainingRecord device = harness::train(spec);
    ASSERT_EQ(device.losses.size(), host.losses.size());
    for (std::size_t step = 0; step < host.losses.size(); ++step)
      EXPECT_NEAR(device.losses[step], host.losses[step], 2e-5) << model << " step " << step + 1;
    EXPECT_NE(device.losses.front(), device.losses.back());
  }
}
#endif

}  // namespace
}  // namespace tessera::nn::test
