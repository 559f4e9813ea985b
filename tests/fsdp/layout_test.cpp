// Strategies, meshes, wrapping and the flat layout: everything that is fixed before the first step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/fsdp/strategy.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class Leaf : public nn::Layer<Leaf> {
 public:
  Leaf(nn::Context& context, nn::Shape shape)
      : Layer(context), weight(add_parameter("weight", shape, nn::Init::ones())) {}
  nn::Parameter& weight;
};

class Block : public nn::Layer<Block> {
 public:
  explicit Block(nn::Context& context)
      : Layer(context), norm(add<Leaf>("norm", nn::Shape{5})), fc(add<Leaf>("fc", nn::Shape{5, 7})) {
    mark_block();
  }
  Leaf& norm;
  Leaf& fc;
};

/// wte, two blocks, a norm, and a head that shares wte's weight.
class Model : public nn::Layer<Model> {
 public:
  explicit Model(nn::Context& context)
      : Layer(context),
        wte(add<Leaf>("wte", nn::Shape{11, 5})),
        h0(add<Block>("h.0")),
        h1(add<Block>("h.1")),
        ln_f(add<Leaf>("ln_f", nn::Shape{5})) {
    tie_parameter(wte.weight, wte);
  }
  Leaf& wte;
  Block& h0;
  Block& h1;
  Leaf& ln_f;
};

std::vector<std::string> names(const std::vector<UnitSpec>& units) {
  std::vector<std::string> out;
  for (const UnitSpec& unit : units) out.push_back(unit.name);
  return out;
}

std::vector<std::string> parameters(const UnitSpec& unit) {
  std::vector<std::string> out;
  for (const auto& parameter : unit.parameters) out.push_back(parameter->name());
  return out;
}

TEST(Wrap, BlocksAreUnitsAndRootHasRest) {
  nn::Context context;
  Model model(context);
  NnModel adapted(model);
  const auto units = make_units(adapted.root(), "block");
  ASSERT_THAT(names(units), ElementsAre("root", "h.0", "h.1"));
  EXPECT_THAT(parameters(units[0]), ElementsAre("wte.weight", "ln_f.weight"));
  EXPECT_THAT(parameters(units[1]), ElementsAre("h.0.norm.weight", "h.0.fc.weight"));
  EXPECT_TRUE(units[0].is_root);
}

TEST(Wrap, NoneMakesOneUnitWithAllParameters) {
  nn::Context context;
  Model model(context);
  NnModel adapted(model);
  const auto units = make_units(adapted.root(), "none");
  ASSERT_THAT(names(units), ElementsAre("root"));
  EXPECT_EQ(units[0].parameters.size(), model.parameters().size());
}

TEST(Wrap, SizeExcludesInnerUnits) {
  nn::Context context;
  Model model(context);
  NnModel adapted(model);
  EXPECT_THAT(names(make_units(adapted.root(), "size:35")),
              ElementsAre("root", "h.0.fc", "h.1.fc"));  // fc has 35, the block 5 more
  EXPECT_THAT(names(make_units(adapted.root(), "size:36")), ElementsAre("root", "h.0", "h.1"));
  EXPECT_THAT(names(make_units(adapted.root(), "size:1000")), ElementsAre("root"));
}

TEST(Wrap, ByModuleType) {
  nn::Context context;
  Model model(context);
  NnModel adapted(model);
  EXPECT_EQ(adapted.root().find("h.0").type(), "Block");
  EXPECT_THAT(names(make_units(adapted.root(), "type:Block")), ElementsAre("root", "h.0", "h.1"));
  // Inside a block's unit its leaves are units of their own, and no parameter is left for the block.
  EXPECT_THAT(names(make_units(adapted.root(), "block;type:Leaf")),
              ElementsAre("root", "h.0.norm", "h.0.fc", "h.1.norm", "h.1.fc", "ln_f"));
  try {
    make_units(adapted.root(), "type:Attention");
    FAIL();
  } catch (const InvalidUsage& error) {
    EXPECT_THAT(error.what(), HasSubstr("no module of that class; it has Block Leaf"));
  }
}

