// The engine over a model that is no nn::Module: a product of two vectors' elements with a square loss, and a runtime
// of plain loops. What it implements is all that an engine needs.
#include <gtest/gtest.h>

#include <cmath>

#include "tessera/comm/init.h"
#include "tessera/fsdp/checkpoint.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

constexpr std::int64_t kCount = 37;  // no multiple of the ranks or of the alignment

/// A vector of weights.
class Weights final : public Parameter {
 public:
  Weights(std::string name, Stream& stream) : name_(std::move(name)), stream_(stream) {}
  const std::string& name() const override { return name_; }
  const Shape& shape() const override { return shape_; }
  std::int64_t count() const override { return kCount; }
  DType dtype() const override { return DType::f32; }
  void* data() const override {
    if (values_ == nullptr) throw base::InvalidUsage(name_ + ": " + why_);
    return values_;
  }
  void bind(void* data) override { values_ = static_cast<float*>(data); }
  void unbind(std::string_view why) override {
    values_ = nullptr;
    why_ = why;
  }
  void fill_initial(std::uint64_t seed, ElementRange range, DType dtype, void* out) const override {
    ASSERT_EQ(dtype, DType::f32);
    stream_.run([=, length = name_.size()] {
      for (std::int64_t i = range.begin; i < range.end; ++i)
        static_cast<float*>(out)[i - range.begin] = std::sin(static_cast<float>(seed + length) + static_cast<float>(i));
    });
  }
  bool requires_grad() const override { return true; }
  bool decays() const override { return false; }
  void bind_gradient(void* data, bool keep) override {
    gradient_ = static_cast<float*>(data);
    written_ = keep;
  }
  bool gradient_written() const override { return written_; }
  const void* gradient() const override { return written_ ? gradient_ : nullptr; }
  void unbind_gradient() override {
    gradient_ = nullptr;
    written_ = false;
  }
  /// The first write of a backward overwrites.
  float* write_gradient(bool& accumulate) {
    accumulate = std::exchange(written_, true);
    return gradient_;
  }

 private:
  const std::string name_;
  const Shape shape_ = {kCount};
  Stream& stream_;
  float* values_ = nullptr;
  float* gradient_ = nullptr;
  bool written_ = false;
  std::string why_ = "no memory yet";
};

class Node final : public Module {
 public:
  explicit Node(std::string path) : path_(std::move(path)) {}
  const std::string& path() const override { return path_; }
  std::string type() const override { return "Node"; }
  DType dtype() const override { return DType::f32; }
  bool is_block() const override { return !path_.empty(); }
  void set_hooks(ModuleHooks hooks) override { hooks_ = std::move(hooks); }
  const ModuleHooks& hooks() const override { return hooks_; }
  void add(std::unique_ptr<Node> child) { children_.push_back(std::move(child)); }
  void add(std::shared_ptr<Weights> weights) { parameters_.push_back(std::move(weights)); }

 private:
  const std::string path_;
  ModuleHooks hooks_;
};

class Loops final : public Runtime {
 public:
  base::DeviceRuntime& device_runtime() override { return *device_; }
  MemoryPool& memory() override { return memory_; }
  Stream& stream() override { return *stream_; }
  std::unique_ptr<Stream> make_stream() const override { return device_->make_stream(); }
  bool recording() const override { return true; }
  void upload(void* to, std::size_t, const std::function<void(void*)>& write) override { write(to); }
  void download(const void* from, std::size_t, const std::function<void(const void*)>& read) override {
    stream_->synchronize();
    read(from);
  }
  void convert(Stream&, const void*, DType, void*, DType, std::size_t) override { FAIL() << "everything is f32"; }
  void assign(Stream& stream, DType, const void* in, void* out, std::size_t count, bool accumulate) override {
    stream.run([=] {
      for (std::size_t i = 0; i < count; ++i)
        static_cast<float*>(out)[i] =
            static_cast<const float*>(in)[i] + (accumulate ? static_cast<float*>(out)[i] : 0.0F);
    });
  }
  void subtract(Stream& stream, const float* a, const float* b, float* out, std::size_t count) override {
    stream.run([=] {
      for (std::size_t i = 0; i < count; ++i) out[i] = a[i] - b[i];
    });
  }
  void norm_slices(const NormSlices& args) override {
    stream_->run([args] {
      const auto* x = static_cast<const float*>(args.x);
      for (std::size_t slice = 0; slice < args.slices; ++slice) {
        double sum = 0;
        for (std::size_t i = 0; i < args.count; ++i, ++x) sum += static_cast<double>(*x) * *x;
        args.out[slice] = sum;
      }
    });
  }
  void clip_factor(Stream& stream, const ClipArgs& args) override {
    stream.run([args] {
      double sum = 0;
      for (std::size_t i = 0; i < args.count; ++i) sum += args.parts[i];
      args.out[0] = std::sqrt(sum) / args.loss_scale;
      args.out[1] = std::min(1.0, args.most.value_or(HUGE_VAL) / (args.out[0] + 1e-6)) / args.loss_scale;
    });
  }
  /// Gradient descent.
  void update(const OptimizerConfig&, const OptimizerStep& step, const OptimizerRange& range) override {
    stream_->run([step, range] {
      const double scale = step.gradient_scale != nullptr ? *step.gradient_scale : 1;
      for (std::int64_t i = 0; i < range.count; ++i)
        range.values[i] -= static_cast<float>(step.learning_rate * scale * range.gradients[i]);
    });
  }
  std::unique_ptr<base::Graph> capture(MemoryPool&, const std::function<void()>&) override {
    throw base::Unsupported("no graphs");
  }
  std::string products() const override { return ""; }
  std::string libraries() const override { return "loops"; }

