// Measures a device's kernels at a GPT-2's shapes, and the device's limits in the same run: copies within its memory,
// and its largest matrix product. Each kernel's ideal time is the longer of its bytes (each tensor once) at the copy
// rate and its operations at the product's rate; its gap is the time beyond that, times its calls per step.
//
//   bench_device_kernels --device cuda --dtype bf16 --json FILE
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "bench/call_counter.h"
#include "bench/sizes.h"
#include "tessera/base/error.h"
#include "tessera/nn/context.h"
#include "tessera/nn/host_access.h"

namespace {

using namespace tessera;
using namespace tessera::nn;
using kernels::OpMath;

using bench::Sizes;

/// One kernel, as a step calls it.
struct Case {
  std::string name;
  double calls = 1;  ///< per step
  std::function<void()> run;
  double uncounted = 0;  ///< bytes of the counts that the call's data makes unnecessary
};

struct Figure {
  std::string name;
  double calls = 0, us = 0, gbps = 0, tflops = 0;
  double of_limit = 0;  ///< ideal time / time
  double gap_us = 0;    ///< per step
};

struct Limits {
  double gbps = 0, tflops = 0;
};

class Bench {
 public:
  Bench(const Sizes& shape, const std::string& device, double milliseconds)
      : s_(shape),
        context_({.runtime = observe(base::open_device(base::parse_device(device)), counter_)}),
        least_ms_(milliseconds) {}

  template <class T>
  void run() {
    measure_limits<T>();
    products<T>();
    attention<T>();
    rows<T>();
    vocabulary<T>();
    optimizer<T>();
  }
  const std::vector<Figure>& figures() const { return figures_; }
  const Limits& limits() const { return limits_; }

 private:
  Stream& stream() { return context_.stream(); }
  template <class T>
  KernelTable<T>& k() {
    return context_.kernels<T>("bench");
  }
  /// The elements that a row of logits occupies.
  std::size_t padded(std::size_t columns) const {
    return static_cast<std::size_t>(context_.padded_row(static_cast<std::int64_t>(columns)));
  }
  base::Buffer room(std::size_t bytes) { return context_.memory().allocate(bytes, base::MemoryCategory::other); }
  /// Small random numbers.
  template <class T>
  T* numbers(std::vector<base::Buffer>& keep, std::size_t count) {
    T* data = static_cast<T*>(keep.emplace_back(room(count * sizeof(T))).data());
    k<T>().fill_normal(stream(), {.range = {.end = count}, .deviation = OpMath<T>(0.02), .out = data});
    return data;
  }
  std::int32_t* ids(std::vector<base::Buffer>& keep, const std::vector<std::int32_t>& values) {
    auto* data = static_cast<std::int32_t*>(keep.emplace_back(room(s_.rows() * 4)).data());
    upload(context_, data, s_.rows() * 4,
           [&](void* to) { std::copy(values.begin(), values.end(), static_cast<std::int32_t*>(to)); });
    return data;
  }

  /// The median of five rounds, in microseconds, by the stream's own clock.
  double time(const std::function<void()>& work) {
    const auto round = [&](int calls) {
      const base::Event begin = stream().record_timed();
      for (int i = 0; i < calls; ++i) work();
      const base::Event end = stream().record_timed();
      return static_cast<double>(end.time_ns() - begin.time_ns()) * 1e-3 / calls;
    };
    round(1);
    const int calls = std::clamp(static_cast<int>(least_ms_ * 1e3 / std::max(1.0, round(1))), 1, 200);
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) times.push_back(round(calls));
    std::sort(times.begin(), times.end());
    return times[2];
  }

