#include "tools/cli/machine.h"

#include <gtest/gtest.h>

#include <sstream>

namespace tessera::tools {
namespace {

std::string processor(const std::string& text) {
  std::istringstream cpuinfo(text);
  return processor_in(cpuinfo);
}

TEST(Machine, NamesProcessorsOfX86AndArm) {
  EXPECT_EQ(processor("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) 8488C\n"),
            "Intel(R) Xeon(R) 8488C");
  EXPECT_EQ(
      processor(
          "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\n"
          "CPU part\t: 0xd40\n"),
      "Arm Neoverse V1");
  EXPECT_EQ(processor("CPU implementer\t: 0x48\nCPU part\t: 0xd01\n"), "arm64 processor 0x48/0xd01");
  EXPECT_EQ(processor("processor\t: 0\n"), "unknown processor");
  EXPECT_EQ(processor(""), "unknown processor");
}

}  // namespace
}  // namespace tessera::tools
