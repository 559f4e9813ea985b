// Computes the graphs of fake_cudnn.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "tessera/nn/kernels/cuda/cudnn_graph.h"

namespace tessera::nn::test {

/// A descriptor and the attributes that were set.
struct FakeDescriptor {
  cudnnBackendDescriptorType_t type;
  bool is_final = false;
  std::map<int, std::vector<std::byte>> values;

  bool has(cudnnBackendAttributeName_t name) const { return values.contains(name); }
  template <class T>
  std::vector<T> all(cudnnBackendAttributeName_t name) const {
    const std::vector<std::byte>& bytes = values.at(name);
    std::vector<T> result(bytes.size() / sizeof(T));
    std::memcpy(result.data(), bytes.data(), bytes.size());
    return result;
  }
  template <class T>
  T value(cudnnBackendAttributeName_t name) const {
    return all<T>(name).at(0);
  }
  std::int64_t integer(cudnnBackendAttributeName_t name) const { return value<std::int64_t>(name); }
  bool flag(cudnnBackendAttributeName_t name) const { return has(name) && value<std::uint8_t>(name) != 0; }
  FakeDescriptor& other(cudnnBackendAttributeName_t name) const {
    return *static_cast<FakeDescriptor*>(value<cudnnBackendDescriptor_t>(name));
  }
  template <class T>
  void store(cudnnBackendAttributeName_t name, const T& stored) {
    std::vector<std::byte>& bytes = values[name];
    bytes.resize(sizeof(T));
    std::memcpy(bytes.data(), &stored, sizeof(T));
  }
};

/// Runs the operations of `graph` on the memory of `pack`. True if a product's result is f32 memory of the caller.
bool run_fake_graph(const FakeDescriptor& graph, const FakeDescriptor& pack);

}  // namespace tessera::nn::test
