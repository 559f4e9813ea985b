// What an engine of a libtorch model does beside training: accumulation, clipping, frozen parameters, evaluation,
// checkpoints, errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>

#include "tessera/fsdp/checkpoint.h"
#include "tests/libtorch/models.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::libtorch::test {
namespace {

using base::InvalidUsage;
using testing::HasSubstr;

bool has_memory(const torch::Tensor& tensor) {
  try {
    return tensor.storage().data_ptr().get() != nullptr;
  } catch (const c10::Error&) {  // newer ones say so
    return false;
  }
}

TEST(LibtorchEngine, OptionsKeepTheBitsOfDdp) {
  const auto train_two = [](Spec spec) {
    spec.ranks = 2;
    spec.microbatches = 2;
    spec.options.clip_norm = 0.1;
    return train<Transformer>(spec);
  };
  const Trained ddp = train_two({.strategy = "ddp"});
  EXPECT_EQ(train_two({.options = {.prefetch = 0}}), ddp);
  EXPECT_EQ(train_two({.options = {.reshard_after_forward = true}}), ddp);
  EXPECT_EQ(train_two({.options = {.reshard_after_forward = false}}), ddp);
  EXPECT_EQ(train_two({.options = {.wrap = "none"}}), ddp);
  EXPECT_EQ(train_two({.options = {.wrap = "blocks.0+blocks.1"}}), ddp);
  EXPECT_EQ(train_two({.options = {.limit_all_gathers = 1}}), ddp);
  EXPECT_EQ(train_two({.strategy = "zero2", .options = {.buffers = fsdp::BufferSync::first_rank}}), ddp);
  EXPECT_NE(train_two({.strategy = "ddp", .steps = 2}), ddp) << "the control: the comparison sees a difference";
}

/// Gathers the shards as they were at the first call.
class StaleGather final : public fsdp::CollectivePlugin {
 public:
  fsdp::WorkChain run(const fsdp::CollectiveCall& call) override {
    fsdp::WorkChain chain;
    for (const fsdp::FlatTransfer& transfer : call.transfers) {
      std::vector<std::byte>& first = first_[transfer.in.data];
      const auto* const now = static_cast<const std::byte*>(transfer.in.data);
      if (first.empty()) first.assign(now, now + transfer.in.count * base::size_of(transfer.in.dtype));
      fsdp::FlatTransfer old = transfer;
      old.in.data = first.data();
      chain.add(fsdp::start_plain(comm::OpKind::all_gather, call, old));
    }
    return chain;
  }

 private:
  std::map<const void*, std::vector<std::byte>> first_;
};

/// The control of equality: a gather that brings the values of the first step is seen.
TEST(LibtorchEngine, StaleGatherIsSeen) {
  Spec spec{.ranks = 2};
  const Trained expected = train<Transformer>(spec);
  spec.options.collectives.add(comm::OpKind::all_gather, "stale", [] { return std::make_unique<StaleGather>(); });
  EXPECT_EQ(train<Transformer>(spec), expected);
  spec.all_gather = "stale";
  const Trained stale = train<Transformer>(spec);
  EXPECT_EQ(stale.losses.front(), expected.losses.front());
  EXPECT_NE(stale.losses.back(), expected.losses.back());
}

TEST(LibtorchEngine, FrozenParametersStayAndCanBeTrainedLater) {
  const auto run = [](const char* strategy) {
    Trained seen;
    run_ranks(2, [&](comm::Communicator& world) {
      Transformer model = make<Transformer>();
      const std::vector<float> before = floats(model->norm->weight);
      model->norm->weight.set_requires_grad(false);
      Engine engine(*model, world, with(strategy));
      Trained mine;
      train_steps({.steps = 2}, model, engine, world, mine);
      const Values frozen = [&] {
        Values values;
        for (const auto& [name, tensor] : engine.state_dict()) values[name] = floats(tensor);
        return values;
      }();
      EXPECT_EQ(frozen.at("norm.weight"), before);
      model->norm->weight.set_requires_grad(true);
      engine.apply_requires_grad();
      train_steps({.steps = 2}, model, engine, world, mine);
      for (const auto& [name, tensor] : engine.state_dict()) mine.values[name] = floats(tensor);
      EXPECT_NE(mine.values.at("norm.weight"), before);
      if (world.rank() == 0) seen = mine;
    });
    return seen;
  };
  EXPECT_EQ(run("fsdp"), run("ddp"));
}

TEST(LibtorchEngine, EvaluationKeepsNothingAndAgrees) {
  run_ranks(2, [](comm::Communicator& world) {
    Mlp plain = make<Mlp>(), model = make<Mlp>();
    Engine engine(*model, world, with("fsdp", {.poison = true}));
    plain->eval();
    model->eval();
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i) EXPECT_EQ(model->loss(i, 0, 1).item<float>(), plain->loss(i, 0, 1).item<float>());
    EXPECT_FALSE(has_memory(model->head->weight)) << "no backward follows";
  });
}

