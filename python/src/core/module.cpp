// The Python module tessera._core.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "core/communicator.h"
#include "core/errors.h"
#include "tessera/base/env.h"
#include "tessera/comm/init.h"

namespace tessera::python {
namespace {

using namespace nb::literals;

std::unique_ptr<PyCommunicator> init(const std::optional<std::string>& backend, std::optional<int> rank,
                                     std::optional<int> size, const std::optional<std::string>& run_id,
                                     const std::optional<std::string>& master, const std::optional<std::string>& token,
                                     std::optional<double> timeout, std::optional<bool> deterministic,
                                     std::optional<bool> check) {
  comm::InitOptions options;
  options.backend = backend;
  options.master = master;
  options.token = token;
  options.deterministic = deterministic;
  options.check = check;
  if (rank.has_value() != size.has_value()) throw base::InvalidUsage("init: rank and size go together");
  if (rank) {
    options.launch = comm::resolve_launch([&](const std::string& name) -> std::optional<std::string> {
      if (name == "TESSERA_RANK") return std::to_string(*rank);
      if (name == "TESSERA_WORLD_SIZE") return std::to_string(*size);
      if (name == "TESSERA_RUN_ID") return run_id ? run_id : base::read_foreign_env(name);
      return std::nullopt;
    });
  }
  if (timeout) options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(std::min(*timeout * 1e3, 1e15)));
  const nb::gil_scoped_release without_gil;
  return std::make_unique<PyCommunicator>(comm::init(std::move(options)));
}

constexpr auto kReductions =
    "`op`: sum, avg, prod, min, max, premul_sum, bit_and, bit_or or bit_xor; `factor`: the divisor of avg (0: the "
    "number "
    "of ranks) or the factor of premul_sum.";

void define_work(nb::module_& module) {
  nb::class_<PyWork>(module, "Work", "An operation in flight. It keeps its arrays alive; if it is dropped, it waits.")
      .def("wait", &PyWork::wait, "timeout"_a = nb::none(),
           "Waits until the operation has ended, and raises its error. Raises tessera.Timeout after `timeout` seconds; "
           "the operation then goes on.")
      .def("done", &PyWork::done, "Whether the operation has ended. May drive progress; never blocks.")
      .def("on_done", &PyWork::on_done, "callback"_a,
           "Calls `callback(error)` once the operation has ended, with None where it succeeded: at once, or in a "
           "thread of the communicator.")
      .def("detach", &PyWork::detach, "Does not wait any more: the operation goes on, and keeps its arrays alive.")
      .def_prop_ro("source", &PyWork::source, "The sender's rank, of a receive that has ended.");
}

void define_communicator(nb::module_& module) {
  const std::string reductions = kReductions;
  nb::class_<PyCommunicator> all(
      module, "Communicator",
      "A group of ranks and its operations. Arrays are contiguous, in host memory, of NumPy, PyTorch, JAX or anything "
      "else that has DLPack or the buffer protocol; operations read and write them in place, without copies. All ranks "
      "call the same operations in the same order; each call returns a Work at once. `timeout` is in seconds.");
  all.def_prop_ro("rank", &PyCommunicator::rank, "This process's number, from 0.")
      .def_prop_ro("size", &PyCommunicator::size, "The number of ranks.")
      .def_prop_ro("backend", &PyCommunicator::backend, "The transport: shm, tcp, ucx, mpi, ...")
      .def_prop_ro("last_algorithm", &PyCommunicator::last_algorithm, "The algorithm of the last call.")
      .def_prop_ro("capabilities", &PyCommunicator::capabilities, "What the transport supports.")
      .def("traffic", &PyCommunicator::traffic, "Calls and bytes sent since the start, by operation.")
      .def("all_reduce", &PyCommunicator::all_reduce, "x"_a.noconvert(), "out"_a.noconvert() = nb::none(),
           "op"_a = "sum", "factor"_a = 0.0, "timeout"_a = nb::none(),
           ("`out` = the reduction over all ranks of `x`; without `out` in place. " + reductions).c_str())
      .def("reduce", &PyCommunicator::reduce, "x"_a.noconvert(), "root"_a, "out"_a.noconvert() = nb::none(),
           "op"_a = "sum", "factor"_a = 0.0, "timeout"_a = nb::none(),
           ("As all_reduce, but only the root's `out` is written. " + reductions).c_str())
      .def("broadcast", &PyCommunicator::broadcast, "x"_a.noconvert(), "root"_a, "timeout"_a = nb::none(),
           "`x` = the root's `x`, on every rank.")
      .def("all_gather", &PyCommunicator::all_gather, "out"_a.noconvert(), "x"_a.noconvert(), "counts"_a = nb::none(),
           "timeout"_a = nb::none(),
           "`out` = the ranks' `x`, one after another. `counts`: elements of each, where they differ.")
      .def("reduce_scatter", &PyCommunicator::reduce_scatter, "out"_a.noconvert(), "x"_a.noconvert(), "op"_a = "sum",
           "factor"_a = 0.0, "counts"_a = nb::none(), "timeout"_a = nb::none(),
           ("`out` = this rank's part of the reduction of `x`. `counts`: elements of each part, where they differ. " +
            reductions)
               .c_str())
      .def("gather", &PyCommunicator::gather, "x"_a.noconvert(), "root"_a, "out"_a.noconvert() = nb::none(),
           "counts"_a = nb::none(), "timeout"_a = nb::none(), "As all_gather, but only the root's `out` is written.")
      .def("scatter", &PyCommunicator::scatter, "out"_a.noconvert(), "root"_a, "x"_a.noconvert() = nb::none(),
           "counts"_a = nb::none(), "timeout"_a = nb::none(), "`out` = this rank's part of the root's `x`.")
      .def("all_to_all", &PyCommunicator::all_to_all, "out"_a.noconvert(), "x"_a.noconvert(),
           "out_counts"_a = nb::none(), "counts"_a = nb::none(), "timeout"_a = nb::none(),
           "Part r of `out` = this rank's part of rank r's `x`. `counts` and `out_counts`: elements to and from each "
           "rank, where they differ.")
      .def("send", &PyCommunicator::send, "x"_a.noconvert(), "peer"_a, "tag"_a = 0, "timeout"_a = nb::none(),
           "Sends `x` to rank `peer`.")
      .def("recv", &PyCommunicator::recv, "x"_a.noconvert(), "peer"_a = nb::none(), "tag"_a = 0,
           "timeout"_a = nb::none(), "Receives into `x` from rank `peer`, or from any rank: see Work.source.")
      .def("batch", &PyCommunicator::batch, "sends"_a.noconvert(), "receives"_a.noconvert(), "timeout"_a = nb::none(),
           "Sends and receives that progress together: lists of (array, peer, tag).")
      .def("barrier", &PyCommunicator::barrier, "timeout"_a = nb::none(), "Ends when every rank has called it.")
      .def("split", &PyCommunicator::split, "color"_a, "key"_a = 0,
           "Ranks of equal color form a communicator, ordered by key, then by rank. None for a negative color.")
      .def("create_group", &PyCommunicator::create_group, "members"_a, "tag"_a = 0, "timeout"_a = nb::none(),
           "A communicator of these ranks, in this order, made without the others: only the members call it. Threads "
           "that make groups at the same time give them different tags.")
      .def("allocate", &PyCommunicator::allocate, "count"_a, "dtype"_a = "f32",
           "Memory that moves fastest, uninitialized: numpy.from_dlpack(..), torch.from_dlpack(..).")
      .def("abort", &PyCommunicator::abort, "reason"_a, "Makes all calls fail on all ranks.")
      .def("close", &PyCommunicator::close, "Ends it, once its operations have ended. So does leaving `with`.")
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", [](PyCommunicator& self, const nb::args&) { self.close(); });
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() = "Communication between ranks; use it as `tessera`.";
  register_errors();
  define_work(module);
  define_communicator(module);
  constexpr double kPatience = 10;  // seconds
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { PyCommunicator::leave_all(kPatience); }));
  module.def("init", &init, "backend"_a = nb::none(), "rank"_a = nb::none(), "size"_a = nb::none(),
             "run_id"_a = nb::none(), "master"_a = nb::none(), "token"_a = nb::none(), "timeout"_a = nb::none(),
             "deterministic"_a = nb::none(), "check"_a = nb::none(),
             "Joins the ranks that a launcher has started (tessera run, torchrun, mpirun, Slurm), or those that `rank` "
             "and `size` tell, with a `run_id` that no other run of this user has, or a `master` and a `token`; alone "
             "it makes a world of one. What is not given comes from the environment: "
             "TESSERA_BACKEND, TESSERA_MASTER, TESSERA_TIMEOUT, ... Waits for all ranks.");
}

}  // namespace tessera::python
