#include "tessera/base/json/json_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tessera/base/error.h"

namespace tessera::base {
namespace {

using nlohmann::json;
using testing::HasSubstr;

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const InvalidUsage& error) {
    return error.what();
  }
  return "";
}

template <class Json>
std::string refused(std::string_view text) {
  return error_of([&] { parse_json<Json>(text, "'f'"); });
}

std::string nested(std::size_t depth, const std::string& open, const std::string& close) {
  std::string text;
  for (std::size_t i = 0; i < depth; ++i) text += open;
  text += "0";
  for (std::size_t i = 0; i < depth; ++i) text += close;
  return text;
}

TEST(JsonReader, ParsingHasLimits) {
  for (const auto& [open, close] : {std::pair("[", "]"), {R"({"a":)", "}"}}) {
    EXPECT_EQ(refused<json>(nested(kMaxJsonDepth, open, close)), "");  // the control
    EXPECT_EQ(refused<json>(nested(kMaxJsonDepth + 1, open, close)),
              "'f' is nested more than 64 deep; no such file is");
    EXPECT_THAT(refused<nlohmann::ordered_json>(nested(1'000'000, open, close)), HasSubstr("is nested"));
  }
  EXPECT_THAT(refused<json>(nested(1'000'000, "[", "")), HasSubstr("is nested"));
  std::string many = "[0", keys = R"({"a":0)";
  for (std::size_t i = 0; i < kMaxJsonValues; ++i) many += ",0";
  for (std::size_t i = 0; i < kMaxOrderedKeys; ++i) keys += ",\"" + std::to_string(i) + "\":0";
  EXPECT_THAT(refused<json>(many + "]"), HasSubstr("'f' has more than 8388608 values"));
  EXPECT_THAT(refused<nlohmann::ordered_json>(keys + "}"), HasSubstr("an object of more than 4096 keys"));
  EXPECT_EQ(refused<json>(keys + "}"), "");  // the control: those are found in a tree
}

TEST(JsonReader, ParsingNamesThePlace) {
  EXPECT_EQ(refused<json>("{\n \"a\": ,"), "'f' is not JSON: line 2, column 7");
  EXPECT_THAT(refused<json>(""), HasSubstr("'f' is not JSON: line 1, column 1"));
  EXPECT_THAT(refused<json>("\"\xff\""), HasSubstr("is not JSON"));
  EXPECT_EQ(refused<json>(R"({"a":1,"b":{"a":1},"a":2})"), "'f' has the key \"a\" twice in an object");
  EXPECT_EQ(refused<json>(R"({"a":1,"b":{"a":1},"c":[{"a":2},{"a":2}]})"), "");  // the control
  EXPECT_EQ(refused<json>("1e999"), "'f' has a number that is too large");
}

TEST(JsonReader, ConversionsAreExact) {
  const json document = json::parse(R"({"list":[{"n":-1,"u":18446744073709551615,"d":1.0,"big":1099511627776,
      "text":"t","null":null,"flag":true,"three":[1,2,3],"map":{"a":"b"},"e":1e300}]})");
  const JsonReader in = JsonReader(document, "f").at("list").at(0);
  const auto error = [&](auto type, const char* key) {
    return error_of([&] { static_cast<void>(in.at(key).get<decltype(type)>()); });
  };
  EXPECT_EQ(in.at("n").get<int>(), -1);  // the controls
  EXPECT_EQ(in.at("d").get<double>(), 1);
  EXPECT_EQ(in.at("n").get<double>(), -1);
  EXPECT_EQ(in.at("big").get<std::int64_t>(), std::int64_t{1} << 40);
  EXPECT_EQ(in.at("text").get<std::string>(), "t");
  EXPECT_TRUE(in.at("flag").get<bool>());
  EXPECT_EQ((in.at("three").get<std::array<int, 3>>()), (std::array{1, 2, 3}));
  EXPECT_EQ(in.at("three").get<std::vector<int>>().size(), 3U);
  EXPECT_EQ((in.at("map").get<std::map<std::string, std::string>>().at("a")), "b");
  EXPECT_TRUE(std::isnan(in.at("null").number_or_nan()));
  EXPECT_EQ(in.value("absent", 7), 7);

  EXPECT_EQ(error(0U, "n"), "f: list[0].n is -1; needs a whole number from 0 to 4294967295");
  EXPECT_EQ(error(std::uint64_t{}, "n"), "f: list[0].n is -1; needs a whole number from 0 to 9007199254740992");
  EXPECT_THAT(error(0, "big"), HasSubstr("list[0].big is 1099511627776; needs a whole number from -2147483648"));
  EXPECT_THAT(error(std::int64_t{}, "u"), HasSubstr("list[0].u is 18446744073709551615; needs"));
  EXPECT_THAT(error(std::uint64_t{}, "u"), HasSubstr("needs a whole number"));
  EXPECT_THAT(error(0, "d"), HasSubstr("list[0].d is 1.0; needs a whole number"));
  EXPECT_THAT(error(0, "flag"), HasSubstr("needs a whole number"));
  EXPECT_THAT(error(0.0, "null"), HasSubstr("list[0].null is null; needs a number"));
  EXPECT_THAT(error(0.0F, "e"), HasSubstr("needs a number"));
  EXPECT_THAT(error(false, "n"), HasSubstr("needs true or false"));
  EXPECT_THAT(error(std::string(), "n"), HasSubstr("needs a text"));
  EXPECT_EQ(error(std::array<int, 2>(), "three"), "f: list[0].three is an array; needs an array of 2");
  EXPECT_EQ(error(std::vector<int>(), "map"), "f: list[0].map is an object; needs an array");
  EXPECT_EQ(error(0, "absent"), "f: list[0] has no 'absent'");
  EXPECT_EQ(error_of([&] { in.at("three").at(3); }), "f: list[0].three has 3 elements; needs 4");
  EXPECT_THAT(error_of([&] { in.at("n").at("x"); }), HasSubstr("list[0].n is -1; needs an object"));
  EXPECT_THAT(error_of([&] { static_cast<void>(in.at("n").integer(0, 5)); }), HasSubstr("from 0 to 5"));
}

}  // namespace
}  // namespace tessera::base
