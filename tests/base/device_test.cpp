#include "tessera/base/device.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera::base {
namespace {

TEST(Device, NamesRoundTrip) {
  for (const char* name : {"cpu", "meta", "cuda:0", "cuda:7", "cuda:15"}) EXPECT_EQ(name_of(parse_device(name)), name);
  EXPECT_EQ(parse_device("cuda"), (Device{DeviceType::cuda, 0}));
  EXPECT_NE(parse_device("cuda:1"), parse_device("cuda:2"));
  EXPECT_EQ(Device{}, parse_device("cpu"));
}

TEST(Device, RejectsUnknownNames) {
  for (const char* name : {"", "CPU", "gpu", "cuda:", "cuda:-1", "cuda:1x", "cuda:99999999999", "cpu:0"})
    EXPECT_THROW(parse_device(name), InvalidUsage) << name;
}

}  // namespace
}  // namespace tessera::base
