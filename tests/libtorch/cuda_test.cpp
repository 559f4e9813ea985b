// libtorch models on a CUDA device, where Torch's stream is the engine's. Ranks are processes, as of tessera run: those
// of one process would share the thread on which autograd computes for a device.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "tessera/fsdp/checkpoint.h"
#include "tests/libtorch/models.h"

namespace tessera::libtorch::test {
namespace {

constexpr const char* kStrategies[] = {"ddp", "zero1", "zero2", "fsdp"};

comm::Communicator& world() {
  static const std::shared_ptr<comm::Communicator> world =
      comm::init({.device = base::open_device({base::DeviceType::cuda, 0})});
  return *world;
}

/// The world, or where its backend moves only the device's memory, as nccl does, one of the same ranks for the host's.
comm::Communicator& host_world() {
  if (std::ranges::count(world().capabilities().memory, comm::MemoryKind::host) != 0) return world();
  static const std::shared_ptr<comm::Communicator> host = [] {
    comm::InitOptions options{.backend = "shm", .launch = comm::resolve_launch()};
    ++options.launch->generation;
    return comm::init(std::move(options));
  }();
  return *host;
}

comm::Communicator& world_of(at::Device device) { return device.is_cpu() ? host_world() : world(); }

template <class Model>
Trained train_here(const Spec& spec, at::Device device, comm::Communicator& ranks) {
  Model model = make<Model>(spec.dtype);
  model->to(device);
  fsdp::EngineOptions options = with(spec.strategy, spec.options);
  if (spec.optimizer) options.program_optimizer = spec.optimizer();
  Engine engine(*model, ranks, options);
  Trained seen;
  train_steps(spec, model, engine, ranks, seen);
  seen.copied_bytes = engine.stats().copied_bytes();
  for (const auto& [name, tensor] : engine.state_dict()) seen.values[name] = floats(tensor);
  return seen;
}

template <class Model>
Trained train_here(const Spec& spec, at::Device device) {
  return train_here<Model>(spec, device, world_of(device));
}

template <class Model>
class LibtorchCuda : public testing::Test {};
using Models = testing::Types<Mlp, Transformer>;
TYPED_TEST_SUITE(LibtorchCuda, Models);

TYPED_TEST(LibtorchCuda, EveryStrategyEndsWithTheSameBits) {
  for (const at::ScalarType dtype : {torch::kFloat, torch::kBFloat16}) {
    Spec spec{.strategy = "ddp", .dtype = dtype, .microbatches = 2, .options = {.poison = true}};
    const Trained expected = train_here<TypeParam>(spec, torch::kCUDA);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    EXPECT_EQ(expected.copied_bytes, 0U);
    for (const char* const strategy : kStrategies) {
      spec.strategy = strategy;
      EXPECT_EQ(train_here<TypeParam>(spec, torch::kCUDA), expected) << strategy << " in " << dtype;
    }
    if (world().size() > 1 && dtype == torch::kFloat) {
      spec.options.cpu_offload = true;
      EXPECT_EQ(train_here<TypeParam>(spec, torch::kCUDA), expected) << "with shards on the host";
    }
    spec = {.strategy = "ddp", .dtype = dtype};
    EXPECT_NE(train_here<TypeParam>(spec, torch::kCUDA), expected) << "the control: other microbatches";
  }
}

/// With SGD: AdamW turns the rounding of gradients that are zero but for it into steps.
TYPED_TEST(LibtorchCuda, FollowsTheHost) {
  const Spec spec{.options = {.optimizer = {.kind = base::OptimizerConfig::Kind::sgd}}};
  const Trained host = train_here<TypeParam>(spec, torch::kCPU), device = train_here<TypeParam>(spec, torch::kCUDA);
  for (std::size_t i = 0; i < host.losses.size(); ++i) EXPECT_NEAR(host.losses[i], device.losses.at(i), 1e-5);
  for (const auto& [name, values] : host.values)
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], device.values.at(name).at(i), 1e-5) << name;
}

/// torch::optim::SGD adds in one operation, as the plain program's.
fsdp::ProgramOptimizer plain_sgd() {
  return {.slots = 0, .update = [](const fsdp::OptimizerShard& shard, const base::OptimizerStep& step) {
            const torch::NoGradGuard no_grad;
            const auto tensor = [&](const void* data) {
              return torch::from_blob(const_cast<void*>(data), {shard.range.count()},
                                      torch::TensorOptions(torch::kCUDA).dtype(torch::kFloat));
            };
            tensor(shard.values).add_(tensor(shard.gradients), -step.learning_rate);
          }};
}

