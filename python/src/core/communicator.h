// A communicator for Python.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/work.h"

namespace tessera::python {

using Counts = std::vector<std::size_t>;
using Message = std::tuple<InputArray, int, int>;       ///< what is sent, to whom, tag
using MessageRoom = std::tuple<OutputArray, int, int>;  ///< where a message goes, from whom, tag

/// Calls issue operations without the GIL. Each is used by one thread at a time; other threads may wait and abort.
class PyCommunicator {
 public:
  explicit PyCommunicator(std::shared_ptr<comm::Communicator> world);
  PyCommunicator(const PyCommunicator&) = delete;
  PyCommunicator& operator=(const PyCommunicator&) = delete;
  ~PyCommunicator();

  int rank() const { return world().rank(); }
  int size() const { return world().size(); }
  std::string backend() const { return std::string(world().backend()); }
  std::string last_algorithm() const { return std::string(world().last_algorithm()); }
  nb::dict capabilities() const;
  nb::dict traffic() const;

  using Work = std::unique_ptr<PyWork>;
  using Op = const std::string&;
  using Seconds = std::optional<double>;
  Work all_reduce(OutputArray x, std::optional<OutputArray> out, Op op, double factor, Seconds timeout);
  Work reduce(InputArray x, int root, std::optional<OutputArray> out, Op op, double factor, Seconds timeout);
  Work broadcast(OutputArray x, int root, Seconds timeout);
  Work all_gather(OutputArray out, InputArray x, std::optional<Counts> counts, Seconds timeout);
  Work reduce_scatter(OutputArray out, InputArray x, Op op, double factor, std::optional<Counts> counts,
                      Seconds timeout);
  Work gather(InputArray x, int root, std::optional<OutputArray> out, std::optional<Counts> counts, Seconds timeout);
  Work scatter(OutputArray out, int root, std::optional<InputArray> x, std::optional<Counts> counts, Seconds timeout);
  Work all_to_all(OutputArray out, InputArray x, std::optional<Counts> out_counts, std::optional<Counts> counts,
                  Seconds timeout);
  Work send(InputArray x, int peer, int tag, Seconds timeout);
  Work recv(OutputArray x, std::optional<int> peer, int tag, Seconds timeout);
  Work batch(std::vector<Message> sends, std::vector<MessageRoom> receives, Seconds timeout);
  Work barrier(Seconds timeout);

  /// Null where `color` is negative.
  std::unique_ptr<PyCommunicator> split(int color, int key);
  std::unique_ptr<PyCommunicator> create_group(const std::vector<int>& members, int tag, Seconds timeout);
  nb::ndarray<nb::array_api> allocate(std::size_t count, const std::string& dtype);
  void abort(const std::string& reason) { world().abort(reason); }
  /// Ends it, once the operations in flight have ended. Later calls throw.
  void close();
  /// Closes all that are open as the process ends: what is in flight has `seconds` until it is aborted.
  static void leave_all(double seconds);

 private:
  comm::Communicator& world() const;
  /// Of a communicator that `make` derives from this one; null if that is.
  template <class Make>
  std::unique_ptr<PyCommunicator> derive(const Make& make);
  template <class Issue>
  Work issue(std::vector<nb::ndarray<nb::ro>> arrays, Seconds timeout, const Issue& call,
             std::shared_ptr<int> source = nullptr);

  std::shared_ptr<comm::Communicator> world_;  ///< null: closed
};

}  // namespace tessera::python
