// Orthonormalization of columns: its results, and bitwise equality of device and host.
#include "tessera/nn/kernels/orthonormalize.h"

#include "tests/fsdp/training_specs.h"
#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

struct Matrix {
  std::size_t rows, columns;
  std::vector<double> values;
  double& at(std::size_t row, std::size_t column) { return values[row * columns + column]; }
};

Matrix random_matrix(std::size_t rows, std::size_t columns) {
  return {rows, columns, numbers<float>("p", rows * columns, 0.01)};
}

Matrix orthonormal(DeviceKernels& k, Stream& stream, const Matrix& given) {
  Array<float> matrix(given.values);
  k.orthonormalize(stream, {matrix.data(), given.rows, given.columns});
  return {given.rows, given.columns, matrix.values()};
}

double dot(Matrix& m, std::size_t a, std::size_t b) {
  double sum = 0;
  for (std::size_t row = 0; row < m.rows; ++row) sum += m.at(row, a) * m.at(row, b);
  return sum;
}

/// The device's result, checked to equal the host's in every order of threads.
Matrix check(const Matrix& given) {
  Devices devices;
  const Matrix expected = orthonormal(devices.host.device_kernels(), devices.host.stream(), given);
  for (int order = 0; order < kThreadOrders; ++order) {
    set_thread_order(order);
    const Matrix got = devices.on_device([&](DeviceKernels& k, Stream& s) { return orthonormal(k, s, given); });
    EXPECT_TRUE(same_bits(got.values, expected.values)) << given.rows << " x " << given.columns;
  }
  set_thread_order(0);
  return expected;
}

void expect_orthonormal(Matrix result) {
  for (std::size_t a = 0; a < result.columns; ++a)
    for (std::size_t b = 0; b <= a; ++b)
      ASSERT_NEAR(dot(result, a, b), a == b ? 1.0 : 0.0, 1e-6) << result.rows << " x " << result.columns;
}

TEST(Orthonormalize, ColumnsAreOrthonormal) {
  for (const auto& [rows, columns] : {std::pair(1U, 1U), std::pair(24U, 2U), std::pair(16U, 16U), std::pair(255U, 3U),
                                      std::pair(257U, 4U), std::pair(1000U, 16U), std::pair(5000U, 1U)})
    expect_orthonormal(check(random_matrix(rows, columns)));
}

TEST(Orthonormalize, KeepsSpan) {
  Matrix given = random_matrix(300, 2), result = check(given);
  EXPECT_NEAR(std::pow(dot(given, 0, 0), 0.5), given.at(7, 0) / result.at(7, 0), 1e-6) << "the first keeps its way";
  EXPECT_GT(std::abs(dot(given, 0, 1)), 1e-4) << "the control: the given ones are not orthogonal";
}

TEST(Orthonormalize, ReplacesDependentColumn) {
  for (const double factor : {0.0, 2.0}) {  // zero, or parallel to the first
    Matrix given = random_matrix(300, 3);
    for (std::size_t row = 0; row < 300; ++row) given.at(row, 1) = factor * given.at(row, 0);
    expect_orthonormal(check(given));
  }
  expect_orthonormal(check({40, 4, std::vector<double>(160)}));
}

/// More columns than rows: the others fill the space.
TEST(Orthonormalize, ClearsColumnsBeyondRows) {
  for (const auto& [rows, columns] : {std::pair(1U, 2U), std::pair(3U, 5U), std::pair(16U, 19U)}) {
    Matrix result = check(random_matrix(rows, columns)), first = result;
    for (std::size_t column = rows; column < columns; ++column) EXPECT_EQ(dot(result, column, column), 0.0) << rows;
    first.columns = rows;
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t column = 0; column < rows; ++column) first.at(row, column) = result.at(row, column);
    expect_orthonormal(first);
  }
  Matrix given = random_matrix(3, 5);
  given.at(1, 4) = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(std::isfinite(check(given).at(1, 4)));
}

TEST(Orthonormalize, KeepsNonFiniteValues) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    Matrix given = random_matrix(300, 3);
    given.at(299, 1) = bad;
    Matrix result = check(given);
    EXPECT_NEAR(dot(result, 0, 0), 1.0, 1e-6);
    EXPECT_FALSE(std::isfinite(dot(result, 1, 1)));
    EXPECT_EQ(result.at(5, 2), given.at(5, 2)) << "the rest is as it was";
  }
}

/// Negative control: the bitwise comparison detects a change in the last place of one number.
TEST(Orthonormalize, DetectsChangedInput) {
  Matrix given = random_matrix(300, 4);
  const Matrix before = check(given);
  given.at(123, 2) = static_cast<double>(std::nextafterf(static_cast<float>(given.at(123, 2)), 1.0F));
  EXPECT_FALSE(same_bits(check(given).values, before.values));
}

#if !defined(TESSERA_TEST_HOST) && !defined(TESSERA_TEST_HARDWARE)
/// Several ranks on one emulated device.
TEST(PowerSgdOnDevice, LossesEqualHost) {
  harness::TrainingSpec spec = fsdp::plugin_spec("ddp", 2, {"plain", "plain", "powersgd"});
  const harness::TrainingRecord host = harness::train(spec);
  spec.runtime = harness::make_guarded_device({.kernels = make_emulated_kernels});
  const harness::TrainingRecord device = harness::train(spec);
  ASSERT_EQ(device.losses.size(), host.losses.size());
  for (std::size_t step = 0; step < host.losses.size(); ++step)
    EXPECT_NEAR(device.losses[step], host.losses[step], 1e-3) << "step " << step + 1;
}
#endif

}  // namespace
}  // namespace tessera::nn::test
