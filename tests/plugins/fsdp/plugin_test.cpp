// Shared objects with strategies and collectives: good ones are loaded and named, bad ones are refused with the reason.
#include "tessera/fsdp/plugin.h"

#include <gmock/gmock.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/nn_model.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

namespace fs = std::filesystem;
using comm::OpKind;
using testing::AllOf;
using testing::HasSubstr;

const fs::path kModules = TESSERA_TEST_PLUGINS;
const CollectiveRegistry kRegistry = CollectiveRegistry::built_in();

std::string file_of(const std::string& name) { return kModules / (name + ".so"); }

/// The text of the error that `body` throws, with the name of its type.
std::string error_of(const std::function<void()>& body) {
  try {
    body();
    return "nothing was thrown";
  } catch (const InvalidUsage& error) {
    return "InvalidUsage: " + std::string(error.what());
  } catch (const Unsupported& error) {
    return "Unsupported: " + std::string(error.what());
  }
}

std::string refusal_of(const std::string& strategy) {
  return error_of([&] { parse_strategy(strategy, kRegistry); });
}

constexpr const char* kExports =
    "it provides strategy own, all_gather carrier, all_reduce carrier, all_gather throwing, all_gather nothing, "
    "all_gather priceless, model throwing, model nothing";

TEST(FsdpPlugins, StrategyUsesCollectivesOfItsFile) {
  const std::string name = file_of("good") + ":own";
  const Strategy strategy = parse_strategy(name, kRegistry);
  EXPECT_EQ(strategy.name, name);
  EXPECT_EQ(strategy.optimizer, Axes{kShardAxis});
  EXPECT_EQ(strategy.all_gather, file_of("good") + ":carrier");
  EXPECT_EQ(strategy.reduce_scatter, "bf16");  // built-in
  EXPECT_EQ(strategy.all_reduce, "plain");     // the file has an all_reduce, but the strategy doesn't name it
  EXPECT_EQ(parse_strategy(strategy.name, kRegistry).all_gather, strategy.all_gather);
}

TEST(FsdpPlugins, CollectiveIsUsedForAllExportedOperations) {
  const std::string collective = file_of("good") + ":carrier";
  const Strategy all = parse_strategy("hsdp+" + collective, kRegistry);
  EXPECT_EQ(all.name, "hsdp+" + collective);
  EXPECT_EQ(all.all_gather, collective);
  EXPECT_EQ(all.reduce_scatter, "plain");
  EXPECT_EQ(all.all_reduce, collective);
  const Strategy one = parse_strategy("fsdp+all_reduce=" + collective + "+reduce_scatter=int8", kRegistry);
  EXPECT_EQ(one.all_gather, "plain");
  EXPECT_EQ(one.reduce_scatter, "int8");
  EXPECT_EQ(one.all_reduce, collective);
  EXPECT_THAT(refusal_of("fsdp+reduce_scatter=" + collective),
              AllOf(HasSubstr("provides no reduce_scatter 'carrier'"), HasSubstr(kExports)));
}

TEST(FsdpPlugins, PathMayContainSeparators) {
  const nn::test::TemporaryDirectory directory;
  const fs::path odd = fs::path(directory.path()) / "c++=";
  fs::create_directory(odd);
  fs::copy_file(file_of("good"), odd / "a+b.so");
  const std::string name = (odd / "a+b.so").string() + ":";
  const Strategy strategy = parse_strategy(name + "own+" + name + "carrier+reduce_scatter=int8", kRegistry);
  EXPECT_EQ(strategy.name, name + "own+" + name + "carrier+reduce_scatter=int8");
  EXPECT_EQ(strategy.all_reduce, name + "carrier");
  EXPECT_EQ(strategy.reduce_scatter, "int8");
}

TEST(FsdpPlugins, FileWithoutDirectoryIsSearchedInPath) {
  const fs::path before = fs::current_path();
  ::unsetenv("TESSERA_PLUGIN_PATH");
  EXPECT_THAT(refusal_of("good.so:own"),
              HasSubstr("good.so: no such file in the current directory or in TESSERA_PLUGIN_PATH"));
  ::setenv("TESSERA_PLUGIN_PATH", kModules.c_str(), 1);
  EXPECT_EQ(parse_strategy("good.so:own", kRegistry).name, "good.so:own");
  ::unsetenv("TESSERA_PLUGIN_PATH");
  fs::current_path(kModules);
  EXPECT_EQ(parse_strategy("good.so:own", kRegistry).all_gather, "good.so:carrier");
  EXPECT_EQ(parse_strategy("./good.so:own", kRegistry).name, "./good.so:own");
  fs::current_path(before);
}

TEST(FsdpPlugins, ErrorListsExports) {
  const std::string file = file_of("good");
  EXPECT_EQ(refusal_of(file + ":carrier"), "InvalidUsage: " + file + " provides no strategy 'carrier'; " + kExports);
  EXPECT_EQ(refusal_of(file), "InvalidUsage: " + file + ": write " + file + ":NAME; " + kExports);
  EXPECT_EQ(refusal_of("fsdp+" + file + ":own"),
            "InvalidUsage: " + file + " provides no all_gather 'own'; " + kExports);
  EXPECT_THAT(refusal_of("mine"), HasSubstr("or FILE.so:NAME"));
}

