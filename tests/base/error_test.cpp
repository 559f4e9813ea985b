#include "tessera/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

namespace tessera::base {
namespace {

template <class E>
void expect_kind(std::string_view kind) {
  try {
    throw E("text");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    EXPECT_STREQ(error.what(), "text");
  }
}

TEST(Error, KindsHaveNames) {
  expect_kind<InvalidUsage>("InvalidUsage");
  expect_kind<Unsupported>("Unsupported");
  expect_kind<Mismatch>("Mismatch");
  expect_kind<Timeout>("Timeout");
  expect_kind<PeerLost>("PeerLost");
  expect_kind<Aborted>("Aborted");
  expect_kind<BackendError>("BackendError");
  expect_kind<SystemError>("SystemError");
}

TEST(Error, SystemErrorsNameCallAndCause) {
  EXPECT_THAT(system_error("open '/x'", ENOENT).what(), testing::StartsWith("open '/x': No such file"));
  errno = EACCES;
  EXPECT_THAT(system_error("open").what(), testing::HasSubstr("Permission denied"));
}

}  // namespace
}  // namespace tessera::base
