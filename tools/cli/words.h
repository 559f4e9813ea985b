// The words of the tables and pictures, with their meaning.
#pragma once

#include <span>
#include <string_view>

namespace tessera::tools {

struct Word {
  std::string_view name;
  std::string_view meaning;
};

/// Those of docs/glossary.md, from which the build makes this function; in alphabetical order.
std::span<const Word> words();

}  // namespace tessera::tools
