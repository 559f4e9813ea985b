// An operation in flight, with the arrays that it uses.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <vector>

#include "core/arrays.h"
#include "tessera/comm/communicator.h"

namespace tessera::python {

class PyWork {
 public:
  /// `arrays` stay alive until the operation has ended. `source`: where a receive writes its sender's rank, or null.
  PyWork(std::shared_ptr<comm::Communicator> world, comm::Work work, std::vector<nb::ndarray<nb::ro>> arrays,
         std::shared_ptr<int> source)
      : world_(std::move(world)), arrays_(std::move(arrays)), source_(std::move(source)), work_(std::move(work)) {}
  PyWork(const PyWork&) = delete;
  PyWork& operator=(const PyWork&) = delete;
  /// Waits, as the library's Work does.
  ~PyWork();

  bool done();
  /// Throws TimeoutError of tessera.errors after `seconds`; the operation then goes on. Ctrl-C interrupts it.
  void wait(std::optional<double> seconds);
  /// Calls `callback(error)` when it has ended, with None where it succeeded.
  void on_done(nb::object callback);
  /// Does not wait any more: the operation goes on, and keeps its arrays.
  void detach();
  /// The sender's rank, of a receive that has ended.
  std::optional<int> source() const;

 private:
  std::shared_ptr<comm::Communicator> world_;
  std::vector<nb::ndarray<nb::ro>> arrays_;
  std::shared_ptr<int> source_;
  comm::Work work_;
};

}  // namespace tessera::python