TEST(Wrap, ByProgramPolicy) {
  nn::Context context;
  Model model(context);
  NnModel adapted(model);
  const auto units = make_units(
      adapted.root(), [](const fsdp::Module& module) { return module.path() == "h.1" || module.path() == "h.0.fc"; });
  EXPECT_THAT(names(units), ElementsAre("root", "h.0.fc", "h.1"));
  EXPECT_THAT(parameters(units[0]), ElementsAre("wte.weight", "h.0.norm.weight", "ln_f.weight"));
}

TEST(Wrap, IgnoredParametersAreInNoUnit) {
  nn::Context context;
  Model model(context);
  NnModel adapted(model);
  const auto is_norm = [](const fsdp::Parameter& parameter) { return parameter.shape().size() == 1; };
  const auto units = make_units(adapted.root(), "block;ln_f", is_norm);
  ASSERT_THAT(names(units), ElementsAre("root", "h.0", "h.1"));  // ln_f has no parameters left
  for (const UnitSpec& unit : units)
    for (const auto& parameter : unit.parameters) EXPECT_FALSE(is_norm(*parameter)) << parameter->name();
  EXPECT_THROW(make_units(adapted.root(), "block", [](const fsdp::Parameter&) { return true; }), InvalidUsage);
}

TEST(Wrap, ReportsRootOverhead) {
  nn::Context context;
  Model model(context);
  NnModel adapted(model);
  const auto units = make_units(adapted.root(), "block");
  const auto held = needlessly_held(adapted.root(), units[0]);
  ASSERT_EQ(held.size(), 1U);  // the head uses wte's weight, too
  EXPECT_EQ(held[0].module->path(), "ln_f");
  EXPECT_EQ(held[0].elements, 5);
  EXPECT_TRUE(needlessly_held(adapted.root(), make_units(adapted.root(), "block;ln_f")[0]).empty());
}

TEST(Wrap, ListJoinsModulesAndTiedTensorStaysInRoot) {
  nn::Context context;
  Model model(context);
  NnModel adapted(model);
  const auto units = make_units(adapted.root(), "block;wte+ln_f");
  // The root uses wte's weight too. Leaving wte's module must not reshard it, so it stays with the root.
  ASSERT_THAT(names(units), ElementsAre("root", "wte+ln_f", "h.0", "h.1"));
  EXPECT_THAT(parameters(units[0]), ElementsAre("wte.weight"));
  EXPECT_THAT(parameters(units[1]), ElementsAre("ln_f.weight"));
}

TEST(Wrap, RejectsUnknownNames) {
  nn::Context context;
  Model model(context);
  NnModel adapted(model);
  EXPECT_THROW(make_units(adapted.root(), "block;nothing"), InvalidUsage);
  EXPECT_THROW(make_units(adapted.root(), "block;h.0"), InvalidUsage);
  EXPECT_THROW(make_units(adapted.root(), "size:0"), InvalidUsage);
  EXPECT_THROW(make_units(adapted.root(), ""), InvalidUsage);
  Leaf leaf(context, {3});
  EXPECT_THROW(make_units(NnModel(leaf).root(), "block"), InvalidUsage);
}

TEST(FlatLayout, AlignsParametersAndPadsToWorldSize) {
  nn::Context context;
  Block block(context);
  for (const int world : {1, 2, 3, 4, 5, 7}) {
    const auto layouts = make_layouts(NnModel(block).root().parameters(), world);
    ASSERT_EQ(layouts.size(), 1u);
    const FlatLayout& layout = layouts[0];
    EXPECT_EQ(layout.elements, 40);
    EXPECT_EQ(layout.entries[0].offset, 0);
    EXPECT_EQ(layout.entries[1].offset, 8);
    EXPECT_EQ(layout.padded, (43 + 8 * world - 1) / (8 * world) * (8 * world));
    std::int64_t holes = 0;
    for (const ElementRange gap : layout.gaps()) holes += gap.count();
    EXPECT_EQ(holes, layout.padding());
  }
}

