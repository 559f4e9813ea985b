#include "tools/catalog.h"

#include <algorithm>

#include "tools/world.h"

namespace tessera::tools {
namespace {

template <class T, class Range>
void append(std::vector<T>& to, const Range& from) {
  to.insert(to.end(), std::begin(from), std::end(from));
}

}  // namespace

Catalog catalog() {
  Catalog all;
  append(all.variables, world_variables());  // a further owner of variables is a further line
  std::sort(all.variables.begin(), all.variables.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return all;
}

}  // namespace tessera::tools