TYPED_TEST(LibtorchCuda, WorldOfOneIsThePlainProgram) {
  const auto alone = world().split(world().rank(), 0);
  TypeParam model = make<TypeParam>();
  model->to(torch::kCUDA);
  std::vector<float> losses;
  for (int step = 0; step < 3; ++step) {
    const torch::Tensor loss = model->loss(10 * step + 1, 0, 1);
    loss.backward();
    losses.push_back(loss.template item<float>());
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : model->parameters()) {
      if (parameter.grad().defined()) parameter.add_(parameter.grad(), -1e-2);
      parameter.mutable_grad().reset();
    }
  }
  const Trained one = train_here<TypeParam>({.optimizer = plain_sgd}, torch::kCUDA, *alone);
  EXPECT_EQ(one.losses, losses);
  for (const auto& item : model->named_parameters()) {
    if (item.key() == "words.weight") continue;  // under its first name, "tied"
    EXPECT_EQ(one.values.at(item.key()), floats(item.value())) << item.key();
  }
}

TEST(LibtorchCudaEngine, CountsTheMemoryOfTorchsAllocator) {
  constexpr std::int64_t kElements = 1 << 26;  // much more than the workspace of cuBLAS
  Mlp model = make<Mlp>();
  model->to(torch::kCUDA);
  Engine engine(*model, world(), with("fsdp"));
  base::MemoryTracker& memory = engine.model().runtime().memory_tracker();
  const auto peak_of_step = [&](std::int64_t more) {
    memory.reset_peaks();
    const torch::Tensor loss = engine.forward([&] {
      torch::zeros({more}, torch::TensorOptions(torch::kCUDA));
      return model->loss(0, 0, 1);
    });
    loss.backward();
    engine.step(1e-2);
    return memory.snapshot().peak_of(base::MemoryCategory::activation);
  };
  EXPECT_GT(peak_of_step(1), 0U);
  EXPECT_LT(peak_of_step(1), kElements * sizeof(float)) << "the control";
  EXPECT_GE(peak_of_step(kElements), kElements * sizeof(float));
  EXPECT_LT(peak_of_step(1), kElements * sizeof(float)) << "a peak is that of its own step";
}

TEST(LibtorchCudaEngine, AnotherStreamIsRefused) {
  Mlp model = make<Mlp>();
  model->to(torch::kCUDA);
  Engine engine(*model, world(), with("ddp"));
  const torch::Tensor first = model->loss(0, 0, 1);
  first.backward();
  engine.step(1e-2);
  const c10::impl::VirtualGuardImpl streams(c10::kCUDA);
  const c10::Device device(c10::kCUDA, 0);
  const c10::Stream before = streams.exchangeStream(streams.getStreamFromGlobalPool(device));
  std::string message;
  try {
    model->loss(1, 0, 1);
  } catch (const base::InvalidUsage& error) {
    message = error.what();
  }
  streams.exchangeStream(before);
  EXPECT_NE(message.find("Torch's current stream of cuda:0 is not the one"), std::string::npos) << message;
}

TEST(LibtorchCudaEngine, CheckpointsGoToTheHostAndBack) {
  const std::string folder =
      testing::TempDir() + "libtorch_cuda_" + std::to_string(world().size()) + "_" + std::string(world().backend());
  std::map<std::string, torch::Tensor> saved;
  {
    Transformer model = make<Transformer>();
    model->to(torch::kCUDA);
    Engine engine(*model, world(), with("fsdp"));
    Trained seen;
    train_steps({}, model, engine, world(), seen);
    comm::HostCollectives control(world(), engine.model().runtime().device_runtime());
    fsdp::CheckpointWriter writer(engine, control, {.directory = folder, .asynchronous = false});
    writer.save({});
    writer.finish();
    saved = engine.state_dict();
  }
  for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kCUDA)}) {
    Transformer model = make<Transformer>();
    model->to(device);
    Engine engine(*model, world_of(device), with("zero1"));
    EXPECT_FALSE(torch::equal(engine.state_dict().at("norm.weight"), saved.at("norm.weight"))) << "the control";
    fsdp::Checkpoint checkpoint(folder);
    restore(engine, checkpoint);
    for (const auto& [name, value] : engine.state_dict()) EXPECT_TRUE(torch::equal(value, saved.at(name))) << name;
  }
  world().barrier().wait();
  if (world().rank() == 0) std::filesystem::remove_all(folder);
}

TEST(LibtorchCudaEngine, TensorsOfTwoDevicesAreRefused) {
  Mlp model = make<Mlp>();
  model->head->to(torch::kCUDA);
  try {
    const TorchModel adapted(*model);
    FAIL() << "it was accepted";
  } catch (const base::InvalidUsage& error) {
    EXPECT_STREQ(error.what(),
                 "head.weight is on cuda:0, and layers.0.linear.weight on cpu; move the model to one device before its "
                 "engine is made");
  }
}

}  // namespace
}  // namespace tessera::libtorch::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!torch::cuda::is_available()) {
    std::puts("no CUDA device: Torch finds none");
    return 0;
  }
  return RUN_ALL_TESTS();
}
