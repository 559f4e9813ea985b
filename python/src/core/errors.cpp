#include "core/errors.h"

#include <string>

#include "tessera/base/error.h"

namespace tessera::python {

namespace nb = nanobind;

namespace {

nb::object class_of(const base::Error& error) {
  return nb::module_::import_("tessera.errors").attr(std::string(error.kind()).c_str());
}

}  // namespace

void register_errors() {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void* /*payload*/) {
    try {
      std::rethrow_exception(thrown);
    } catch (const base::Error& error) {
      PyErr_SetString(class_of(error).ptr(), error.what());
    }
  });
}

nb::object exception_of(const std::exception_ptr& error) {
  if (error == nullptr) return nb::none();
  try {
    std::rethrow_exception(error);
  } catch (const base::Error& known) {
    return class_of(known)(known.what());
  } catch (const std::exception& other) {
    return nb::borrow(PyExc_RuntimeError)(other.what());
  }
}

}  // namespace tessera::python
