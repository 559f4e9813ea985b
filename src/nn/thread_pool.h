// The compute threads of one rank. Kernels cut their work into tiles that depend on the problem only, never on the number
// of threads, so that a result has the same bits for every `--threads`.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

#include "tessera/base/export.h"

namespace tessera::nn {

/// A fixed number of threads, the caller's among them. Several pools may live in one process (ranks as threads).
/// One thread at a time may call parallel_for of a pool, and never from inside one of its tiles.
class TESSERA_API ThreadPool {
 public:
  /// `threads` >= 1, else InvalidUsage. One thread: everything runs inline, nothing is synchronised.
  explicit ThreadPool(std::size_t threads = 1);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t threads() const noexcept { return threads_; }

  /// Calls function(tile) or function(tile, worker) once for each tile of [0, tiles), on any of the pool's threads; worker
  /// is in [0, threads()), and only one tile runs under one worker number at a time (for scratch memory). Returns when
  /// all are done. An exception of a tile ends the call (tiles not yet begun are skipped) and is rethrown here.
  template <class Function>
  void parallel_for(std::size_t tiles, Function&& function) {
    if (threads_ == 1 || tiles <= 1) {
      for (std::size_t tile = 0; tile < tiles; ++tile) call(function, tile, 0);
      return;
    }
    using Plain = std::remove_reference_t<Function>;
    run(tiles, [](void* f, std::size_t tile, std::size_t worker) { call(*static_cast<Plain*>(f), tile, worker); },
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