/// No storage of a unit has memory between its forward and its backward, nor after the step.
TEST(LibtorchEngine, ReshardedUnitsHaveNoMemory) {
  run_ranks(2, [](comm::Communicator& world) {
    Transformer model = make<Transformer>();
    Engine engine(*model, world, with("fsdp", {.reshard_after_forward = false}));
    const auto alive = [&] {
      const std::vector<torch::Tensor> all = model->parameters();
      return std::count_if(all.begin(), all.end(), has_memory);
    };
    EXPECT_EQ(alive(), 0);
    const torch::Tensor loss = model->loss(0, world.rank(), 2);
    EXPECT_GT(alive(), 0) << "the control: kept after forward";
    loss.backward();
    engine.step(1e-2);
    EXPECT_EQ(alive(), 0);
  });
}

/// A hook of the program on a parameter sees its gradient before the engine does, and may replace it.
TEST(LibtorchEngine, HooksOfTheProgramChangeGradients) {
  const auto bias_after = [](double factor, double rate, bool with_engine) {
    std::vector<float> values;
    run_ranks(1, [&](comm::Communicator& world) {
      Transformer model = make<Transformer>();
      if (factor != 1)
        model->norm->bias.register_hook([factor](const torch::Tensor& gradient) { return gradient * factor; });
      if (!with_engine) {
        model->loss(1, 0, 1).backward();
        const torch::NoGradGuard no_grad;
        values = floats(model->norm->bias - rate * model->norm->bias.grad());
        return;
      }
      Engine engine(*model, world, with("fsdp", {.optimizer = {.kind = base::OptimizerConfig::Kind::sgd}}));
      model->loss(1, 0, 1).backward();
      engine.step(rate);
      values = floats(engine.state_dict().at("norm.bias"));
    });
    return values;
  };
  const std::vector<float> expected = bias_after(2, 1.0, false);
  EXPECT_EQ(bias_after(2, 1.0, true), expected);
  EXPECT_NE(bias_after(1, 1.0, true), expected) << "the control";
}

TEST(LibtorchEngine, CheckpointOfFourRanksResumesOnTwo) {
  const nn::test::TemporaryDirectory directory;
  const auto run = [&](const char* strategy, int ranks, bool resumes) {
    Values seen;
    run_ranks(ranks, [&](comm::Communicator& world) {
      Mlp model = make<Mlp>();
      Engine engine(*model, world, with(strategy));
      comm::HostCollectives control(world, engine.model().runtime().device_runtime());
      if (resumes) {
        fsdp::Checkpoint saved(directory.path("saved"));
        restore(engine, saved);
      }
      model->eval();  // dropout's generators are the program's, and not in the checkpoint
      Trained trained;
      train_steps({.steps = 2}, model, engine, world, trained);
      if (!resumes) {
        fsdp::CheckpointWriter writer(engine, control, {.directory = directory.path("saved"), .asynchronous = false});
        writer.save({});
        writer.finish();
        train_steps({.steps = 2}, model, engine, world, trained);
      }
      for (const auto& [name, tensor] : engine.state_dict())
        if (world.rank() == 0) seen[name] = floats(tensor);
    });
    return seen;
  };
  const Values whole = run("fsdp", 4, false);
  EXPECT_EQ(run("zero2", 4, true), whole);
  EXPECT_EQ(run("fsdp", 2, true), whole) << "all ranks have the same batch, so another world goes on alike";
}

