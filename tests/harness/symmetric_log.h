// Where the buffers of one rank's collectives are: in memory of allocate_symmetric(), and of which call.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::harness {

/// Of the communicators of one rank, by their number in the order of creation.
class SymmetricLog {
 public:
  int add_communicator() { return communicators_++; }
  void add_block(int communicator, const base::Buffer& buffer) {
    blocks_.push_back({communicator, static_cast<const std::byte*>(buffer.data()), buffer.bytes()});
  }
  void add_call(int communicator, const comm::OpDesc& call) {
    // The smaller buffer of a gather or a scatter may be the rank's own slice of the larger one.
    std::string in = place(communicator, call.in.data), out = place(communicator, call.out.data);
    if (call.kind == comm::OpKind::all_gather) in = without_offset(in);
    if (call.kind == comm::OpKind::reduce_scatter) out = without_offset(out);
    calls_.push_back(std::string(name_of(call.kind)) + " " + in + " to " + out);
  }
  /// "all_gather #0 to #4+0": from the block of the communicator's first call to that of its fifth, at offset 0; "-" is
  /// other memory.
  const std::vector<std::string>& calls() const { return calls_; }

 private:
  struct Block {
    int communicator;
    const std::byte* begin;
    std::size_t bytes;
  };
  std::string place(int communicator, const void* data) const {
    const auto* const address = static_cast<const std::byte*>(data);
    int number = 0;
    for (const Block& block : blocks_) {
      if (block.communicator != communicator) continue;
      if (address >= block.begin && address < block.begin + block.bytes)
        return "#" + std::to_string(number) + "+" + std::to_string(address - block.begin);
      ++number;
    }
    return "-";
  }
  static std::string without_offset(const std::string& place) { return place.substr(0, place.find('+')); }

  int communicators_ = 0;
  std::vector<Block> blocks_;
  std::vector<std::string> calls_;
};

}  // namespace tessera::harness
