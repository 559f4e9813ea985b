// Embedding, cross-entropy, RoPE and dropout.
#include <cmath>
#include <numbers>
#include "tessera/base/error.h"
#include "tessera/nn/kernels/cross_entropy.h"
#include "tessera/nn/kernels/dropout.h"
#include "tessera/nn/kernels/embedding.h"
#include "tessera/nn/kernels/rope.h"

#include "tests/nn/kernels/support.h"

namespace tessera::nn::kernels {
namespace {
using namespace test;

std::vector<std::int32_t> ids_below(std::size_t count, std::uint32_t vocabulary) {
  std::vector<std::uint32_t> words(count);
  random_words(tensor_stream(1, "ids"), 0, count, words.data());
  std::vector<std::int32_t> ids(count);
  for (std::size_t i = 0; i < count; ++i) ids[i] = static_cast<std::int32_t>(words[i] % vocabulary);
  return ids;
}

TEST(Embedding, GathersAddsAndScattersInOrder) {
  for (const std::size_t threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    const std::size_t rows = 50, vocabulary = 7, width = 133;
    const auto weight = random_vector<float>(vocabulary * width, 1), dy = random_vector<float>(rows * width, 2);
    const auto ids = ids_below(rows, vocabulary);
    std::vector<float> y(rows * width, NAN), dw(vocabulary * width, NAN), expected(vocabulary * width, 0.0f);
    EmbeddingForward<float> args{weight.data(), ids.data(), y.data(), rows, vocabulary, width, false};
    embedding_forward(pool, args);
    args.accumulate = true;
    embedding_forward(pool, args);
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t i = 0; i < width; ++i) {
        const std::size_t at = static_cast<std::size_t>(ids[r]) * width + i;
        ASSERT_EQ(y[r * width + i], 2 * weight[at]);
        expected[at] += dy[r * width + i];
      }
    EmbeddingBackward<float> back{ids.data(), dy.data(), dw.data(), rows, vocabulary, width, false};
    embedding_backward(pool, back);
    EXPECT_TRUE(same_bits(dw, expected));
    back.accumulate = true;
    embedding_backward(pool, back);
    EXPECT_LT(relative_difference(dw, plus(expected, expected)), 1e-6);
  }
}

TEST(Embedding, RejectsInvalidId) {
  ThreadPool pool;
  float weight[4] = {}, y[2] = {5, 5};
  for (const std::int32_t id : {-1, 2, -100}) {
    EXPECT_THROW(embedding_forward<float>(pool, {weight, &id, y, 1, 2, 2, false}), base::InvalidUsage);
    EXPECT_THROW(embedding_backward<float>(pool, {&id, y, weight, 1, 2, 2, false}), base::InvalidUsage);
  }
  EXPECT_EQ(y[0], 5);
}

struct LossCase {
  std::size_t rows = 3, vocabulary;
  std::vector<double> logits;
  std::vector<std::int32_t> targets;
  explicit LossCase(std::size_t v)
      : vocabulary(v),
        logits(random_vector<double>(3 * v, v, 3)),
        targets(ids_below(3, static_cast<std::uint32_t>(v))) {
    targets[1] = kIgnoreIndex;
  }
};

TEST(CrossEntropy, GradientsEqualFiniteDifferences) {
  ThreadPool pool(2);
  for (const std::size_t vocabulary : {1u, 5u, 13u, 33u, 257u}) {
    LossCase c(vocabulary);
    const std::size_t n = c.rows * vocabulary;
    std::vector<double> max(3), sum(3), d(n, NAN);
    const auto loss = [&] {
      return cross_entropy_forward<double>(pool, {.logits = c.logits.data(),
                                                  .targets = c.targets.data(),
                                                  .rows = 3,
                                                  .vocabulary = vocabulary,
                                                  .row_max = max.data(),
                                                  .row_sum = sum.data()})
          .loss_sum;
    };
    const auto expected = differences(c.logits, [&] { return 0.5 * loss(); });
    loss();
    CrossEntropyBackward<double> args{.logits = c.logits.data(),
                                      .targets = c.targets.data(),
                                      .rows = 3,
                                      .vocabulary = vocabulary,
                                      .row_max = max.data(),
                                      .row_sum = sum.data(),
                                      .scale = 0.5,
                                      .dlogits = d.data()};
    cross_entropy_backward(pool, args);
    if (vocabulary > 1) {
      EXPECT_LT(relative_difference(d, expected), kGradientTolerance);
    }
    for (std::size_t i = 0; i < vocabulary; ++i) EXPECT_EQ(d[vocabulary + i], 0) << "ignored row";
    std::vector<double> more(n, 1.0);
    args.dlogits = more.data();
    args.accumulate = true;
    cross_entropy_backward(pool, args);
    EXPECT_LT(relative_difference(more, plus(std::vector<double>(n, 1.0), d)), 1e-15);
    std::vector<double> place = c.logits;
    args.logits = args.dlogits = place.data();
    args.accumulate = false;
    cross_entropy_backward(pool, args);
    EXPECT_TRUE(same_bits(place, d)) << "in place";
  }
}

TEST(CrossEntropy, LossAndCountAndFloat) {
  ThreadPool pool;
  LossCase c(33);
  for (double& x : c.logits) x += 500;  // the maximum is subtracted: no overflow
  double expected = 0;
  for (const std::size_t row : {0u, 2u}) {
    long double sum = 0;
    for (std::size_t i = 0; i < 33; ++i) sum += std::exp(static_cast<long double>(c.logits[row * 33 + i]) - 500);
    expected +=
        static_cast<double>(std::log(sum) + 500 - c.logits[row * 33 + static_cast<std::size_t>(c.targets[row])]);
  }
  CrossEntropyForward<double> args{.logits = c.logits.data(), .targets = c.targets.data(), .rows = 3, .vocabulary = 33};
  EXPECT_NEAR(cross_entropy_forward(pool, args).loss_sum, expected, 1e-11);
  EXPECT_EQ(cross_entropy_forward(pool, args).valid, 2u);
  for (double& x : c.logits) x -= 500;
  const std::vector<float> f = cast<float>(c.logits);
  const auto result = cross_entropy_forward<float>(
      pool, {.logits = f.data(), .targets = c.targets.data(), .rows = 3, .vocabulary = 33});
  EXPECT_NEAR(result.loss_sum, expected, 1e-5);
  c.targets[0] = 33;
  EXPECT_THROW(cross_entropy_forward(pool, args), base::InvalidUsage);
}

TEST(CrossEntropy, NaNReachesLoss) {
  ThreadPool pool;
  for (std::size_t at = 0; at < 40; ++at) {
    std::vector<float> x = random_vector<float>(40, 1);
    x[at] = NAN;
    const std::int32_t target = 3;
    EXPECT_TRUE(std::isnan(
        cross_entropy_forward<float>(pool, {.logits = x.data(), .targets = &target, .rows = 1, .vocabulary = 40})
            .loss_sum));
  }
}

TEST(CrossEntropy, BitsForOneTwoAndThreeThreads) {
  const std::size_t rows = 300, vocabulary = 257;
  const auto logits = random_vector<float>(rows * vocabulary, 1, 2);
  const auto targets = ids_below(rows, vocabulary);
  std::vector<float> first;
  double loss = 0;
  for (const std::size_t threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    std::vector<float> max(rows), sum(rows), d(logits.size());
    const auto r = cross_entropy_forward<float>(pool, {.logits = logits.data(),
                                                       .targets = targets.data(),
                                                       .rows = rows,
                                                       .vocabulary = vocabulary,
                                                       .row_max = max.data(),
                                                       .row_sum = sum.data()});
    cross_entropy_backward<float>(pool, {.logits = logits.data(),
                                         .targets = targets.data(),
                                         .rows = rows,
                                         .vocabulary = vocabulary,
                                         .row_max = max.data(),
                                         .row_sum = sum.data(),
                                         .scale = 0.01f,
                                         .dlogits = d.data()});
    if (threads == 1) first = d, loss = r.loss_sum;
    EXPECT_EQ(r.loss_sum, loss);
    EXPECT_TRUE(same_bits(d, first));
  }
}

TEST(Rope, ScalingChangesFrequencies) {
  const auto frequencies = [](const RopeScaling& scaling) {  // of position 1, by pair
    std::vector<double> cosine(2 * 5), sine(2 * 5), angles;
    rope_table(2, 10, 10000.0, cosine.data(), sine.data(), scaling);
    for (std::size_t i = 0; i < 5; ++i) angles.push_back(std::atan2(sine[5 + i], cosine[5 + i]));
    return angles;
  };
  const std::vector<double> plain = frequencies({}), linear = frequencies({.factor = 4});
  const std::vector<double> llama3 = frequencies({.factor = 8, .low = 1, .high = 4, .original_context = 80});
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(linear[i], plain[i] / 4, 1e-12);
    const double periods = 80 * plain[i] / (2 * std::numbers::pi);
    const double kept = periods <= 1 ? 0 : periods >= 4 ? 1 : (periods - 1) / 3;  // Llama 3's reference
    EXPECT_NEAR(llama3[i], plain[i] * (kept + (1 - kept) / 8), 1e-12) << periods;
  }
  EXPECT_EQ(llama3[0], plain[0]) << "of more than 4 periods";
  EXPECT_NEAR(llama3[4], plain[4] / 8, 1e-12) << "of less than 1";
}

