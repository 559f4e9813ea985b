#include "tessera/fsdp/flat_layout.h"

#include <algorithm>
#include <string>

#include "tessera/base/error.h"
#include "tessera/fsdp/precision.h"

namespace tessera::fsdp {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

std::vector<ElementRange> FlatLayout::gaps() const {
  std::vector<ElementRange> out;
  std::int64_t position = 0;
  for (const FlatEntry& entry : entries) {
    if (entry.offset > position) out.push_back({position, entry.offset});
    position = entry.end();
  }
  if (padded > position) out.push_back({position, padded});
  return out;
}

std::vector<FlatLayout> make_layouts(std::span<const std::shared_ptr<Parameter>> parameters, int world) {
  std::vector<FlatLayout> layouts;
  for (const auto& parameter : parameters) {
    const bool trainable = parameter->requires_grad();
    auto found = std::find_if(layouts.begin(), layouts.end(), [&](const FlatLayout& layout) {
      return layout.dtype == parameter->dtype() && layout.trainable == trainable;
    });
    if (found == layouts.end()) {
      layouts.push_back({.dtype = parameter->dtype(), .trainable = trainable});
      found = std::prev(layouts.end());
    }
    const std::int64_t offset = found->entries.empty() ? 0 : round_up(found->entries.back().end(), kFlatAlignment);
    found->entries.push_back({parameter, offset});
    found->elements += parameter->count();
  }
  for (FlatLayout& layout : layouts) layout.padded = round_up(layout.entries.back().end(), kFlatAlignment * world);
  return layouts;
}

ElementRange within(const FlatEntry& entry, ElementRange range) {
  const std::int64_t begin = std::max(range.begin, entry.offset);
  const std::int64_t end = std::min(range.end, entry.end());
  if (begin >= end) return {0, 0};
  return {begin - entry.offset, end - entry.offset};
}

Precision make_precision(DType compute, std::optional<DType> reduce) {
  const Precision precision{compute, reduce.value_or(compute)};
  const auto name = [](DType dtype) { return std::string(base::name_of(dtype)); };
  if (compute != DType::f32 && compute != DType::bf16 && compute != DType::f16)
    throw base::Unsupported("precision: parameters of dtype " + name(compute) +
                            " are not supported; use f32, bf16 or f16");
  if (precision.casts() && precision.reduce != DType::f32)
    throw base::Unsupported("precision: gradients of " + name(compute) + " can't be reduced in " +
                            name(precision.reduce) + "; use " + name(compute) +
                            (precision.has_master_weights() ? " or f32" : ""));
  return precision;
}

}  // namespace tessera::fsdp
