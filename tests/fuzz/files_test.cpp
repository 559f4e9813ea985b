// A bounded, repeatable run over all subjects: whole files, and many changes of them.
//
// test_fuzz_files --changes N makes N changes of each subject.
#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/fuzz/file_subjects.h"

namespace tessera::fuzz {
namespace {

int changes = 150;  // NOLINT: of the command line

/// "" or the property that the first failing change violates, and its number.
std::string run(const Subject& subject, int count) {
  for (int number = 0; number < count; ++number) {
    std::mt19937_64 random(static_cast<std::uint64_t>(number));
    const Draw draw = [&](std::size_t below) {
      return std::uniform_int_distribution<std::size_t>(0, below - 1)(random);
    };
    if (const std::string broken = broken_property(subject, changed(subject, draw)); !broken.empty())
      return broken + " (change " + std::to_string(number) + ")";
  }
  return "";
}

TEST(Files, WholeOnesAreRead) {
  for (const Subject& subject : subjects()) {
    if (subject.name == "a checkpoint") continue;  // which has a buffer that no model has: the last check refuses it
    const std::string broken = broken_property(subject, subject.files);
    EXPECT_EQ(broken, "") << subject.name;
  }
}

TEST(Files, ChangedOnesAreReadOrRefused) {
  for (const Subject& subject : subjects()) EXPECT_EQ(run(subject, changes), "") << subject.name;
}

/// The control: the same run detects readers with typical mistakes.
TEST(Files, DetectsPlantedMistakes) {
  std::vector<Subject> all = subjects();
  Subject& rows = all.back();
  rows.read = [](const std::string& folder) {  // trusts types and ids
    std::ifstream file(folder + "/r.json");
    const auto json = nlohmann::json::parse(file, nullptr, false);
    for (const auto& row : json) static_cast<void>(row.at("id").get<std::string>());
  };
  EXPECT_NE(run(rows, 100), "");
  Subject& model = all.front();
  model.read = [](const std::string& folder) {  // takes the memory that a number says
    std::ifstream file(folder + "/config.json");
    const auto json = nlohmann::json::parse(file, nullptr, false);
    if (json.is_object() && json.contains("vocab_size") && json["vocab_size"].is_number())
      const std::vector<double> values(json["vocab_size"].get<std::size_t>());
  };
  EXPECT_NE(run(model, 1000), "");
}

}  // namespace
}  // namespace tessera::fuzz

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  if (count == 3 && std::string_view(arguments[1]) == "--changes") tessera::fuzz::changes = std::atoi(arguments[2]);
  return RUN_ALL_TESTS();
}
