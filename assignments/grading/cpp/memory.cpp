#include "grading/cpp/memory.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace grading {
namespace {

thread_local bool counts = false;
thread_local std::int64_t live = 0;
thread_local std::int64_t most = 0;

}  // namespace

CountMemory::CountMemory() {
  live = most = 0;
  counts = true;
}
CountMemory::~CountMemory() { counts = false; }
std::int64_t CountMemory::now() { return live; }
std::int64_t CountMemory::peak() { return most; }

namespace {

void* counted(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  if (counts) {
    live += static_cast<std::int64_t>(malloc_usable_size(memory));
    most = std::max(most, live);
  }
  return memory;
}

void freed(void* memory) noexcept {
  if (counts && memory != nullptr) live -= static_cast<std::int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace
}  // namespace grading

void* operator new(std::size_t bytes) { return grading::counted(std::malloc(bytes)); }
void* operator new[](std::size_t bytes) { return grading::counted(std::malloc(bytes)); }
void operator delete(void* memory) noexcept { grading::freed(memory); }
void operator delete[](void* memory) noexcept { grading::freed(memory); }
void operator delete(void* memory, std::size_t /*bytes*/) noexcept { grading::freed(memory); }
void operator delete[](void* memory, std::size_t /*bytes*/) noexcept { grading::freed(memory); }
