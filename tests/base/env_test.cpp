#include "tessera/base/env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>

namespace tessera::base {
namespace {

constexpr EnvVariable kSample{"TESSERA_TEST_SAMPLE", "5m", "a variable of this test"};

/// Sets a variable for one test.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Setting() { ::unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
};

TEST(Env, UnsetAndEmptyMeanDefault) {
  EXPECT_EQ(read_env(kSample), std::nullopt);
  EXPECT_EQ(env_or_default(kSample), "5m");
  const Setting empty("TESSERA_TEST_SAMPLE", "");
  EXPECT_EQ(read_env(kSample), std::nullopt);
  EXPECT_EQ(env_or_default(kSample), "5m");
}

TEST(Env, SetValueOverridesDefault) {
  const Setting set("TESSERA_TEST_SAMPLE", "6s");
  EXPECT_EQ(read_env(kSample), "6s");
  EXPECT_EQ(env_or_default(kSample), "6s");
  EXPECT_EQ(read_foreign_env("TESSERA_TEST_SAMPLE"), "6s");
}

TEST(Env, ReportsMisspelledVariables) {
  const std::array known = {kSample};
  const auto before = unknown_variables(known);
  EXPECT_THAT(before, testing::Not(testing::Contains("TESSERA_TEST_SAMPEL")));
  const Setting right("TESSERA_TEST_SAMPLE", "1");
  const Setting wrong("TESSERA_TEST_SAMPEL", "1");
  const Setting longer("TESSERA_TEST_SAMPLE_", "1");
  const Setting foreign("NOT_TESSERA_TEST", "1");
  const auto unknown = unknown_variables(known);
  EXPECT_THAT(unknown, testing::Contains("TESSERA_TEST_SAMPEL"));
  EXPECT_THAT(unknown, testing::Contains("TESSERA_TEST_SAMPLE_"));
  EXPECT_THAT(unknown, testing::Not(testing::Contains("TESSERA_TEST_SAMPLE")));
  EXPECT_THAT(unknown, testing::Not(testing::Contains("NOT_TESSERA_TEST")));
}

TEST(Env, ChildEnvironmentHasEachNameOnce) {
  const Setting old("TESSERA_TEST_SAMPLE", "old");
  const Setting kept("TESSERA_TEST_SAMPLE_2", "kept");
  const std::vector<std::pair<std::string, std::string>> changes = {{"TESSERA_TEST_SAMPLE", "new"},
                                                                    {"TESSERA_TEST_OTHER", ""}};
  const auto lines = environment_with(changes);
  EXPECT_THAT(lines,
              testing::IsSupersetOf({"TESSERA_TEST_SAMPLE=new", "TESSERA_TEST_OTHER=", "TESSERA_TEST_SAMPLE_2=kept"}));
  EXPECT_THAT(lines, testing::Not(testing::Contains("TESSERA_TEST_SAMPLE=old")));
  // A rank that starts ranks: the children get their own rank numbers.
  const Setting place("TESSERA_RANK", "3");
  const std::vector<std::pair<std::string, std::string>> child = {{"TESSERA_RANK", "0"}};
  const std::vector<std::string> ranks = environment_with(child);
  EXPECT_THAT(ranks, testing::Contains("TESSERA_RANK=0"));
  EXPECT_THAT(ranks, testing::Not(testing::Contains("TESSERA_RANK=3")));
  EXPECT_EQ(read_env(kSample), "old") << "this process's own is untouched";
}

}  // namespace
}  // namespace tessera::base
