#include "tessera/nn/init.h"

#include <algorithm>

#include "tessera/nn/random.h"

namespace tessera::nn {

void fill_initial(const Init& init, std::string_view name, std::uint64_t seed, ElementRange range, float* out) {
  switch (init.kind) {
    case Init::Kind::zeros:
      std::fill_n(out, range.count(), 0.0F);
      return;
    case Init::Kind::ones:
      std::fill_n(out, range.count(), 1.0F);
      return;
    case Init::Kind::normal:
      fill_normal({name, seed, static_cast<std::uint64_t>(range.begin), static_cast<std::uint64_t>(range.end)}, 0.0F,
                  static_cast<float>(init.deviation), out);
      return;
  }
}

}  // namespace tessera::nn
