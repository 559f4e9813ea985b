#include "tessera/nn/kernels/half/half_views.h"

#include <algorithm>
#include <functional>

namespace tessera::nn {

template <class T>
F32Views<T>::F32Views(F32Scratch<std::remove_const_t<T>>& scratch, std::initializer_list<Part> parts)
    : scratch_(scratch) {
  for (const Part& part : parts) {
    const Extents& e = part.extents;
    if (e.elements() == 0) continue;
    const kernels::HeadsView<T>& v = part.view;
    const std::size_t count =
        (e.batch - 1) * v.batch_stride + (e.positions - 1) * v.position_stride + (e.heads - 1) * v.head_stride + e.dim;
    regions_.push_back({v.data, count, e.elements(), part.load});
  }
  std::sort(regions_.begin(), regions_.end(),
            [](const Region& a, const Region& b) { return std::less<>()(a.begin, b.begin); });
  std::vector<Region> merged;
  for (const Region& region : regions_) {
    if (merged.empty() || !std::less<>()(region.begin, merged.back().begin + merged.back().count)) {
      merged.push_back(region);
      continue;
    }
    Region& before = merged.back();
    before.count = std::max(before.count, static_cast<std::size_t>(region.begin - before.begin) + region.count);
    before.covered += region.covered;
    before.load = before.load || region.load;
  }
  regions_ = std::move(merged);
  for (Region& region : regions_) {
    region.f32 = scratch_.room(region.count);
    // Elements between the views are copied there and back unchanged.
    if (region.load || region.covered < region.count) scratch_.load(region.begin, region.f32, region.count);
  }
}

template <class T>
kernels::HeadsView<std::conditional_t<std::is_const_v<T>, const float, float>> F32Views<T>::of(
    const kernels::HeadsView<T>& view) const {
  for (const Region& region : regions_) {
    const bool inside =
        !std::less<>()(view.data, region.begin) && std::less<>()(view.data, region.begin + region.count);
    if (inside)
      return {region.f32 + (view.data - region.begin), view.batch_stride, view.position_stride, view.head_stride};
  }
  return {nullptr, view.batch_stride, view.position_stride, view.head_stride};  // a view without elements
}

template <class T>
void F32Views<T>::store() requires(!std::is_const_v<T>) {
  if constexpr (!std::is_const_v<T>)  // clang 14 instantiates the body for const too
    for (const Region& region : regions_) scratch_.store(region.f32, region.begin, region.count);
}

template class F32Views<f16>;
template class F32Views<const f16>;
template class F32Views<bf16>;
template class F32Views<const bf16>;

}  // namespace tessera::nn
