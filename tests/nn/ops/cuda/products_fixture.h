// What tests of the CUDA device's products share: a table on a fake of cuBLASLt's functions.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/device_stream.h"
#include "tessera/base/log.h"
#include "tessera/nn/kernels/cuda/library_tables.h"
#include "tests/harness/limited_device.h"
#include "tests/nn/ops/cuda/fake_cublas_lt.h"

namespace tessera::nn::test {

class HostStream final : public base::DeviceStream {
 public:
  HostStream() : DeviceStream({base::DeviceType::cuda, 0}, false) {}
  void* native() const noexcept override { return nullptr; }
  void prepare_launch() override { ++launches; }
  base::Event record() override { return {}; }
  void wait(const base::Event&) override {}
  int launches = 0;
};

inline constexpr std::size_t kRows = 5;
inline constexpr std::size_t kIn = 24;
inline constexpr std::size_t kOut = 16;

class ProductsTest : public testing::Test {
 protected:
  void SetUp() override { fake_cublas_lt() = {}; }

  std::vector<std::string> logged_;
  HostStream stream_;
  tessera::test::LimitedDevice device_{std::size_t{1} << 30};
  MemoryPool memory_{std::make_shared<base::MemoryTracker>()};
  ThreadPool threads_{1};
  const KernelResources resources_{
      device_, memory_, threads_,
      std::make_shared<base::Logger>(base::LogLevel::info,
                                     [this](base::LogLevel, std::string_view text) { logged_.emplace_back(text); })};
  const std::unique_ptr<DeviceKernels> kernels_ =
      cuda::make_cuda_kernels(memory_, cuda::make_products(resources_, fake_cublas_lt_api()));
};

}  // namespace tessera::nn::test
