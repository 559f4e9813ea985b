#include "tessera/nn/kernels/norm.h"

#include "tests/nn/kernels/support.h"

namespace tessera::nn::kernels {
namespace {
using namespace test;

constexpr std::size_t kWidths[] = {1, 5, 7, 13, 33, 70};

template <class T>
struct LayerNormCase {
  std::size_t rows, width;
  std::vector<T> x, weight, bias, dy, y, mean, rstd;
  LayerNormCase(std::size_t r, std::size_t w)
      : rows(r),
        width(w),
        x(random_vector<T>(r * w, 1, 2)),
        weight(random_vector<T>(w, 2)),
        bias(random_vector<T>(w, 3)),
        dy(random_vector<T>(r * w, 4)),
        y(r * w),
        mean(r),
        rstd(r) {
    for (T& v : x) v += T(3);
  }
  void forward(ThreadPool& pool) {
    norm_forward<T>(pool, {.rows = rows,
                           .width = width,
                           .x = x.data(),
                           .weight = weight.data(),
                           .bias = bias.data(),
                           .eps = T(1e-2),
                           .y = y.data(),
                           .mean = mean.data(),
                           .rstd = rstd.data()});
  }
  NormBackward<T> backward() {
    return {.rows = rows,
            .width = width,
            .x = x.data(),
            .weight = weight.data(),
            .mean = mean.data(),
            .rstd = rstd.data(),
            .dy = dy.data()};
  }
};

TEST(LayerNorm, ForwardEqualsDefinition) {
  ThreadPool pool;
  LayerNormCase<double> c(3, 33);
  c.forward(pool);
  for (std::size_t r = 0; r < c.rows; ++r) {
    double mean = 0, variance = 0;
    for (std::size_t i = 0; i < c.width; ++i) mean += c.x[r * c.width + i] / static_cast<double>(c.width);
    for (std::size_t i = 0; i < c.width; ++i)
      variance += std::pow(c.x[r * c.width + i] - mean, 2) / static_cast<double>(c.width);
    for (std::size_t i = 0; i < c.width; ++i)
      EXPECT_NEAR(c.y[r * c.width + i],
                  (c.x[r * c.width + i] - mean) / std::sqrt(variance + 1e-2) * c.weight[i] + c.bias[i], 1e-13);
  }
}

TEST(LayerNorm, GradientsEqualFiniteDifferences) {
  ThreadPool pool;
  for (const std::size_t rows : {3u, 35u})
    for (const std::size_t width : kWidths) {
      LayerNormCase<double> c(rows, width);
      const auto loss = [&] {
        c.forward(pool);
        return dot(c.y, c.dy);
      };
      const auto ex = differences(c.x, loss), ew = differences(c.weight, loss), eb = differences(c.bias, loss);
      c.forward(pool);
      std::vector<double> dx(rows * width, NAN), dw(width, NAN), db(width, NAN);
      NormBackward<double> args = c.backward();
      args.dx = dx.data();
      args.dweight = dw.data();
      args.dbias = db.data();
      norm_backward(pool, args);
      if (width > 1) {
        EXPECT_LT(relative_difference(dx, ex), kGradientTolerance) << rows << "x" << width;
      } else {
        for (const double v : dx) EXPECT_NEAR(v, 0, 1e-12);
      }
      EXPECT_LT(relative_difference(dw, ew), width > 1 ? kGradientTolerance : INFINITY);
      EXPECT_LT(relative_difference(db, eb), kGradientTolerance);
      std::vector<double> mx(rows * width, 1.5), mw(width, 2.5), mb(width, 3.5);
      args.dx = mx.data();
      args.dweight = mw.data();
      args.dbias = mb.data();
      args.accumulate_dx = args.accumulate_dweight = args.accumulate_dbias = true;
      norm_backward(pool, args);
      EXPECT_LT(relative_difference(mx, plus(std::vector<double>(rows * width, 1.5), dx)), 1e-15);
      EXPECT_LT(relative_difference(mw, plus(std::vector<double>(width, 2.5), dw)), 1e-15);
      EXPECT_LT(relative_difference(mb, plus(std::vector<double>(width, 3.5), db)), 1e-15);
    }
}

template <class T>
std::vector<T> layer_norm_bits(std::size_t threads) {
  ThreadPool pool(threads);
  LayerNormCase<T> c(517, 100);
  c.forward(pool);
  std::vector<T> dx(c.x.size()), dw(c.width), db(c.width);
  NormBackward<T> args = c.backward();
  args.dx = dx.data();
  args.dweight = dw.data();
  args.dbias = db.data();
  norm_backward(pool, args);
  std::vector<T> all = c.y;
  for (const auto* v : {&c.mean, &c.rstd, &dx, &dw, &db}) all.insert(all.end(), v->begin(), v->end());
  return all;
}

TEST(LayerNorm, BitsForOneTwoAndThreeThreads) {
  const auto one = layer_norm_bits<float>(1);
  EXPECT_TRUE(same_bits(layer_norm_bits<float>(2), one));
  EXPECT_TRUE(same_bits(layer_norm_bits<float>(3), one));
  EXPECT_LT(relative_difference(one, layer_norm_bits<double>(1)), 1e-5);
}

// A row's result must not depend on its neighbors: ranks split the global batch.
TEST(LayerNorm, BitsOfRowAreIndependentOfPosition) {
  ThreadPool pool;
  LayerNormCase<float> all(40, 77);
  all.forward(pool);
  LayerNormCase<float> one(1, 77);
  for (std::size_t row : {0u, 1u, 17u, 39u}) {
    one.x.assign(all.x.begin() + static_cast<long>(row * 77), all.x.begin() + static_cast<long>(row * 77 + 77));
    one.forward(pool);
    EXPECT_TRUE(same_bits(one.y, std::vector<float>(all.y.begin() + static_cast<long>(row * 77),
                                                    all.y.begin() + static_cast<long>(row * 77 + 77))));
  }
}

TEST(RmsNorm, ForwardAndGradientsEqualFiniteDifferences) {
  ThreadPool pool(2);
  for (const std::size_t rows : {3u, 35u})
    for (const std::size_t width : kWidths) {
      auto x = random_vector<double>(rows * width, 1, 2), weight = random_vector<double>(width, 2);
      const auto dy = random_vector<double>(rows * width, 3);
      std::vector<double> y(rows * width), rstd(rows);
      const auto loss = [&] {
        norm_forward<double>(pool, {.rows = rows,
                                    .width = width,
                                    .x = x.data(),
                                    .weight = weight.data(),
                                    .eps = 1e-2,
                                    .y = y.data(),
                                    .rstd = rstd.data(),
                                    .norm = RowNorm::rms});
        return dot(y, dy);
      };
      loss();
      for (std::size_t r = 0; r < rows; ++r) {
        double square = 0;
        for (std::size_t i = 0; i < width; ++i) square += std::pow(x[r * width + i], 2) / static_cast<double>(width);
        EXPECT_NEAR(y[r * width], x[r * width] / std::sqrt(square + 1e-2) * weight[0], 1e-13);
      }
      const auto ex = differences(x, loss), ew = differences(weight, loss);
      loss();
      std::vector<double> dx(rows * width, NAN), dw(width, NAN), mx(rows * width, 1.0), mw(width, 2.0);
      NormBackward<double> args{.rows = rows,
                                .width = width,
                                .x = x.data(),
                                .weight = weight.data(),
                                .rstd = rstd.data(),
                                .dy = dy.data(),
                                .dx = dx.data(),
                                .dweight = dw.data(),
                                .norm = RowNorm::rms};
      norm_backward(pool, args);
      EXPECT_LT(relative_difference(dx, ex), kGradientTolerance) << rows << "x" << width;
      EXPECT_LT(relative_difference(dw, ew), kGradientTolerance);
      args.dx = mx.data();
      args.dweight = mw.data();
      args.accumulate_dx = args.accumulate_dweight = true;
      norm_backward(pool, args);
      EXPECT_LT(relative_difference(mx, plus(std::vector<double>(rows * width, 1.0), dx)), 1e-15);
      EXPECT_LT(relative_difference(mw, plus(std::vector<double>(width, 2.0), dw)), 1e-15);

      const auto xf = cast<float>(x), wf = cast<float>(weight), dyf = cast<float>(dy), rf = cast<float>(rstd);
      std::vector<float> dxf(rows * width), dwf(width);
      norm_backward<float>(pool, {.rows = rows,
                                  .width = width,
                                  .x = xf.data(),
                                  .weight = wf.data(),
                                  .rstd = rf.data(),
                                  .dy = dyf.data(),
                                  .dx = dxf.data(),
                                  .dweight = dwf.data(),
                                  .norm = RowNorm::rms});
      if (width > 1) {
        EXPECT_LT(relative_difference(dxf, dx), 1e-5);
      }
      EXPECT_LT(relative_difference(dwf, dw), 1e-5);
    }
}

}  // namespace
}  // namespace tessera::nn::kernels
