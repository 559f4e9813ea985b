// The f32 scratch memory of half-precision kernels.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn {

/// The f32 scratch memory of one call.
template <class T>
class F32Scratch {
 public:
  F32Scratch(DeviceKernels& all, MemoryPool& memory, Stream& stream) : all_(all), memory_(memory), stream_(stream) {}
  ~F32Scratch() {
    if (stream_.immediate() || buffers_.empty()) return;
    stream_.hold(std::make_shared<std::vector<Buffer>>(std::move(buffers_)));
  }
  F32Scratch(const F32Scratch&) = delete;
  F32Scratch& operator=(const F32Scratch&) = delete;

  float* room(std::size_t count) {
    buffers_.push_back(memory_.allocate(count * sizeof(float), MemoryCategory::activation));
    return static_cast<float*>(buffers_.back().data());
  }
  /// Returns null if `like` is null.
  float* room_for(const T* like, std::size_t count) { return like == nullptr ? nullptr : room(count); }
  void load(const T* from, float* to, std::size_t count) {
    if (from != nullptr && count > 0) all_.convert(stream_, {from, dtype_of<T>, to, DType::f32, count});
  }
  void store(const float* from, T* to, std::size_t count) {
    if (to != nullptr && count > 0) all_.convert(stream_, {from, DType::f32, to, dtype_of<T>, count});
  }
  /// Returns scratch that holds the values of `from`.
  float* widened(const T* from, std::size_t count) {
    float* to = room_for(from, count);
    load(from, to, count);
    return to;
  }
  /// Returns scratch for the values of `to`, with its present ones if they are added to; null if `to` is null.
  float* target(const T* to, std::size_t count, bool accumulate) {
    return accumulate ? widened(to, count) : room_for(to, count);
  }

 private:
  DeviceKernels& all_;
  MemoryPool& memory_;
  Stream& stream_;
  std::vector<Buffer> buffers_;
};

/// Strided views of one or several memory regions. Interleaved views share their f32 copy.
template <class T>
class F32Views {
 public:
  struct Extents {
    std::size_t batch = 0, positions = 0, heads = 0, dim = 0;
    std::size_t elements() const { return batch * positions * heads * dim; }
  };
  struct Part {
    kernels::HeadsView<T> view;
    Extents extents;
    bool load = true;
  };
  F32Views(F32Scratch<std::remove_const_t<T>>& scratch, std::initializer_list<Part> parts);
  kernels::HeadsView<std::conditional_t<std::is_const_v<T>, const float, float>> of(
      const kernels::HeadsView<T>& view) const;
  /// Rounds all values back to T.
  void store() requires(!std::is_const_v<T>);

 private:
  struct Region {
    T* begin = nullptr;
    std::size_t count = 0, covered = 0;
    bool load = false;
    float* f32 = nullptr;
  };
  F32Scratch<std::remove_const_t<T>>& scratch_;
  std::vector<Region> regions_;
};

}  // namespace tessera::nn
