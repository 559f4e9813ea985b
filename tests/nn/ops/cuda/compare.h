// Runs one kernel on the emulated device in every order of threads, and on the host in double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tessera/nn/context.h"
#include "tests/nn/ops/cuda/emulated_kernels.h"

namespace tessera::nn::test {

using kernels::OpMath;

template <class T>
T rounded(double value) {
  if constexpr (sizeof(T) < 4) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}
template <class T>
double as_double(T value) {
  if constexpr (sizeof(T) < 4) {
    return static_cast<double>(static_cast<float>(value));
  } else {
    return static_cast<double>(value);
  }
}

/// Normally distributed numbers that T represents exactly.
template <class T>
std::vector<double> numbers(std::string_view name, std::size_t count, double deviation = 1.0) {
  std::vector<double> values(count);
  fill_normal({name, 5, 0, count}, 0.0, deviation, values.data());
  for (double& value : values) value = as_double(rounded<T>(value));
  return values;
}

/// Selects where arrays are allocated: in host memory, or in a device's memory while a Placement lives.
class Placement {
 public:
  Placement(DeviceRuntime& runtime, Stream& stream) : runtime_(runtime), stream_(stream) { current() = this; }
  ~Placement() { current() = nullptr; }
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;
  static Placement*& current() {
    thread_local Placement* current = nullptr;
    return current;
  }
  void* allocate(std::size_t bytes) { return runtime_.allocate(bytes); }
  void free(void* data, std::size_t bytes) { runtime_.free(data, bytes); }
  void copy(CopyDirection direction, void* to, const void* from, std::size_t bytes) {
    runtime_.copy(stream_, direction, to, from, bytes);
    stream_.synchronize();
  }

 private:
  DeviceRuntime& runtime_;
  Stream& stream_;
};

/// `count` elements between guards, `offset` elements after a multiple of 16 bytes.
template <class T>
class Array {
 public:
  explicit Array(const std::vector<double>& values, std::size_t offset = 0)
      : count_(values.size()), offset_(offset), data_(count_ + 2 * kGuard, rounded<T>(kPattern)) {
    for (std::size_t i = 0; i < count_; ++i) data_[kGuard + offset_ + i] = rounded<T>(values[i]);
    if (placement_ == nullptr) return;
    device_ = static_cast<T*>(placement_->allocate(bytes()));
    placement_->copy(CopyDirection::host_to_device, device_, data_.data(), bytes());
  }
  /// Poisoned: reads before the first write give NaN.
  static Array poisoned(std::size_t count, std::size_t offset = 0) {
    return Array(std::vector<double>(count, std::numeric_limits<double>::quiet_NaN()), offset);
  }
  ~Array() {
    fetch();
    if (device_ != nullptr) placement_->free(device_, bytes());
    const T pattern = rounded<T>(kPattern);
    for (std::size_t i = 0; i < data_.size(); ++i)
      if ((i < kGuard + offset_ || i >= kGuard + offset_ + count_) && std::memcmp(&data_[i], &pattern, sizeof(T)) != 0)
        ADD_FAILURE() << "element " << static_cast<long>(i) - static_cast<long>(kGuard + offset_) << " of " << count_
                      << " was written";
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* data() { return (device_ != nullptr ? device_ : data_.data()) + kGuard + offset_; }
  std::size_t count() const { return count_; }
  std::vector<double> values() {
    fetch();
    std::vector<double> out;
    for (std::size_t i = 0; i < count_; ++i) out.push_back(as_double(data_[kGuard + offset_ + i]));
    return out;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr double kPattern = -3.25;
  std::size_t bytes() const { return data_.size() * sizeof(T); }
  void fetch() {
    if (device_ != nullptr) placement_->copy(CopyDirection::device_to_host, data_.data(), device_, bytes());
  }
  Placement* const placement_ = Placement::current();
  const std::size_t count_, offset_;
  std::vector<T> data_;
  T* device_ = nullptr;
};

inline std::vector<double> operator+(std::vector<double> a, const std::vector<double>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// Relative rounding error of one operation.
template <class T>
constexpr double unit() {
  if (std::is_same_v<T, double>) return 0x1p-53;
  if (std::is_same_v<T, float>) return 0x1p-24;
  return std::is_same_v<T, f16> ? 0x1p-11 : 0x1p-8;
}

/// The host and the device under test: emulated CUDA; in builds of their own a real device, or the host itself.
struct Devices {
  Context host;
#if defined(TESSERA_TEST_HARDWARE)
  Context device = Context({.device = {DeviceType::cuda, 0}});
  DeviceKernels* kernels = &device.device_kernels();
  Stream& stream = device.stream();
#elif defined(TESSERA_TEST_HOST)
  DeviceKernels* kernels = &host.device_kernels();
  Stream& stream = host.stream();
#else
  std::unique_ptr<DeviceKernels> owned = make_emulated_kernels({host.runtime(), host.memory(), host.threads()});
  DeviceKernels* kernels = owned.get();
  Stream& stream = host.stream();
#endif
  /// Calls function(kernels, stream) with arrays in the device's memory.
  template <class Function>
  auto on_device(Function&& function) {
#if defined(TESSERA_TEST_HARDWARE)
    const Placement placement(device.runtime(), stream);
#endif
    return function(*kernels, stream);
  }
};

inline bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

/// operation(kernels of U, stream) -> all outputs, as a template over U. Errors are bounded by `units` rounding units
/// of T, relative to the largest of 1 and the expected value; by `short_units` for half-precision types, which add in
/// f32 and round few times.
template <class T, class Operation>
void expect_as_in_double(const Operation& operation, double units, double short_units = 3.0) {
  if (sizeof(T) < 4) units = std::min(units, short_units);
  Devices devices;
  const std::vector<double> expected = operation(*devices.host.device_kernels().f64_kernels(), devices.host.stream());
  std::vector<double> got;
  for (int order = 0; order < kThreadOrders; ++order) {
    set_thread_order(order);
    const std::vector<double> now =
        devices.on_device([&](DeviceKernels& k, Stream& stream) { return operation(*k.of<T>(), stream); });
    if (order > 0) {
      EXPECT_TRUE(same_bits(now, got)) << "order " << order << " of the threads shows";
    }
    got = now;
  }
  set_thread_order(0);
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], expected[i], units * unit<T>() * std::max(1.0, std::abs(expected[i]))) << "output " << i;
}

/// The device gives the same bits as the host's f32 kernels.
template <class Operation>
void expect_bits_of_the_host(const Operation& operation) {
  Devices devices;
  const std::vector<double> expected = operation(*devices.host.device_kernels().f32_kernels(), devices.host.stream());
  const std::vector<double> got =
      devices.on_device([&](DeviceKernels& k, Stream& stream) { return operation(*k.f32_kernels(), stream); });
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_TRUE(std::memcmp(&got[i], &expected[i], sizeof(double)) == 0) << i << ": " << got[i] << " " << expected[i];
}

/// The element type of a table of kernels.
template <class T>
T element_of(KernelTable<T>&);
template <class K>
using Element = decltype(element_of(std::declval<K&>()));

}  // namespace tessera::nn::test
