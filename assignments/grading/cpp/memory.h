// Counts the memory that operator new gives to the calling thread while a count runs.
#pragma once

#include <cstdint>

namespace grading {

/// Live bytes of this thread since construction: what it allocated and did not free. One at a time.
class CountMemory {
 public:
  CountMemory();
  ~CountMemory();
  CountMemory(const CountMemory&) = delete;
  CountMemory& operator=(const CountMemory&) = delete;
  static std::int64_t now();   ///< live bytes
  static std::int64_t peak();  ///< the most so far
};

}  // namespace grading