TEST(Rope, RotatesPairsForwardAndBackward) {
  ThreadPool pool(2);
  const std::size_t batch = 2, positions = 70, heads = 3, dim = 10, n = batch * positions * heads * dim;
  std::vector<double> cosine(positions * dim / 2), sine(cosine.size());
  rope_table(positions, dim, 10000.0, cosine.data(), sine.data());
  const auto x = random_vector<double>(n, 1);
  std::vector<double> y(n), back(n), more(n, 1.0);
  RopeArgs<double> args{.batch = batch,
                        .positions = positions,
                        .heads = heads,
                        .dim = dim,
                        .cosine = cosine.data(),
                        .sine = sine.data(),
                        .in = heads_view(x.data(), positions, heads, dim),
                        .out = heads_view(y.data(), positions, heads, dim)};
  rope(pool, args);
  for (std::size_t at = 0; at < n; ++at) {
    const std::size_t i = at % dim, p = at / (dim * heads) % positions, pair = i % 5;
    const double angle = static_cast<double>(p) * std::pow(10000.0, -2.0 * static_cast<double>(pair) / 10);
    const double other = i < 5 ? -x[at + 5] : x[at - 5];  // rotate_half
    EXPECT_NEAR(y[at], x[at] * std::cos(angle) + other * std::sin(angle), 1e-14);
  }
  // The rotation is orthogonal, so its gradient is its inverse.
  args.in = heads_view(static_cast<const double*>(y.data()), positions, heads, dim);
  args.out = heads_view(back.data(), positions, heads, dim);
  args.inverse = true;
  rope(pool, args);
  EXPECT_LT(relative_difference(back, x), 1e-14);
  args.out = heads_view(more.data(), positions, heads, dim);
  args.accumulate = true;
  rope(pool, args);
  EXPECT_LT(relative_difference(more, plus(std::vector<double>(n, 1.0), x)), 1e-14);
  args.out = heads_view(y.data(), positions, heads, dim);
  args.accumulate = false;
  rope(pool, args);
  EXPECT_TRUE(same_bits(y, back)) << "in place";
  args.dim = 9;
  EXPECT_THROW(rope(pool, args), base::InvalidUsage);
}

