#include "tools/cli/words.h"

#include <algorithm>
#include <string>

#include "tessera/base/error.h"

namespace tessera::tools {

std::string_view meaning_of(std::string_view word) {
  const auto found = std::ranges::find(words(), word, &Word::name);
  if (found == words().end()) throw base::InvalidUsage("the glossary has no '" + std::string(word) + "'");
  return found->meaning;
}

}  // namespace tessera::tools
