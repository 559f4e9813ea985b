// The Python module tessera._c10d.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "c10d/backend.h"
#include "tessera/comm/init.h"

namespace tessera::c10d_backend {

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "torch.distributed's backend 'tessera'; use it through torch.distributed.";
  py::module_::import("torch.distributed");  // registers the base classes
  py::class_<GroupSettings>(module, "GroupSettings", "How a process group is made.")
      .def(py::init([](c10::intrusive_ptr<::c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout,
                       std::vector<int> global_ranks, std::optional<c10::Device> device) {
             return GroupSettings{std::move(store), rank, size, timeout, std::move(global_ranks), device};
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
           py::arg("global_ranks") = std::vector<int>{}, py::arg("device") = py::none());
  py::class_<TorchBackend, c10::intrusive_ptr<TorchBackend>, ::c10d::Backend>(module, "Backend",
                                                                              "A process group's communicator.")
      .def(py::init([](const GroupSettings& settings, std::string name) {
             return c10::make_intrusive<TorchBackend>(settings, std::move(name));
           }),
           py::arg("settings"), py::arg("name") = "tessera", py::call_guard<py::gil_scoped_release>())
      .def(py::init([](const TorchBackend& parent, const GroupSettings& settings, const std::string& group_name,
                       std::string name) {
             return c10::make_intrusive<TorchBackend>(parent, settings, group_name, std::move(name));
           }),
           py::arg("parent"), py::arg("settings"), py::arg("group_name"), py::arg("name") = "tessera",
           py::call_guard<py::gil_scoped_release>())
      .def(
          "perform_nocolor_split", [](const TorchBackend&, const py::object&) {}, py::arg("device"),
          "Nothing: only its members make a group.")
      .def("leave", &TorchBackend::leave, py::arg("patience"), py::call_guard<py::gil_scoped_release>(),
           "Ends the process group when the process ends.")
      .def_property_readonly("closed", &TorchBackend::closed, "Whether the process group was destroyed.")
      .def_property_readonly("transport", &TorchBackend::transport, "The library's backend, such as 'shm'.");
}

}  // namespace tessera::c10d_backend