TEST(FsdpPlugins, ErrorStatesReasonOfFailedLoad) {
  EXPECT_EQ(refusal_of("/nowhere/a.so:b"), "InvalidUsage: /nowhere/a.so: no such file");
  EXPECT_THAT(refusal_of(file_of("otherabi") + ":own"),
              AllOf(HasSubstr("'fsdp 0, quills'"), HasSubstr("'" TESSERA_FSDP_PLUGIN_ABI "'")));
  EXPECT_THAT(refusal_of(file_of("othersize") + ":own"),
              HasSubstr("tessera_fsdp_plugin has " + std::to_string(sizeof(tessera_fsdp_plugin) + 8) + " bytes"));
  EXPECT_THAT(refusal_of(file_of("noentry") + ":own"),
              HasSubstr("not a plug-in with strategies, collectives or models: it has no tessera_fsdp_plugin_entry()"));
  const nn::test::TemporaryDirectory directory;
  const std::string garbage = directory.path() + "/garbage.so";
  std::ofstream(garbage) << "no ELF file at all, but long enough to be looked at by whoever opens it\n";
  EXPECT_THAT(refusal_of(garbage + ":own"), AllOf(HasSubstr("InvalidUsage: "), HasSubstr("garbage.so: ")));
}

TEST(FsdpPlugins, RejectsInvalidExports) {
  const auto expect = [](const std::string& name, const std::string& reason) {
    EXPECT_EQ(refusal_of(file_of(name) + ":own"), "InvalidUsage: " + file_of(name) + ": " + reason);
  };
  expect("throws", "no ink");
  expect("twice", "it provides strategy own twice");
  expect("misnamed", "its all_gather is called 'a+b'; names consist of letters, digits, '_', '-' and '.'");
  expect("lost", "strategy own: its all_gather 'nowhere' is neither built in nor provided by the file itself");
  expect("makerless", "its all_gather carrier has no make function");
  expect("modeltwice", "it provides model throwing twice");
  expect("modelmakerless", "its model throwing has no make function");
  expect("sent", "its send carrier would never be called; an engine calls all_gather, reduce_scatter and all_reduce");
  expect("nonsense", "strategy own: where parameters are sharded, the optimizer must be too (axis shard)");
}

TEST(FsdpPlugins, TasksFailByName) {
  const std::string file = file_of("good");
  const auto made = [&](const std::string& name) {
    return error_of([&] {
      nn::Context context;
      const auto runtime = make_runtime(context);
      plugin_task(file + name).make({.runtime = *runtime});
    });
  };
  EXPECT_EQ(made(":throwing"), "InvalidUsage: " + file + ":throwing: no answer in no book");
  EXPECT_EQ(made(":throwing,book=a=b"), "InvalidUsage: " + file + ":throwing: no answer in a=b");
  EXPECT_EQ(made(":nothing"), "InvalidUsage: " + file + ":nothing: its make function returned null");
  EXPECT_EQ(made(":none"), "InvalidUsage: " + file + " provides no model 'none'; " + kExports);
  EXPECT_EQ(made(":throwing,=3"), "InvalidUsage: " + file + ":throwing: '=3' is no option; write KEY=VALUE");
}

TEST(TaskOptions, ValuesAreCheckedAndUnreadOnesAreRefused) {
  const TaskOptions options({{"width", "8"}, {"rate", "0.5"}, {"name", "x"}, {"rest", "1"}});
  EXPECT_EQ(options.integer("width", 4, 1, 8), 8);
  EXPECT_EQ(options.integer("depth", 4), 4);
  EXPECT_EQ(options.number("rate", 1), 0.5);
  EXPECT_EQ(options.text("name", "y"), "x");
  EXPECT_EQ(error_of([&] { options.refuse_unknown("mine"); }),
            "InvalidUsage: mine has no option 'rest'; it has depth, name, rate, width");
  EXPECT_THAT(error_of([&] { options.integer("width", 4, 1, 7); }), HasSubstr("option width"));
  EXPECT_THAT(error_of([&] { options.integer("name", 4); }), HasSubstr("option name"));
  for (const char* wrong : {"", "x", "1e", "0.5 ", "inf", "nan"}) {
    const TaskOptions one(std::map<std::string, std::string>{{"rate", wrong}});
    EXPECT_THAT(error_of([&] { one.number("rate", 1); }), HasSubstr("is not a finite number")) << wrong;
  }
  EXPECT_EQ(error_of([&] { options.text("rest"), options.refuse_unknown("mine"); }), "nothing was thrown");
}

/// A mesh may have additional axes, so the check needs the mesh.
TEST(FsdpPlugins, RejectsAxisThatMeshLacks) {
  const Strategy stranger = parse_strategy(file_of("stranger") + ":own", kRegistry);
  EXPECT_THAT(
      error_of([&] { validate(stranger, MeshShape::grid(2, 2)); }),
      HasSubstr("the optimizer is sharded over axis tensor, which the mesh does not have; it has replicate shard"));
  MeshShape with = MeshShape::grid(1, 2);
  with.axes.push_back({"tensor", 2});
  EXPECT_NO_THROW(validate(strategy_named("fsdp"), with));
}

TEST(FsdpPlugins, ErrorsOfFactoriesNamePlugin) {
  const std::string good = file_of("good") + ":";
  const auto make = [&](const std::string& name) {
    return error_of([&] { kRegistry.make(OpKind::all_gather, good + name); });
  };
  EXPECT_EQ(make("throwing"), "InvalidUsage: " + good + "throwing: the pen is dry");
  EXPECT_EQ(make("nothing"), "InvalidUsage: " + good + "nothing: its make function returned null");
  EXPECT_NE(kRegistry.make(OpKind::all_gather, good + "carrier"), nullptr);
  EXPECT_EQ(refusal_of("fsdp+" + good + "priceless"), "InvalidUsage: " + good + "priceless: beyond price");
  const CollectiveSize size{1024, DType::f32, 4};
  EXPECT_EQ(kRegistry.cost(OpKind::all_gather, good + "carrier", size).bytes,
            kRegistry.cost(OpKind::all_gather, "plain", size).bytes)
      << "without a cost of its own it costs what plain does";
}

}  // namespace
}  // namespace tessera::fsdp