struct Key {
  std::uint64_t seed = 0, step = 0;
  std::string_view module = {};
  std::uint64_t first_sample = 0;
  RandomStream stream() const { return dropout_stream(seed, step, module, first_sample); }
};

struct Dropped {
  std::vector<float> y;
  explicit Dropped(const Key& key, std::size_t samples, std::size_t elements, double p = 0.25, std::size_t threads = 1)
      : y(samples * elements) {
    ThreadPool pool(threads);
    const std::vector<float> x(y.size(), 3.0f);
    dropout<float>(pool, {.stream = key.stream(),
                          .probability = p,
                          .samples = samples,
                          .elements = elements,
                          .x = x.data(),
                          .y = y.data()});
  }
};

TEST(Dropout, KeepsMeanAndScales) {
  const Dropped d({.seed = 1, .step = 5, .module = "h.0.mlp.dropout"}, 4, 50001);
  std::size_t dropped = 0;
  for (const float v : d.y) {
    EXPECT_TRUE(v == 0.0f || v == 4.0f);
    dropped += v == 0.0f;
  }
  EXPECT_NEAR(static_cast<double>(dropped) / static_cast<double>(d.y.size()), 0.25, 0.005);
  for (const float v : Dropped({}, 1, 1000, 0.0).y) EXPECT_EQ(v, 3.0f);
  EXPECT_THROW(Dropped({}, 1, 1, 1.0), base::InvalidUsage);
}

TEST(Dropout, MaskBelongsToGlobalSample) {
  const Key key{.seed = 1, .step = 5, .module = "m"};
  const std::size_t elements = 5001;
  const Dropped all(key, 4, elements), threads(key, 4, elements, 0.25, 3);
  EXPECT_TRUE(same_bits(all.y, threads.y));
  for (std::size_t sample = 0; sample < 4; ++sample) {
    Key one = key;
    one.first_sample = sample;
    const auto begin = all.y.begin() + static_cast<long>(sample * elements);
    const std::vector<float> expected(begin, begin + static_cast<long>(elements));
    EXPECT_TRUE(same_bits(Dropped(one, 1, elements).y, expected));
    // Controls: another sample, step, module or seed gives another mask.
    Key other = one;
    other.first_sample += 1;
    EXPECT_FALSE(same_bits(Dropped(other, 1, elements).y, expected));
    other = one, other.step += 1;
    EXPECT_FALSE(same_bits(Dropped(other, 1, elements).y, expected));
    other = one, other.module = "n";
    EXPECT_FALSE(same_bits(Dropped(other, 1, elements).y, expected));
    other = one, other.seed += 1;
    EXPECT_FALSE(same_bits(Dropped(other, 1, elements).y, expected));
  }
}

}  // namespace
}  // namespace tessera::nn::kernels
