// Algorithms of products that are tried out and kept in a file, on a fake of cuBLASLt whose algorithms take given
// times.
#include "tessera/nn/kernels/cuda/matmul_choices.h"

#include <gmock/gmock.h>

#include <cmath>
#include <fstream>
#include <set>

#include "tessera/base/error.h"
#include "tests/nn/ops/cuda/products_fixture.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::nn::test {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

class MatmulChoicesTest : public ProductsTest {
 protected:
  MatmulChoicesTest() {
    for (std::size_t i = 0; i < x_.size(); ++i) x_[i] = std::sin(static_cast<float>(i));
    for (std::size_t i = 0; i < weight_.size(); ++i) weight_[i] = std::cos(static_cast<float>(i));
    for (std::size_t i = 0; i < dy_.size(); ++i) dy_[i] = 1 / (1 + static_cast<float>(i));
  }

  /// The algorithms that a table with this setting runs for a product, and the product.
  std::vector<int> forward(const std::string& setting) {
    const auto kernels =
        cuda::make_cuda_kernels(memory_, cuda::make_products(resources_, fake_cublas_lt_api(), setting));
    fake_cublas_lt().run.clear();
    kernels->of<float>()->linear_forward(stream_, {.shape = {kRows, kIn, kOut, kernels::WeightLayout::out_in},
                                                   .x = x_.data(),
                                                   .weight = weight_.data(),
                                                   .y = y_.data()});
    return fake_cublas_lt().run;
  }
  /// Adds a product to `dweight_`.
  void backward(const std::string& setting) {
    const auto kernels =
        cuda::make_cuda_kernels(memory_, cuda::make_products(resources_, fake_cublas_lt_api(), setting));
    kernels::LinearBackward<float> args{.shape = {kRows, kIn, kOut, kernels::WeightLayout::out_in}};
    args.x = x_.data(), args.dy = dy_.data(), args.dweight = dweight_.data();
    args.accumulate_dweight = true;
    kernels->of<float>()->linear_backward(stream_, args);
  }

  const TemporaryDirectory directory_;
  const std::string file_ = directory_.path("products.json");
  std::vector<float> x_ = std::vector<float>(kRows * kIn), weight_ = std::vector<float>(kIn * kOut);
  std::vector<float> y_ = std::vector<float>(kRows * kOut), dy_ = std::vector<float>(kRows * kOut);
  std::vector<float> dweight_ = std::vector<float>(kIn * kOut, 3);
};

TEST_F(MatmulChoicesTest, FastestIsKeptInTheFile) {
  fake_cublas_lt().us = {3000, 2000, 500, 4000};
  const std::vector<int> tried = forward("try:" + file_);
  EXPECT_EQ(std::set<int>(tried.begin(), tried.end()), (std::set<int>{0, 1, 2, 3}));
  EXPECT_EQ(tried.back(), 2) << "the product itself";
  const std::vector<float> result = y_;
  fake_cublas_lt().choices = 0;
  EXPECT_EQ(forward(file_), std::vector<int>{2});
  EXPECT_EQ(fake_cublas_lt().choices, 0);
  EXPECT_EQ(y_, result);
  EXPECT_EQ(forward("try:" + file_), std::vector<int>{2}) << "known products are not tried again";
  EXPECT_EQ(forward(""), std::vector<int>{0}) << "the control: the library's first choice";
}

/// All ranks compare this text before the first backward.
TEST_F(MatmulChoicesTest, NameDependsOnTheChoices) {
  const auto name = [&](const std::string& setting) {
    return cuda::make_products(resources_, fake_cublas_lt_api(), setting)->name();
  };
  EXPECT_EQ(name(""), "cuBLASLt 130000");
  fake_cublas_lt().us = {3000, 500};
  forward("try:" + file_);
  const std::string one = name(file_);
  EXPECT_THAT(one, testing::MatchesRegex("cuBLASLt 130000 with choices [0-9a-f]+"));
  EXPECT_EQ(name(file_), one);
  fake_cublas_lt().us = {500, 3000};
  forward("try:" + directory_.path("other"));
  EXPECT_NE(name(directory_.path("other")), one);
}

TEST_F(MatmulChoicesTest, ProductsThatTheFileLacksUseTheFirstChoice) {
  fake_cublas_lt().us = {3000, 500};
  forward("try:" + file_);
  fake_cublas_lt().run.clear();
  backward(file_);
  EXPECT_EQ(fake_cublas_lt().run, std::vector<int>{0});
}

TEST_F(MatmulChoicesTest, NoiseDoesNotReplaceTheFirstChoice) {
  fake_cublas_lt().us = {20000, 19900};
  EXPECT_EQ(forward("try:" + file_).back(), 0);
}

TEST_F(MatmulChoicesTest, AlgorithmsThatFailAreLeftOut) {
  fake_cublas_lt().us = {-1, 3000, -1, 500};
  EXPECT_EQ(forward("try:" + file_).back(), 3);
  fake_cublas_lt().us = {-1, -1};
  EXPECT_THAT([&] { forward("try:" + directory_.path("none")); },
              ThrowsMessage<base::BackendError>(HasSubstr("runs none of its algorithms")));
}

TEST_F(MatmulChoicesTest, SumsAreAddedOnce) {
  backward("");
  const std::vector<float> once = dweight_;
  EXPECT_NE(once, std::vector<float>(kIn * kOut, 3));
  dweight_.assign(kIn * kOut, 3);
  fake_cublas_lt().us = {100, 50, 100};
  fake_cublas_lt().run.clear();
  backward("try:" + file_);
  EXPECT_GT(fake_cublas_lt().run.size(), 3U);
  EXPECT_EQ(dweight_, once);
}

TEST_F(MatmulChoicesTest, UnusableFilesAreErrors) {
  const auto refuses = [&](const std::string& setting, const std::string& why) {
    EXPECT_THAT([&] { forward(setting); }, ThrowsMessage<base::InvalidUsage>(HasSubstr(why))) << setting;
  };
  refuses(file_, "can't be read; write it with TESSERA_MATMUL=try:FILE and one rank");
  refuses("try:", "has no file");
  refuses("try:/no/such/directory/file", "/no/such/directory/file");
  std::ofstream(file_) << "not JSON";
  refuses(file_, "has no algorithms of cuBLASLt");
  refuses("try:" + file_, "has no algorithms of cuBLASLt");
  std::ofstream(file_) << R"({"device": "another", "cublaslt": 130000, "products": []})";
  refuses(file_, "is for cuBLASLt 130000 on another, not for 130000 on ");
  const std::string name = device_.properties().name;
  std::ofstream(file_) << R"({"device": ")" << name << R"(", "cublaslt": 120000, "products": []})";
  refuses(file_, "is for cuBLASLt 120000");
  fake_cublas_lt().us = {300, 50};
  std::filesystem::remove(file_);
  forward("try:" + file_);
  fake_cublas_lt().us = {300};
  refuses(file_, "can't run an algorithm of the file");
}

}  // namespace
}  // namespace tessera::nn::test
