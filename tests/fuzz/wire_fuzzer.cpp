// The properties of wire_properties.h under libFuzzer (option TESSERA_FUZZ).
#include <cstdlib>
#include <iostream>

#include "tests/fuzz/wire_properties.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto kMessages = tessera::fuzz::messages();
  const std::string broken = tessera::fuzz::broken_property({reinterpret_cast<const char*>(data), size}, kMessages);
  if (!broken.empty()) {
    std::cerr << broken << '\n';
    std::abort();
  }
  return 0;
}
