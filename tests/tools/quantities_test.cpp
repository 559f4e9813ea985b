// Numbers with units, and what is not one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tessera/base/error.h"
#include "tools/cli/quantities.h"

namespace tessera::tools {
namespace {

using testing::HasSubstr;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const base::InvalidUsage& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "";
}

TEST(Quantities, ReadNumbersWithUnits) {
  for (const char* text : {"7500000000", "7.5e9", "7.5B", "7500M", "0.0075T"})
    EXPECT_EQ(parse_count(text, "x"), 7'500'000'000) << text;
  EXPECT_EQ(parse_count("120.576K", "x"), 120'576);
  EXPECT_EQ(parse_link("20us,20MB/s", "x"), (LinkSpec{20, 20e6}));
  EXPECT_EQ(parse_link("1.5ms,1.25GB/s", "x"), (LinkSpec{1500, 1.25e9}));
  EXPECT_EQ(parse_link("500ns,800kB/s", "x"), (LinkSpec{0.5, 8e5}));
  EXPECT_EQ(parse_link("1Gbit/s", "x"), (LinkSpec{0, 125e6}));
  EXPECT_EQ(parse_link("0s,100Mbit/s", "x"), (LinkSpec{0, 12.5e6}));
  EXPECT_EQ(parse_machine("50GFLOP/s,10GB/s", "x"), (MachineSpec{50e9, 10e9}));
  EXPECT_EQ(parse_machine("312TFLOP/s,2TB/s", "x"), (MachineSpec{312e12, 2e12}));
}

TEST(Quantities, RefuseOthersInOneLine) {
  for (const char* text :
       {"", "0", "-1", "-7B", "1.5", "7.5X", "7 B", "B", "nan", "inf", "1e16", "2000T", "1e999", "0x10"})
    EXPECT_THAT(error_of([&] { parse_count(text, "--parameters"); }),
                HasSubstr("--parameters: '" + std::string(text) + "'"));
  for (const char* text :
       {"", "20us", "20us,", ",1GB/s", "20,1GB/s", "20us,1GB", "20us,0MB/s", "20us,-1MB/s", "-1us,1MB/s",
        "20us,1e-6B/s", "1e12s,1GB/s", "20us,1Gb/s", "20us,1MB/s,2", "nans,1GB/s", "1GiB/s"})
    EXPECT_THAT(error_of([&] { parse_link(text, "--link"); }), HasSubstr("--link: '")) << text;
  for (const char* text :
       {"", "50GFLOP/s", "50GFLOP,10GB/s", "0GFLOP/s,1GB/s", "1e-6FLOP/s,1GB/s", "50GFLOP/s,0B/s", "1GB/s,50GFLOP/s"})
    EXPECT_THAT(error_of([&] { parse_machine(text, "--machine"); }), HasSubstr("--machine: '")) << text;
}

}  // namespace
}  // namespace tessera::tools