TEST(FlatLayout, SeparatesFrozenParameters) {
  nn::Context context;
  Block block(context);
  nn::Tensor frozen = block.norm.weight.tensor();
  frozen.set_requires_grad(false);
  const auto layouts = make_layouts(NnModel(block).root().parameters(), 2);
  ASSERT_EQ(layouts.size(), 2u);
  EXPECT_FALSE(layouts[0].trainable);
  EXPECT_TRUE(layouts[1].trainable);
}

TEST(FlatLayout, WithinSplitsParameterAtShardBoundary) {
  nn::Context context;
  Block block(context);
  const FlatLayout layout = make_layouts(NnModel(block).root().parameters(), 2)[0];  // norm 0..5, fc 8..43, padded 48
  EXPECT_EQ(within(layout.entries[1], {24, 48}).begin, 16);
  EXPECT_EQ(within(layout.entries[1], {24, 48}).end, 35);
  EXPECT_EQ(within(layout.entries[0], {24, 48}).count(), 0);
}

TEST(Strategy, AliasesAreEqual) {
  EXPECT_EQ(strategy_named("full_shard").name, "fsdp");
  EXPECT_EQ(strategy_named("no_shard").name, "ddp");
  EXPECT_EQ(strategy_named("hybrid_shard").name, "hsdp");
  EXPECT_NE(strategy_named("shard_grad_op").param_at_rest, strategy_named("zero2").param_at_rest);
  try {
    strategy_named("fdsp");
    FAIL();
  } catch (const InvalidUsage& error) {
    EXPECT_THAT(error.what(), HasSubstr("ddp zero1 zero2 fsdp hsdp shard_grad_op"));
  }
}

TEST(Strategy, RejectsInconsistentAxes) {
  for (const std::string& name : strategy_names()) EXPECT_NO_THROW(validate(strategy_named(name)));
  EXPECT_THROW(validate({.name = "x", .gradient = {kShardAxis}}), InvalidUsage);
  EXPECT_THROW(validate({.name = "x", .param_at_rest = {kShardAxis}, .optimizer = {kShardAxis}}), InvalidUsage);
  Strategy periodic = strategy_named("ddp");
  periodic.sync[kReplicateAxis] = {.when = Sync::When::period, .period = 10};
  EXPECT_THROW(validate(periodic), Unsupported);
}

TEST(Mesh, ParsesDefaultsAndSpellings) {
  const auto shape = [](const MeshShape& mesh) {
    return std::pair(mesh.size_of(kReplicateAxis), mesh.size_of(kShardAxis));
  };
  EXPECT_EQ(shape(default_mesh(strategy_named("fsdp"), 4, 4)), std::pair(1, 4));
  EXPECT_EQ(shape(default_mesh(strategy_named("hsdp"), 4, 4)), std::pair(2, 2));
  EXPECT_EQ(shape(default_mesh(strategy_named("hsdp"), 1, 1)), std::pair(1, 1));
  EXPECT_EQ(shape(default_mesh(strategy_named("hsdp"), 12, 4)), std::pair(3, 4));
  EXPECT_THROW(default_mesh(strategy_named("hsdp"), 3, 3), InvalidUsage);
  EXPECT_THROW(default_mesh(strategy_named("hsdp"), 6, 4), InvalidUsage);
  EXPECT_EQ(shape(parse_mesh("3x2")), std::pair(3, 2));
  for (const char* wrong : {"", "4", "x", "2x", "0x4", "2x2x2", "-1x4", "65536x65536", "1048576x2"})
    EXPECT_THROW(parse_mesh(wrong), InvalidUsage) << wrong;
  EXPECT_EQ(parse_mesh("1048576x1").size(), 1 << 20);
}

}  // namespace
}  // namespace tessera::fsdp