  void add(const Case& c) {
    counter_.bytes = counter_.flops = 0;
    c.run();
    const double bytes = counter_.bytes - c.uncounted, flops = counter_.flops, us = time(c.run);
    const double ideal = std::max(bytes / limits_.gbps * 1e-3, flops / limits_.tflops * 1e-6);
    figures_.push_back({.name = c.name,
                        .calls = c.calls,
                        .us = us,
                        .gbps = bytes / us * 1e-3,
                        .tflops = flops / us * 1e-6,
                        .of_limit = ideal / us,
                        .gap_us = (us - ideal) * c.calls});
  }

  template <class T>
  void measure_limits() {
    std::vector<base::Buffer> keep;
    const bool host = context_.runtime().host_accessible();
    const std::size_t bytes = std::size_t{host ? 64U : 1024U} << 20;
    void* from = keep.emplace_back(room(bytes)).data();
    void* to = keep.emplace_back(room(bytes)).data();
    context_.runtime().fill(stream(), from, 1, bytes);
    limits_.gbps = 2e-3 * static_cast<double>(bytes) / time([&] {
                     context_.runtime().copy(stream(), base::CopyDirection::device_to_device, to, from, bytes);
                   });
    const std::size_t n = host ? 1024 : 8192;
    const T *a = numbers<T>(keep, n * n), *b = numbers<T>(keep, n * n);
    T* c = numbers<T>(keep, n * n);
    const auto cube = 2.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n);
    limits_.tflops = cube * 1e-6 / time([&] {
                       k<T>().linear_forward(stream(), {.shape = {n, n, n}, .x = a, .weight = b, .y = c});
                     });
  }

  /// The three matrix products of one linear layer, and its bias gradient.
  template <class T>
  void linear(const std::string& name, std::size_t in, std::size_t out, double calls, bool gelu) {
    const std::size_t rows = s_.rows(), row = name == "head" ? padded(out) : out;
    std::vector<base::Buffer> keep;
    const T *x = numbers<T>(keep, rows * in), *w = numbers<T>(keep, in * out), *bias = numbers<T>(keep, out),
            *dy = numbers<T>(keep, rows * row);
    T *y = numbers<T>(keep, rows * row), *z = numbers<T>(keep, gelu ? rows * out : 1),
      *dx = numbers<T>(keep, rows * in), *dw = numbers<T>(keep, in * out), *db = numbers<T>(keep, out);
    const bool biased = name != "head";
    const auto layout = biased ? kernels::WeightLayout::in_out : kernels::WeightLayout::out_in;
    const kernels::LinearShape shape{rows, in, out, layout};
    add({name + " forward" + (gelu ? " and gelu" : ""), calls, [&] {
           k<T>().linear_forward(stream(), {.shape = shape,
                                            .x = x,
                                            .weight = w,
                                            .bias = biased ? bias : nullptr,
                                            .y = y,
                                            .activated = gelu ? z : nullptr,
                                            .activation = kernels::Activation::gelu_tanh,
                                            .y_stride = row});
         }});
    add({name + " dx", calls, [&] {
           k<T>().linear_backward(stream(), {.shape = shape, .weight = w, .dy = dy, .dx = dx, .dy_stride = row});
         }});
    kernels::LinearBackward<T> sums{
        .shape = shape, .x = x, .dy = dy, .dweight = dw, .dbias = biased ? db : nullptr, .dy_stride = row};
    add({name + (biased ? " dw and dbias" : " dw"), calls, [&] { k<T>().linear_backward(stream(), sums); }});
    sums.dweight = nullptr;  // dbias alone, as where no product includes it
    if (biased) add({name + " dbias", 0, [&] { k<T>().linear_backward(stream(), sums); }});
  }

  template <class T>
  void products() {
    const auto layers = static_cast<double>(s_.layers);
    linear<T>("qkv", s_.width, 3 * s_.width, layers, false);
    linear<T>("projection", s_.width, s_.width, layers, false);
    linear<T>("up", s_.width, 4 * s_.width, layers, true);
    linear<T>("down", 4 * s_.width, s_.width, layers, false);
    linear<T>("head", s_.width, s_.vocabulary, 1, false);
  }

  template <class T>
  void attention() {
    const std::size_t size = s_.rows() * s_.width, dim = s_.width / s_.heads;
    std::vector<base::Buffer> keep;
    T *qkv = numbers<T>(keep, 3 * size), *out = numbers<T>(keep, size), *dout = numbers<T>(keep, size),
      *dqkv = numbers<T>(keep, 3 * size);
    auto* sums = static_cast<OpMath<T>*>(keep.emplace_back(room(s_.rows() * s_.heads * sizeof(OpMath<T>))).data());
    const kernels::AttentionShape shape{s_.batch, s_.positions, s_.heads, s_.heads, dim};
    const auto in = [&](std::size_t part) {
      return kernels::fused_qkv_view<const T>(qkv, part, s_.positions, s_.heads, dim);
    };
    const auto gradient = [&](std::size_t part) {
      return kernels::fused_qkv_view<T>(dqkv, part, s_.positions, s_.heads, dim);
    };
    const auto view = [&]<class U>(U* data) { return kernels::heads_view<U>(data, s_.positions, s_.heads, dim); };
    void* scratch = keep.emplace_back(room(std::max(k<T>().attention_forward_scratch(shape),
                                                    k<T>().attention_backward_scratch(shape))))
                        .data();
    const auto layers = static_cast<double>(s_.layers);
    add({"attention forward", layers, [&] {
           k<T>().attention_forward(stream(), {shape, in(0), in(1), in(2), view(out), sums, scratch});
         }});
    add({"attention backward", layers, [&] {
           k<T>().attention_backward(stream(), {.shape = shape,
                                                .q = in(0),
                                                .k = in(1),
                                                .v = in(2),
                                                .out = view(static_cast<const T*>(out)),
                                                .dout = view(static_cast<const T*>(dout)),
                                                .log_sum_exp = sums,
                                                .dq = gradient(0),
                                                .dk = gradient(1),
                                                .dv = gradient(2),
                                                .scratch = scratch});
         }});
  }

  template <class T>
  void rows() {
    const std::size_t size = s_.rows() * s_.width;
    std::vector<base::Buffer> keep;
    T *x = numbers<T>(keep, 4 * size), *dy = numbers<T>(keep, 4 * size), *y = numbers<T>(keep, 4 * size),
      *weight = numbers<T>(keep, s_.width), *dw = numbers<T>(keep, s_.width), *db = numbers<T>(keep, s_.width);
    auto* mean = static_cast<OpMath<T>*>(keep.emplace_back(room(s_.rows() * sizeof(OpMath<T>))).data());
    auto* rstd = static_cast<OpMath<T>*>(keep.emplace_back(room(s_.rows() * sizeof(OpMath<T>))).data());
    const auto layers = static_cast<double>(s_.layers);
    kernels::NormForward<T> norm{s_.rows(), s_.width, x, weight, weight, OpMath<T>(1e-5), y, mean, rstd};
    add({"layer norm forward", layers + 1, [&] { k<T>().norm_forward(stream(), norm); }});
    norm.added = dy, norm.sum = x + size;
    add({"sum and layer norm", layers, [&] { k<T>().norm_forward(stream(), norm); }});
    add({"layer norm backward", 2 * layers + 1, [&] {
           k<T>().norm_backward(stream(), {.rows = s_.rows(),
                                           .width = s_.width,
                                           .x = x,
                                           .weight = weight,
                                           .mean = mean,
                                           .rstd = rstd,
                                           .dy = dy,
                                           .dx = y,
                                           .dweight = dw,
                                           .dbias = db,
                                           .accumulate_dx = true});
         }});
    add({"gelu backward", layers, [&] {
           k<T>().activation_backward(stream(), kernels::Activation::gelu_tanh, {x, dy, y, 4 * size, false});
         }});
    add({"residual add", layers, [&] { k<T>().add(stream(), {x, dy, y, size}); }});
  }

  template <class T>
  void vocabulary() {
    std::vector<base::Buffer> keep;
    const std::size_t size = s_.rows() * s_.width, row = padded(s_.vocabulary), logits = s_.rows() * row;
    const std::vector<std::int32_t> text = bench::ids_as_in_text(s_);
    const std::int32_t* targets = ids(keep, text);
    T *table = numbers<T>(keep, s_.vocabulary * s_.width), *x = numbers<T>(keep, size), *p = numbers<T>(keep, logits);
    auto* row_max = static_cast<OpMath<T>*>(keep.emplace_back(room(s_.rows() * sizeof(OpMath<T>))).data());
    auto* row_sum = static_cast<OpMath<T>*>(keep.emplace_back(room(s_.rows() * sizeof(OpMath<T>))).data());
    auto* loss = static_cast<double*>(keep.emplace_back(room(3 * sizeof(double))).data());
    context_.kernels<double>("bench").fill(stream(), 1.0, loss, 3);
    add({"cross-entropy forward", 1, [&] {
           k<T>().cross_entropy_forward(stream(), {.rows = {.logits = p,
                                                            .targets = targets,
                                                            .rows = s_.rows(),
                                                            .vocabulary = s_.vocabulary,
                                                            .row_max = row_max,
                                                            .row_sum = row_sum,
                                                            .stride = row},
                                                   .loss = loss,
                                                   .valid = loss + 1});
         }});
    add({"cross-entropy backward", 1, [&] {
           k<T>().cross_entropy_backward(stream(), {.rows = {.logits = p,
                                                             .targets = targets,
                                                             .rows = s_.rows(),
                                                             .vocabulary = s_.vocabulary,
                                                             .row_max = row_max,
                                                             .row_sum = row_sum,
                                                             .dlogits = p,
                                                             .stride = row},
                                                    .upstream = loss + 2,
                                                    .valid = loss + 1});
         }});
    add({"embedding forward", 2, [&] {
           k<T>().embedding_forward(stream(), {table, targets, x, s_.rows(), s_.vocabulary, s_.width, false});
         }});
    const std::size_t repeated = std::min(s_.rows(), s_.vocabulary) - std::set(text.begin(), text.end()).size();
    add({.name = "embedding backward",
         .run =
             [&] {
               k<T>().embedding_backward(stream(), {targets, x, table, s_.rows(), s_.vocabulary, s_.width, true});
             },
         .uncounted = 2 * static_cast<double>(repeated * s_.width * sizeof(T))});
  }

  /// f32 master weights; 16-bit gradients and copies if the model is 16-bit.
  template <class T>
  void optimizer() {
    const std::size_t count = s_.parameters();
    std::vector<base::Buffer> keep;
    T *gradient = numbers<T>(keep, count), *copy = numbers<T>(keep, sizeof(T) == 2 ? count : 1);
    auto *values = numbers<float>(keep, count), *first = numbers<float>(keep, count),
         *second = numbers<float>(keep, count);
    kernels::AdamStep<float> step{
        .parameter = values, .first_moment = first, .second_moment = second, .count = count, .weight_decay = 0.01};
    context_.kernels<float>("bench").fill(stream(), 1.0F, second, count);
    if constexpr (sizeof(T) == 2) {
      step.half = {base::dtype_of<T>, gradient, copy};
    } else {
      step.gradient = gradient;
    }
    add({"adamw", 1, [&] { context_.kernels<float>("bench").adam_step(stream(), step); }});
    auto* sum = static_cast<double*>(keep.emplace_back(room(sizeof(double))).data());
    auto* counter = static_cast<std::uint32_t*>(keep.emplace_back(room(sizeof(std::uint32_t))).data());
    context_.runtime().fill(stream(), counter, 0, sizeof *counter);
    add({"gradient norm", 1,
         [&] { k<T>().norm_parts(stream(), {.x = gradient, .count = count, .counters = counter, .out = sum}); }});
  }

  const Sizes s_;
  bench::CallCounter counter_;
  Context context_;
  const double least_ms_;
  Limits limits_;
  std::vector<Figure> figures_;
};

