// The choice of an address, with simulated interfaces.
#include "backends/tcp/mesh_connector.h"

#include "tests/backends/tcp/support.h"

namespace tessera::tcp_test {
namespace {

using boost::asio::ip::make_address;
using comm::tcp::choose_address;
using comm::tcp::Interface;
using testing::Test;

const std::vector<Interface>& host() {
  static const std::vector<Interface> kHost = {
      {"lo", make_address("127.0.0.1")},      {"lo", make_address("::1")},
      {"eth0", make_address("fe80::5")},      {"eth0", make_address("192.168.7.5")},
      {"eth0", make_address("fd00:7::5")},    {"ib0", make_address("10.1.2.3")},
      {"ib1", make_address("10.1.9.3")},      {"eth1", make_address("172.16.0.9"), false},
      {"docker0", make_address("172.17.0.1")}};
  return kHost;
}

std::string chosen(std::string_view wanted, const char* usual = "192.168.7.5") {
  return choose_address(wanted, host(), make_address(usual)).to_string();
}

TEST(Interfaces, DefaultIsUsualAddress) {
  EXPECT_EQ(chosen(""), "192.168.7.5");
  EXPECT_EQ(chosen("", "127.0.0.1"), "127.0.0.1");
}

TEST(Interfaces, AreSelectedByNameInOrder) {
  EXPECT_EQ(chosen("ib0"), "10.1.2.3");
  EXPECT_EQ(chosen("ib1,ib0"), "10.1.9.3");
  EXPECT_EQ(chosen("mlx0,ib1"), "10.1.9.3");
  EXPECT_EQ(chosen("lo"), "127.0.0.1");
}

TEST(Interfaces, PreferFamilyOfUsualAddress) {
  EXPECT_EQ(chosen("eth0"), "192.168.7.5");
  EXPECT_EQ(chosen("eth0", "fd00:9::1"), "fd00:7::5") << "never the link-local one";
  EXPECT_EQ(chosen("ib0", "fd00:9::1"), "10.1.2.3") << "it has no other";
}

TEST(Interfaces, AreSelectedByNetwork) {
  EXPECT_EQ(chosen("10.0.0.0/8"), "10.1.2.3");
  EXPECT_EQ(chosen("10.1.8.0/21"), "10.1.9.3");
  EXPECT_EQ(chosen("10.1.9.77/24"), "10.1.9.3");
  EXPECT_EQ(chosen("fd00:7::/64"), "fd00:7::5");
  EXPECT_EQ(chosen("11.0.0.0/8,ib1"), "10.1.9.3");
}

TEST(Interfaces, MayBeExcluded) {
  EXPECT_EQ(chosen("^docker0"), "192.168.7.5") << "the usual one is not excluded";
  EXPECT_EQ(chosen("^eth0,docker0"), "10.1.2.3");
  EXPECT_EQ(chosen("^192.168.0.0/16,ib0"), "10.1.9.3");
  EXPECT_EQ(chosen("^mlx0"), "192.168.7.5");
  EXPECT_EQ(chosen("^eth0", "127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(chosen("^lo", "127.0.0.1"), "192.168.7.5");
}

TEST(Interfaces, ErrorListsAvailableInterfaces) {
  for (const char* wanted : {"eth7", "eth1", "11.0.0.0/8", "^lo,eth0,ib0,ib1,docker0", "ib0,", "10.0.0.0/99", "x/y"}) {
    const std::string error = error_of([&] { chosen(wanted); });
    EXPECT_EQ(error.find("InvalidUsage: tcp: TESSERA_IFNAME=" + std::string(wanted) + ": "), 0U) << error;
    EXPECT_NE(error.find("ib1 (10.1.9.3)"), std::string::npos) << error;
    EXPECT_NE(error.find("eth1 (172.16.0.9, down)"), std::string::npos) << error;
  }
}

TEST(Interfaces, ListThoseOfHost) {
  bool loopback = false;
  for (const Interface& one : comm::tcp::list_interfaces()) loopback |= one.address.is_loopback() && one.up;
  EXPECT_TRUE(loopback);
}

}  // namespace
}  // namespace tessera::tcp_test