 private:
  const std::shared_ptr<base::DeviceRuntime> device_ = base::open_device({});
  MemoryPool memory_{std::make_shared<MemoryTracker>(), {}, device_};
  const std::unique_ptr<Stream> stream_ = device_->make_stream();
};

/// loss = sum of (a[i] * b[i] - target)^2 / 2
class Product final : public Model {
 public:
  Module& root() override { return root_; }
  Runtime& runtime() override { return runtime_; }

  double loss_and_backward(float target) {
    std::vector<float> a(kCount), delta(kCount);
    double loss = 0;
    const auto forward = [](Node& node, const std::function<void()>& compute) {
      if (node.hooks().pre_forward) node.hooks().pre_forward(Phase::forward);
      compute();
      if (node.hooks().post_forward) node.hooks().post_forward(Phase::forward);
    };
    const auto backward = [](Node& node, const std::function<void()>& compute) {
      if (node.hooks().pre_backward) node.hooks().pre_backward();
      compute();
      if (node.hooks().post_backward) node.hooks().post_backward();
    };
    /// The gradient of one vector; the other's values are kept from the forward, as activations are.
    const auto write = [this](Weights& weights, const std::vector<float>& other, const std::vector<float>& down) {
      bool accumulate = false;
      float* const out = weights.write_gradient(accumulate);
      runtime_.stream().run([=, &other, &down] {
        for (std::size_t i = 0; i < kCount; ++i) out[i] = other[i] * down[i] + (accumulate ? out[i] : 0.0F);
      });
    };
    std::vector<float> b(kCount);
    forward(root_, [&] {
      forward(*first_, [&] { read(*a_, a); });
      forward(*second_, [&] {
        read(*b_, b);
        for (std::size_t i = 0; i < kCount; ++i) {
          delta[i] = a[i] * b[i] - target;
          loss += 0.5 * delta[i] * delta[i];
        }
      });
    });
    backward(root_, [&] {
      backward(*second_, [&] { write(*b_, a, delta); });
      backward(*first_, [&] { write(*a_, b, delta); });
    });
    runtime_.stream().synchronize();  // the vectors above are used
    return loss;
  }

 private:
  void read(const Weights& weights, std::vector<float>& out) {
    runtime_.download(weights.data(), 0,
                      [&](const void* from) { std::copy_n(static_cast<const float*>(from), kCount, out.data()); });
  }

  Loops runtime_;
  Node root_{""};
  Node* first_ = nullptr;
  Node* second_ = nullptr;
  std::shared_ptr<Weights> a_ = std::make_shared<Weights>("a.weight", runtime_.stream());
  std::shared_ptr<Weights> b_ = std::make_shared<Weights>("bb.weight", runtime_.stream());

 public:
  Product() {
    for (Node** node : {&first_, &second_}) {
      auto made = std::make_unique<Node>(node == &first_ ? "a" : "bb");
      made->add(node == &first_ ? a_ : b_);
      *node = made.get();
      root_.add(std::move(made));
    }
  }
};

struct Trained {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> values;
  double norm = 0;
  bool operator==(const Trained&) const = default;
};

/// What rank 1 of four sees of three steps of two microbatches.
Trained train(const std::string& strategy, double clip_norm = 0.5) {
  Trained seen;
  comm::InitOptions config;
  config.backend = "shm";
  comm::run_threads(4, config, [&](comm::Communicator& world) {
    Product model;
    Engine engine(model, world,
                  {.strategy = strategy_named(strategy),
                   .optimizer = {.kind = OptimizerConfig::Kind::sgd},
                   .clip_norm = clip_norm});
    engine.initialize(3);
    Trained mine;
    for (int step = 0; step < 3; ++step) {
      for (const bool last : {false, true}) {
        engine.set_is_last_backward(last);
        mine.losses.push_back(model.loss_and_backward(static_cast<float>(world.rank() + (last ? 1 : 0))));
      }
      engine.step(0.1);
    }
    mine.norm = engine.grad_norm();
    engine.state().for_each_parameter([&](const Parameter& parameter, std::span<const float> values) {
      mine.values[parameter.name()].assign(values.begin(), values.end());
    });
    if (world.rank() == 1) seen = mine;
  });
  return seen;
}