void print(const Bench& bench) {
  fmt::print("limits: {:.0f} GB/s copied and {:.1f} TFLOP/s in products, measured in this run\n\n", bench.limits().gbps,
             bench.limits().tflops);
  fmt::print("{:<24} {:>6} {:>11} {:>8} {:>8} {:>9} {:>11}\n", "kernel", "calls", "us", "GB/s", "TFLOP/s", "of limit",
             "gap us/step");
  for (const Figure& f : bench.figures())
    fmt::print("{:<24} {:>6.0f} {:>11.1f} {:>8.0f} {:>8.2f} {:>8.0f}% {:>11.0f}\n", f.name, f.calls, f.us, f.gbps,
               f.tflops, 100 * f.of_limit, f.gap_us);
  std::vector<Figure> worst = bench.figures();
  std::sort(worst.begin(), worst.end(), [](const Figure& a, const Figure& b) { return a.gap_us > b.gap_us; });
  fmt::print("\nlargest gaps:");
  for (std::size_t i = 0; i < 3 && i < worst.size(); ++i)
    fmt::print("{} {} ({:.2f} ms a step)", i == 0 ? "" : ",", worst[i].name, worst[i].gap_us * 1e-3);
  fmt::print("\n");
}

void write(const Bench& bench, const std::string& path) {
  nlohmann::ordered_json json = {{"limits", {{"gbps", bench.limits().gbps}, {"tflops", bench.limits().tflops}}},
                                 {"kernels", nlohmann::ordered_json::array()}};
  for (const Figure& f : bench.figures())
    json["kernels"].push_back({{"name", f.name},
                               {"calls", f.calls},
                               {"us", f.us},
                               {"gbps", f.gbps},
                               {"tflops", f.tflops},
                               {"of_limit", f.of_limit},
                               {"gap_us", f.gap_us}});
  std::ofstream file(path);
  file << json.dump(1) << "\n";
  if (!file.flush()) throw base::InvalidUsage("--json " + path + ": can't be written");
}

}  // namespace