TEST(LibtorchEngine, ConsolidatesIntoPlainModelThatTorchSaves) {
  const nn::test::TemporaryDirectory directory;
  run_ranks(2, [&](comm::Communicator& world) {
    Transformer model = make<Transformer>(), plain = make<Transformer>(), loaded = make<Transformer>();
    Engine engine(*model, world, with("fsdp"));
    Trained trained;
    train_steps({.steps = 2}, model, engine, world, trained);
    engine.consolidate(*plain);
    const std::string path = directory.path(std::to_string(world.rank()));
    torch::save(plain.ptr(), path);
    std::shared_ptr<Transformer::Impl> target = loaded.ptr();
    torch::load(target, path);
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(loaded->loss(0, 0, 1).item<float>(), model->loss(0, 0, 1).item<float>());
    Mlp other = make<Mlp>();
    EXPECT_THROW(engine.consolidate(*other), InvalidUsage);
  });
}

TEST(LibtorchEngine, ProgramOptimizerOfTorchUpdatesShards) {
  const auto update = [](const fsdp::OptimizerShard& shard, const base::OptimizerStep& step) {
    const auto tensor = [&](const void* data) {
      return torch::from_blob(const_cast<void*>(data), {shard.range.count()});
    };
    torch::Tensor values = tensor(shard.values);
    values.mutable_grad() = tensor(shard.gradients);
    torch::optim::SGD(std::vector<torch::Tensor>{values}, torch::optim::SGDOptions(step.learning_rate)).step();
  };
  const auto run = [](const char* strategy, const fsdp::EngineOptions& options) {
    return train<Transformer>({.strategy = strategy, .ranks = 2, .options = options}).values;
  };
  const fsdp::EngineOptions by_torch{.program_optimizer = fsdp::ProgramOptimizer{.slots = 0, .update = update}};
  const Values sharded = run("fsdp", by_torch);
  EXPECT_EQ(sharded, run("ddp", by_torch));
  const Values own = run("fsdp", {.optimizer = {.kind = base::OptimizerConfig::Kind::sgd}});
  for (const auto& [name, values] : own)
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(sharded.at(name)[i], values[i], 1e-6) << name;
}

TEST(LibtorchEngine, RanksBeginWithTheValuesOfTheFirst) {
  run_ranks(2, [](comm::Communicator& world) {
    Mlp model = make<Mlp>();
    const std::vector<float> first = floats(model->head->weight);
    if (world.rank() == 1) model->head->weight.data().zero_();
    Engine engine(*model, world, with("fsdp"));
    EXPECT_EQ(floats(engine.state_dict().at("head.weight")), first);
  });
}

struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(at::Device device)
      : weight(register_parameter("weight", torch::empty({6, 3}, device))),
        shift(register_buffer("shift", torch::empty({6}, device))) {}
  torch::Tensor forward(const torch::Tensor& x) { return (x.matmul(weight.t()) + shift).square().mean(); }
  torch::Tensor weight, shift;
};
TESSERA_UNIT(Scale);

TEST(LibtorchEngine, InitializerFillsTensorsOfTheMetaDevice) {
  const Initializer fill = [](const std::string& name, torch::Tensor& values) {
    values.copy_(torch::sin(torch::arange(values.numel(), torch::kFloat)).reshape(values.sizes()) +
                 static_cast<double>(name.size()));
  };
  const auto run = [&](at::Device device, const char* strategy, InitialValues initial) {
    Values seen;
    run_ranks(2, [&](comm::Communicator& world) {
      Scale model(device);
      if (!model->weight.is_meta()) {
        const torch::NoGradGuard no_grad;
        fill("weight", model->weight);
        fill("shift", model->shift);
      }
      Engine engine(*model, world, with(strategy, {.wrap = "none"}), initial, fill);
      model->forward(torch::ones({2, 3})).backward();
      engine.step(1e-2);
      for (const auto& [name, tensor] : engine.state_dict())
        if (world.rank() == 0) seen[name] = floats(tensor);
    });
    return seen;
  };
  const Values expected = run(torch::kCPU, "ddp", InitialValues::first_rank);
  for (const InitialValues initial : {InitialValues::first_rank, InitialValues::own})
    for (const char* const strategy : {"ddp", "fsdp"}) EXPECT_EQ(run(torch::kMeta, strategy, initial), expected);
  EXPECT_THAT(refused([](comm::Communicator& world) {
                Scale model(torch::kMeta);
                Engine engine(*model, world, with("ddp", {.wrap = "none"}));
              }),
              HasSubstr("weight is on the meta device and has no values; pass an initializer"));
}

