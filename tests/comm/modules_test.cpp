// Loadable modules: good ones are found and used, bad ones are listed with the reason, and never crash this process.
#include <gmock/gmock.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tessera/comm/plugin.h"
#include "tessera/comm/registry.h"
#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

const fs::path kModules = TESSERA_TEST_MODULES;

std::string file_of(const std::string& name) { return kModules / (name + ".so"); }

void search_in(const std::string& path) { ::setenv("TESSERA_PLUGIN_PATH", path.c_str(), 1); }

BackendState state_of(const std::string& name) {
  for (const BackendState& state : list_backends())
    if (state.name == name) return state;
  ADD_FAILURE() << name << " is not listed";
  return {};
}

TEST(Modules, ListsValidModuleWithCapabilities) {
  search_in(file_of("paper"));
  const BackendState state = state_of("paper");
  EXPECT_TRUE(state.available);
  EXPECT_EQ(state.reason, "");
  EXPECT_EQ(state.devices, "cpu");
  EXPECT_EQ(state.launch_prefix, (std::vector<std::string>{"paperrun", "-n", "{ranks}"}));
  ASSERT_EQ(state.variables.size(), 1u);
  EXPECT_EQ(state.variables[0].name, "TESSERA_PAPER");
  EXPECT_EQ(state.variables[0].default_value, "a4");
  EXPECT_EQ(state.variables[0].help, "the size of the sheets");
  EXPECT_TRUE(state_of("shm").available);  // built-in backends remain
}

TEST(Modules, ErrorsKeepTheirTypeAcrossModules) {
  search_in(file_of("paper"));
  const Backend& paper = find_backend("paper");
  EXPECT_EQ(&paper, &find_backend("paper"));  // loaded once
  EXPECT_EQ(error_of([&] { paper.create(nullptr, {}); }), "Unsupported: paper carries nothing");
  try {
    paper.create(nullptr, {.algorithms = "own"});
    ADD_FAILURE();
  } catch (const std::runtime_error& error) {  // a type unknown to this program, caught by its base class
    EXPECT_STREQ(error.what(), "an error of the module's own type");
  }
}

/// The list and the error of find_backend() name the defect of a module; this process survives.
void expect_refused(const std::string& name, const testing::Matcher<std::string>& reason) {
  const BackendState state = state_of(name);
  EXPECT_FALSE(state.available);
  EXPECT_THAT(state.reason, reason);
  EXPECT_THAT(error_of([&] { find_backend(name); }),
              AllOf(HasSubstr("InvalidUsage: backend '" + name + "' is not available"), HasSubstr("shm (available)"),
                    HasSubstr(state.reason)));
}

TEST(Modules, RejectsOtherAbiAndShowsBoth) {
  search_in(file_of("otherabi"));
  expect_refused("otherabi", AllOf(HasSubstr("'tessera 0, punched cards'"), HasSubstr("'" TESSERA_PLUGIN_ABI "'")));
}

TEST(Modules, RejectsOtherStruct) {
  search_in(file_of("othersize"));
  expect_refused("othersize", HasSubstr(std::to_string(sizeof(tessera_plugin) + 8) + " bytes"));
}

TEST(Modules, NamesMissingEntryPoint) {
  search_in(file_of("noentry"));
  expect_refused("noentry", HasSubstr("has no tessera_plugin_entry()"));
}

TEST(Modules, NamesMissingLibrary) {
  search_in(file_of("needsgone"));
  expect_refused("needsgone", HasSubstr("libtessera_test_gone.so: cannot open shared object file"));
}

TEST(Modules, RejectsNameThatDiffersFromFile) {
  search_in(file_of("misnamed"));
  expect_refused("misnamed", HasSubstr("its backend is called 'paper'; rename the file to paper.so"));
}

TEST(Modules, ReportsReasonOfProbe) {
  search_in(file_of("wet"));
  expect_refused("wet", testing::Eq("the paper is wet"));
}

TEST(Modules, RejectsGarbage) {
  const fs::path directory = fs::path(testing::TempDir()) / ("modules-" + std::to_string(::getpid()));
  fs::create_directories(directory);
  std::ofstream(directory / "garbage.so")
      << "no ELF file at all, but long enough to be looked at by whoever opens it\n";
  search_in(directory);
  expect_refused("garbage", HasSubstr("garbage.so: "));
  fs::remove_all(directory);
}

TEST(Modules, ProbeSurvivesCrash) {
  search_in(file_of("crashes"));
  const BackendState state = state_of("crashes");
  EXPECT_FALSE(state.available);
  EXPECT_THAT(state.reason, HasSubstr("the process that loaded it"));
}

TEST(Modules, SelectsUsableModuleOfSeveral) {
  search_in(file_of("pair-first") + ":" + file_of("pair-second"));
  EXPECT_TRUE(state_of("pair").available);
  EXPECT_EQ(error_of([] { find_backend("pair").create(nullptr, {}); }), "Unsupported: paper carries nothing");
  search_in(file_of("pair-first"));  // control: alone, the unusable module is refused
  expect_refused("pair", testing::Eq("the first has no ink"));
}

TEST(Modules, NamesMissingFile) {
  search_in("/nowhere/at/all");
  expect_refused("/nowhere/at/all", HasSubstr("no such file or directory (TESSERA_PLUGIN_PATH)"));
}

TEST(Modules, RejectsBuiltInName) {
  search_in(file_of("shm"));
  EXPECT_THAT(state_of(file_of("shm")).reason, HasSubstr("the library has a built-in backend 'shm'"));
  EXPECT_TRUE(state_of("shm").available);
}

TEST(Modules, SearchesFolder) {
  search_in(":" + kModules.string() + "::");
  const auto all = list_backends();
  EXPECT_GT(std::count_if(all.begin(), all.end(), [](const BackendState& state) { return !state.available; }), 5);
  EXPECT_TRUE(state_of("paper").available);
}

}  // namespace
}  // namespace tessera::comm_test
