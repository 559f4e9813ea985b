// The compute threads of one rank. Kernels divide their work into tiles that depend only on the problem, never on the
// number of threads, so a result has the same bits for every `--threads`.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

#include "tessera/base/export.h"

namespace tessera::nn {

/// A fixed number of threads, including the caller's. Several pools may exist in one process (ranks as threads). Only
/// one thread at a time may call parallel_for of a pool, and never from one of its tiles.
class TESSERA_API ThreadPool {
 public:
  /// Throws InvalidUsage if `threads` < 1. With one thread everything runs inline, without synchronization.
  explicit ThreadPool(std::size_t threads = 1);
  ~ThreadPool();

  std::size_t threads() const noexcept { return threads_; }  ///< including the caller's

  /// Calls function(tile) or function(tile, worker) once for each tile of [0, tiles), on any of the pool's threads.
  /// worker is in [0, threads()), and only one tile at a time runs with a worker number (for scratch memory). Returns
  /// when all tiles are done. An exception in a tile ends the call (tiles not yet started are skipped) and is rethrown
  /// to the caller.
  template <class Function>
  void parallel_for(std::size_t tiles, Function&& function) {
    if (threads_ == 1 || tiles <= 1) {
      for (std::size_t tile = 0; tile < tiles; ++tile) call(function, tile, 0);
      return;
    }
    using Plain = std::remove_reference_t<Function>;
    run(
        tiles, [](void* f, std::size_t tile, std::size_t worker) { call(*static_cast<Plain*>(f), tile, worker); },
        const_cast<void*>(static_cast<const void*>(&function)));
  }

 private:
  using Task = void (*)(void* function, std::size_t tile, std::size_t worker);
  template <class Function>
  static void call(Function& function, std::size_t tile, std::size_t worker) {
    if constexpr (std::is_invocable_v<Function&, std::size_t, std::size_t>)
      function(tile, worker);
    else
      function(tile);
  }
  void run(std::size_t tiles, Task task, void* function);

  class Impl;
  std::size_t threads_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::nn
