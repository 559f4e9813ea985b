// Models and changes of them that an engine of a libtorch model refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/libtorch/models.h"

namespace tessera::libtorch::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(LibtorchMisuse, TensorsThatCannotBeShardedAreRefused) {
  struct View : torch::nn::Module {
    View() { register_parameter("part", torch::ones({4, 4}).narrow(0, 1, 2)); }
  };
  EXPECT_THAT(refused([](comm::Communicator& world) {
                View model;
                Engine engine(model, world, with("ddp", {.wrap = "none"}));
              }),
              HasSubstr("part is not contiguous, or a part of another tensor"));
}

TEST(LibtorchMisuse, TensorsThatAutogradComputesAreRefused) {
  struct Computed : torch::nn::Module {
    Computed() { register_parameter("computed", torch::ones({4}, torch::requires_grad()).view({2, 2})); }
  };
  EXPECT_THAT(refused([](comm::Communicator& world) {
                Computed model;
                Engine engine(model, world, with("ddp", {.wrap = "none"}));
              }),
              HasSubstr("computed is computed from a tensor with gradients"));
}

/// Otherwise the engine would train tensors that the model no longer uses.
TEST(LibtorchMisuse, ParametersReplacedAfterwardsAreRefused) {
  for (const char* const strategy : {"ddp", "fsdp"}) {
    const auto train_after = [&](const std::function<void(Transformer&)>& change) {
      return refused([&](comm::Communicator& world) {
        Transformer model = make<Transformer>();
        Engine engine(*model, world, with(strategy));
        change(model);
        model->loss(1, 0, 1).backward();
        engine.step(1e-2);
      });
    };
    EXPECT_EQ(train_after([](Transformer&) {}), "") << "the control";
    EXPECT_THAT(train_after([](Transformer& model) { model->norm->weight.set_data(torch::ones({kWidth})); }),
                HasSubstr("norm.weight has other memory than when the engine was made"))
        << strategy;
  }
  EXPECT_THAT(refused([](comm::Communicator& world) {
                Mlp model = make<Mlp>();
                Engine engine(*model, world, with("fsdp"));
                model->named_buffers().front().value().set_data(torch::zeros({13}));
                model->loss(1, 0, 1).backward();
                engine.step(1e-2);
              }),
              HasSubstr("running_mean has other memory than when the engine was made"));
}

/// Otherwise the engine would leave them as they are, with gradients that only grow.
TEST(LibtorchMisuse, ParametersRegisteredAfterwardsAreRefused) {
  const auto train_after = [&](const std::function<void(Mlp&)>& change) {
    return refused([&](comm::Communicator& world) {
      Mlp model = make<Mlp>();
      Engine engine(*model, world, with("fsdp"));
      change(model);
      model->loss(1, 0, 1).backward();
      engine.step(1e-2);
    });
  };
  EXPECT_THAT(train_after([](Mlp& model) {
                model->head = torch::nn::Linear(11, 3);
                model->replace_module("head", model->head);
              }),
              HasSubstr("head.weight was registered, or a module with it was replaced, after the engine was made"));
  EXPECT_THAT(train_after([](Mlp& model) { model->register_parameter("scale", torch::ones({1})); }),
              HasSubstr("scale was registered"));
  EXPECT_EQ(train_after([](Mlp& model) { model->register_parameter("frozen", torch::ones({1}), false); }), "");
}

/// A gradient that goes into the engine's memory has no graph of its own.
TEST(LibtorchMisuse, BackwardThroughABackwardIsRefused) {
  const auto backward = [](bool creates_graph) {
    return refused([&](comm::Communicator& world) {
      Transformer model = make<Transformer>();
      Engine engine(*model, world, with("fsdp"));
      const torch::Tensor loss = model->loss(1, 0, 1);
      try {
        loss.backward({}, creates_graph, creates_graph);
      } catch (const base::Unsupported& error) {
        throw base::InvalidUsage(error.what());
      }
    });
  };
  EXPECT_EQ(backward(false), "") << "the control";
  EXPECT_THAT(backward(true), HasSubstr("backward: create_graph"));
}

TEST(LibtorchMisuse, RanksWithOtherDtypesAreRefusedOnAll) {
  std::vector<std::string> messages(2);
  run_ranks(2, [&](comm::Communicator& world) {
    Transformer model = make<Transformer>(world.rank() == 0 ? torch::kFloat : torch::kBFloat16);
    try {
      Engine engine(*model, world, with("fsdp"));
    } catch (const base::Error& error) {
      messages[static_cast<std::size_t>(world.rank())] = error.what();
    }
  });
  for (const std::string& message : messages) EXPECT_THAT(message, AllOf(HasSubstr("f32"), HasSubstr("bf16")));
}

}  // namespace
}  // namespace tessera::libtorch::test
