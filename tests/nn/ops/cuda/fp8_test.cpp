// Quantization to 8-bit floating point on a device: bitwise the host's, in every order of threads.
#include "tessera/nn/kernels/fp8.h"

#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

using kernels::fp8_padded;
using kernels::Fp8QuantizeArgs;

struct Matrix {
  std::size_t rows, columns;
};

struct Quantized {
  std::vector<double> codes, transposed, descale, history;
};

bool same(const Quantized& a, const Quantized& b) {
  return same_bits(a.codes, b.codes) && same_bits(a.transposed, b.transposed) && same_bits(a.descale, b.descale) &&
         same_bits(a.history, b.history);
}

/// Quantizes as `args` says, which gives formats and scaling. Codes are compared as i32, four at a time.
template <class T>
Quantized quantize(DeviceKernels& k, Stream& stream, const std::vector<double>& values, const Matrix& matrix,
                   const std::vector<double>& history, Fp8QuantizeArgs args) {
  Array<T> in(values);
  Array<float> amaxes(history), descale = Array<float>::poisoned(1);
  Array<std::int32_t> codes(std::vector<double>(matrix.rows * matrix.columns / 4, -1.0));
  Array<std::int32_t> transposed(std::vector<double>(matrix.columns * fp8_padded(matrix.rows) / 4, -1.0));
  args.in = in.data();
  args.dtype = dtype_of<T>;
  args.rows = matrix.rows;
  args.columns = matrix.columns;
  args.history = amaxes.data();
  args.descale = descale.data();
  args.out = reinterpret_cast<std::uint8_t*>(codes.data());
  args.transposed = reinterpret_cast<std::uint8_t*>(transposed.data());
  k.fp8_quantize(stream, args);
  stream.synchronize();
  return {codes.values(), transposed.values(), descale.values(), amaxes.values()};
}

template <class T>
void check_quantization() {
  Devices devices;
  const std::vector<double> unknown(1 + kFp8History, 0.0);
  std::vector<double> known = unknown;
  known[3] = 0.25;
  for (const Matrix& matrix : {Matrix{1, 16}, {64, 64}, {17, 80}, {130, 272}, {300, 144}}) {
    std::vector<double> values = numbers<T>("x", matrix.rows * matrix.columns, 0.02);
    values[values.size() / 2] = std::numeric_limits<double>::infinity();
    for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2})
      for (const auto& [scaling, updates, history] :
           {std::tuple(Fp8Scaling::current, false, unknown), std::tuple(Fp8Scaling::none, false, unknown),
            std::tuple(Fp8Scaling::delayed, false, unknown), std::tuple(Fp8Scaling::delayed, true, unknown),
            std::tuple(Fp8Scaling::delayed, false, known), std::tuple(Fp8Scaling::delayed, true, known)}) {
        const Fp8QuantizeArgs args{.format = format, .scaling = scaling, .updates = updates};
        const auto run = [&, h = history](DeviceKernels& k, Stream& stream) {
          return quantize<T>(k, stream, values, matrix, h, args);
        };
        const Quantized expected = run(devices.host.device_kernels(), devices.host.stream());
        for (int order = 0; order < kThreadOrders; ++order) {
          set_thread_order(order);
          EXPECT_TRUE(same(devices.on_device(run), expected)) << matrix.rows << " " << matrix.columns;
        }
        set_thread_order(0);
      }
  }
}

TEST(Fp8OnDevice, QuantizationEqualsHost) {
  check_quantization<float>();
  check_quantization<f16>();
  check_quantization<bf16>();
}

/// A history that ends with this tensor differs from one that doesn't: the comparison above would see a lost update.
TEST(Fp8OnDevice, UpdatesChangeHistory) {
  Devices devices;
  const std::vector<double> values = numbers<float>("x", 32 * 16);
  const auto history = [&](bool updates) {
    return devices
        .on_device([&](DeviceKernels& k, Stream& stream) {
          return quantize<float>(k, stream, values, {32, 16}, std::vector<double>(1 + kFp8History, 0.5),
                                 {.scaling = Fp8Scaling::delayed, .updates = updates});
        })
        .history;
  };
  EXPECT_EQ(history(false), std::vector<double>(1 + kFp8History, 0.5));
  EXPECT_GT(history(true)[0], 1);
  EXPECT_EQ(history(true)[1], 0.5);
}

}  // namespace
}  // namespace tessera::nn::test
