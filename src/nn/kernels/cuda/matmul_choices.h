// The algorithms that were fastest when tried, in a file that all ranks of a job read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace tessera::nn::cuda {

/// Which algorithms CublasLtMatmul uses instead of the library's first choice. Two algorithms may add in different
/// orders, so ranks and runs that are to have equal bits need the same file.
class MatmulChoices {
 public:
  static constexpr int kTried = 8;  ///< algorithms of each product

  /// All that determines a product but its data: see CublasLtMatmul.
  using Key = std::array<std::size_t, 9>;
  /// The library's own encoding, which it accepts in the same version.
  using Algorithm = std::array<std::uint64_t, 8>;
  struct Choice {
    Algorithm algorithm{};
    double us = 0;        ///< of the fastest
    double first_us = 0;  ///< of the library's first choice
  };

  /// `setting`: the value of kMatmulVariable. `device` and `version` (of cuBLASLt) are those for which choices are
  /// valid. Throws InvalidUsage: the file can't be read, or is for another device or version.
  MatmulChoices(std::string_view setting, std::string device, std::size_t version);

  bool tries() const { return tries_; }  ///< true for try:FILE
  /// "" without a file, else " with choices " and a hash of them, so that ranks with different files are told apart.
  std::string name() const;
  /// Null: none is known.
  const Choice* find(const Key& key) const;
  /// Adds what was found and writes the file. Throws InvalidUsage if it can't be written.
  void add(const Key& key, const Choice& choice);

 private:
  void read();
  void write() const;
  const std::string device_;
  const std::size_t version_;
  bool tries_ = false;
  std::string path_;  ///< "": no file
  std::map<Key, Choice> choices_;
};

}  // namespace tessera::nn::cuda
