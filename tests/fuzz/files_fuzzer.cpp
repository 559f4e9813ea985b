// The property of file_subjects.h under libFuzzer (option TESSERA_FUZZ), whose bytes are the decisions.
#include <cstdlib>
#include <iostream>

#include "tests/fuzz/file_subjects.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto kSubjects = tessera::fuzz::subjects();
  std::size_t at = 0;
  const tessera::fuzz::Draw draw = [&](std::size_t choices) {
    std::size_t value = 0;
    for (std::size_t range = 1; range < choices; range <<= 8U) value = value << 8U | (at < size ? data[at++] : 0U);
    return value % choices;
  };
  const auto& subject = kSubjects[draw(kSubjects.size())];
  const std::string broken = tessera::fuzz::broken_property(subject, changed(subject, draw));
  if (!broken.empty()) {
    std::cerr << broken << '\n';
    std::abort();
  }
  return 0;
}