/// The root is an ordinary module; several of its forwards precede one backward.
struct PairImpl : torch::nn::Module {
  PairImpl() : layer(register_module("layer", Layer(7, 5, at::detail::createCPUGenerator(1)))) {}
  torch::Tensor forward(const torch::Tensor& x) { return layer(x).square().mean(); }
  Layer layer;
};
TORCH_MODULE(Pair);

TEST(LibtorchEngine, RootWithoutUnitIsCalledByTheEngine) {
  const auto run = [](const char* strategy, int calls) {
    std::vector<float> seen;
    run_ranks(2, [&](comm::Communicator& world) {
      Pair model;
      for (torch::Tensor& parameter : model->parameters()) parameter.data().fill_(0.1);
      Engine engine(*model, world, with(strategy));
      for (int step = 0; step < 2; ++step) {
        torch::Tensor loss = torch::zeros({});
        for (int i = 0; i < calls; ++i)
          loss = loss + engine.forward([&](const torch::Tensor& x) { return model->forward(x); },
                                       torch::sin(torch::arange(28, torch::kFloat).reshape({4, 7}) * (i + 1)));
        loss.backward();
        engine.step(1e-2);
      }
      for (const auto& [name, tensor] : engine.state_dict())
        if (world.rank() == 0)
          for (const float value : floats(tensor)) seen.push_back(value);
    });
    return seen;
  };
  EXPECT_EQ(run("fsdp", 1), run("ddp", 1));
  EXPECT_EQ(run("fsdp", 2), run("ddp", 2));
  EXPECT_NE(run("fsdp", 1), run("fsdp", 2));
}

TEST(LibtorchEngine, ExceptionsLeaveTheEngineUsable) {
  run_ranks(2, [](comm::Communicator& world) {
    Transformer model = make<Transformer>(), other = make<Transformer>();
    Engine engine(*model, world, with("fsdp")), expected(*other, world, with("fsdp"));
    EXPECT_THROW(model->forward(torch::full({1, 3}, kWords + 5, torch::kLong)), std::exception);
    engine.abort_step();
    Trained mine, theirs;
    train_steps({.steps = 2}, model, engine, world, mine);
    train_steps({.steps = 2}, other, expected, world, theirs);
    EXPECT_EQ(mine, theirs);
  });
}

TEST(LibtorchEngine, BackwardAfterStepIsAnErrorAsInPlainLibtorch) {
  run_ranks(1, [](comm::Communicator& world) {
    Mlp model = make<Mlp>();
    Engine engine(*model, world, with("ddp"));
    const torch::Tensor loss = model->loss(0, 0, 1);
    loss.backward({}, /*retain_graph=*/true);
    engine.step(1e-2);
    EXPECT_THROW(loss.backward(), std::exception);
  });
}

struct PlainImpl : torch::nn::Module {
  PlainImpl() : linear(register_module("linear", torch::nn::Linear(2, 2))) {}
  torch::Tensor forward(const torch::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Plain);

/// Calls its blocks past their holders.
struct PastHoldersImpl : torch::nn::Module {
  PastHoldersImpl() : blocks(register_module("blocks", torch::nn::ModuleList(Block()))) {}
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return x;
  }
  torch::nn::ModuleList blocks;
};
TESSERA_UNIT(PastHolders);

TEST(LibtorchEngine, UnitMustBeCalledThroughItsHolder) {
  EXPECT_THAT(refused([](comm::Communicator& world) {
                Plain model;
                Engine engine(*model, world, with("ddp", {.wrap = "linear"}));
              }),
              HasSubstr("write TESSERA_UNIT(Linear) instead of TORCH_MODULE(Linear)"));
  for (const char* const strategy : {"ddp", "fsdp"})
    EXPECT_THAT(refused([&](comm::Communicator& world) {
                  PastHolders model;
                  Engine engine(*model, world, with(strategy));
                  model->forward(torch::ones({1, 2, kWidth})).sum().backward();
                }),
                HasSubstr("module blocks.0"))
        << strategy;
  EXPECT_THAT(refused([](comm::Communicator& world) {
                Transformer model = make<Transformer>();
                Engine engine(*model, world, with("ddp"));
                model->blocks->ptr(0)->as<Block>()->forward(torch::ones({1, 2, kWidth})).sum().backward();
              }),
              HasSubstr("module blocks.0 (Block) was not called in a forward of the whole model"));
}

}  // namespace
}  // namespace tessera::libtorch::test
