// The library's errors as Python's.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>

namespace tessera::python {

/// Makes Python see the library's errors as those of tessera.errors.
void register_errors();

/// An instance of an exception of Python; None for null. Needs the GIL.
nanobind::object exception_of(const std::exception_ptr& error);

}  // namespace tessera::python