int main(int count, char** arguments) {
  CLI::App app("what a device's kernels achieve at a GPT-2's shapes, of what the device can");
  Sizes shape;
  std::string device = "cpu", dtype = "f32", json;
  double milliseconds = 20;
  app.add_option("--device", device, "cpu or cuda")->capture_default_str();
  app.add_option("--dtype", dtype, "f32 or bf16")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  const auto positive = CLI::Range(std::size_t{1}, std::size_t{1} << 24);
  app.add_option("--batch", shape.batch)->check(positive)->capture_default_str();
  app.add_option("--positions", shape.positions)->check(positive)->capture_default_str();
  app.add_option("--width", shape.width, "a multiple of the heads")->check(positive)->capture_default_str();
  app.add_option("--heads", shape.heads)->check(positive)->capture_default_str();
  app.add_option("--layers", shape.layers)->check(positive)->capture_default_str();
  app.add_option("--vocabulary", shape.vocabulary)->check(positive)->capture_default_str();
  app.add_option("--milliseconds", milliseconds, "that one round of a kernel lasts")->capture_default_str();
  app.add_option("--json", json, "also writes the table here")->type_name("FILE");
  CLI11_PARSE(app, count, arguments);
  try {
    if (shape.width % shape.heads != 0)
      throw base::InvalidUsage(fmt::format("--width {} is no multiple of --heads {}", shape.width, shape.heads));
    Bench bench(shape, device, milliseconds);
    dtype == "bf16" ? bench.run<base::bf16>() : bench.run<float>();
    print(bench);
    if (!json.empty()) write(bench, json);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_device_kernels: {}\n", error.what());
    return 2;
  }
}
