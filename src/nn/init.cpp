#include "tessera/nn/init.h"

#include <algorithm>
#include <string>

#include "tessera/base/error.h"
#include "tessera/nn/context.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/random.h"

namespace tessera::nn {
namespace {

void check(std::string_view name, const ElementRange& range) {
  if (range.begin < 0 || range.end < range.begin)
    throw base::InvalidUsage("fill_initial: elements " + std::to_string(range.begin) + " to " +
                             std::to_string(range.end) + " of " + std::string(name) + " are no range");
}

}  // namespace

void fill_initial(const Init& init, std::string_view name, std::uint64_t seed, ElementRange range, float* out) {
  check(name, range);
  const RandomRange drawn{name, seed, static_cast<std::uint64_t>(range.begin), static_cast<std::uint64_t>(range.end)};
  const auto deviation = static_cast<float>(init.deviation);
  switch (init.kind) {
    case Init::Kind::zeros:
      std::fill_n(out, range.count(), 0.0F);
      return;
    case Init::Kind::ones:
      std::fill_n(out, range.count(), 1.0F);
      return;
    case Init::Kind::normal:
      return fill_normal(drawn, 0.0F, deviation, out);
    case Init::Kind::uniform:
      return fill_uniform(drawn, -deviation, deviation, out);
  }
}

namespace {

template <class T>
void draw(Context& context, const InitialValues& values, T* out) {
  const ElementRange& range = values.range;
  KernelTable<T>& device = context.kernels<T>("init");
  const auto number = [](float value) { return static_cast<T>(value); };
  const auto deviation = static_cast<kernels::OpMath<T>>(values.init.deviation);
  const StreamRange drawn{tensor_stream(values.seed, values.name), static_cast<std::uint64_t>(range.begin),
                          static_cast<std::uint64_t>(range.end)};
  switch (values.init.kind) {
    case Init::Kind::zeros:
    case Init::Kind::ones:
      device.fill(context.stream(), number(values.init.kind == Init::Kind::ones ? 1.0F : 0.0F), out,
                  static_cast<std::size_t>(range.count()));
      return;
    case Init::Kind::normal:
      return device.fill_normal(context.stream(), {.range = drawn, .deviation = deviation, .out = out});
    case Init::Kind::uniform:
      return device.fill_uniform(context.stream(), {drawn, -deviation, deviation, out});
  }
}

}  // namespace

void fill_initial(Context& context, const InitialValues& values, float* out) {
  check(values.name, values.range);
  draw(context, values, out);
}

void fill_initial(Context& context, const InitialValues& values, DType dtype, void* out) {
  check(values.name, values.range);
  if (!is_floating(dtype))  // an encoding, which is written later, or a buffer's integer counts
    return context.runtime().fill(context.stream(), out, 0,
                                  static_cast<std::size_t>(values.range.count()) * size_of(dtype));
  ops::for_floating("init", dtype, [&](auto zero) { draw(context, values, static_cast<decltype(zero)*>(out)); });
}

}  // namespace tessera::nn