TEST(OwnModel, TrainsAlikeUnderEveryStrategy) {
  const Trained ddp = train("ddp");
  ASSERT_EQ(ddp.losses.size(), 6U);
  EXPECT_LT(ddp.losses[4], ddp.losses[0]);
  for (const char* strategy : {"zero1", "zero2", "fsdp", "shard_grad_op", "hsdp"})
    EXPECT_EQ(train(strategy), ddp) << strategy;
  EXPECT_NE(train("fsdp", 0.4), ddp) << "the control: the comparison sees a difference";
}

/// The program's update instead of the runtime's: with two values of state, which a checkpoint keeps.
TEST(OwnModel, ProgramOptimizerIsShardedAndSaved) {
  const nn::test::TemporaryDirectory directory;
  const auto run = [&](const char* strategy, int ranks, bool resumes, int slots = 2) {
    std::map<std::string, std::vector<float>> seen;
    comm::InitOptions config;
    config.backend = "shm";
    comm::run_threads(ranks, config, [&](comm::Communicator& world) {
      Product model;
      Stream& stream = model.runtime().stream();
      std::int64_t updated = 0;
      const ProgramOptimizer optimizer{
          .slots = slots, .update = [&](const OptimizerShard& shard, const OptimizerStep& step) {
            updated += shard.range.count();
            stream.run([shard, step, count = shard.range.count()] {
              const double scale = step.gradient_scale != nullptr ? *step.gradient_scale : 1;
              for (std::int64_t i = 0; i < count; ++i) {
                const auto gradient = static_cast<float>(static_cast<const float*>(shard.gradients)[i] * scale);
                if (shard.state[0] != nullptr) shard.state[0][i] = 0.5F * shard.state[0][i] + gradient;
                if (shard.state[1] != nullptr) shard.state[1][i] += static_cast<float>(step.number);
                const float move = shard.state[0] != nullptr ? shard.state[0][i] / shard.state[1][i] : gradient;
                shard.values[i] -= static_cast<float>(step.learning_rate) * move;
              }
            });
          }};
      Engine engine(model, world,
                    {.strategy = strategy_named(strategy), .program_optimizer = optimizer, .clip_norm = 100});
      comm::HostCollectives control(world, model.runtime().device_runtime());
      engine.initialize(3);
      if (resumes) {
        Checkpoint saved(directory.path("saved"));
        restore(engine, saved);
      }
      while (engine.steps() < 3) {
        if (engine.steps() == 2 && !resumes) {
          CheckpointWriter writer(engine, control, {.directory = directory.path("saved"), .asynchronous = false});
          writer.save({});
          writer.finish();
        }
        model.loss_and_backward(1);
        engine.step(0.1);
      }
      const std::int64_t own = updated / (resumes ? 1 : 3);
      std::int64_t all = own;
      const auto view = comm::view_of(&all, 1);
      world.all_reduce(view, view, comm::ReduceOp::sum()).wait();
      EXPECT_EQ(all, 2 * kCount * (strategy == std::string("ddp") ? ranks : 1)) << strategy;
      engine.state().for_each_parameter([&](const Parameter& parameter, std::span<const float> values) {
        if (world.rank() == 0) seen[parameter.name()].assign(values.begin(), values.end());
      });
    });
    return seen;
  };
  const auto ddp = run("ddp", 2, false);
  EXPECT_EQ(run("fsdp", 4, false), ddp);
  EXPECT_EQ(run("zero1", 2, true), ddp) << "another world and strategy go on";
  EXPECT_THROW(run("fsdp", 2, true, 1), InvalidUsage) << "the control: it has another state";
  EXPECT_THROW(run("fsdp", 2, false, 4), InvalidUsage);
}

/// The gradient of the mean over ranks and the sum over microbatches, against differences of the loss itself.
TEST(OwnModel, StepFollowsGradientOfMean) {
  comm::InitOptions config;
  config.backend = "shm";
  comm::run_threads(2, config, [&](comm::Communicator& world) {
    Product model;
    Engine engine(model, world,
                  {.strategy = strategy_named("fsdp"), .optimizer = {.kind = OptimizerConfig::Kind::sgd}});
    engine.initialize(1);
    const auto values = [&] {
      std::map<std::string, std::vector<float>> all;
      engine.state().for_each_parameter([&](const Parameter& parameter, std::span<const float> each) {
        all[parameter.name()].assign(each.begin(), each.end());
      });
      return all;
    };
    const auto before = values();
    model.loss_and_backward(static_cast<float>(world.rank()));
    engine.step(0.25);
    const auto after = values();
    for (std::size_t i = 0; i < kCount; ++i) {
      const double a = before.at("a.weight")[i], b = before.at("bb.weight")[i];
      EXPECT_NEAR(after.at("a.weight")[i], a - 0.25 * (a * b - 0.5) * b, 1e-6);  // targets 0 and 1
      EXPECT_NEAR(after.at("bb.weight")[i], b - 0.25 * (a * b - 0.5) * a, 1e-6);
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
