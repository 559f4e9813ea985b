// Arrays of Python as views: NumPy, PyTorch, JAX and others, by DLPack or the buffer protocol.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <utility>

#include "tessera/base/memory_pool.h"
#include "tessera/comm/types.h"

namespace tessera::python {

namespace nb = nanobind;

/// A contiguous array in host memory that an operation reads.
using InputArray = nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig>;
using WritableArray = nb::ndarray<nb::device::cpu, nb::c_contig>;
/// One that an operation writes. Not those whose buffer is read-only, such as JAX's, which DLPack does not say of them.
class OutputArray : public WritableArray {
 public:
  OutputArray() = default;
  explicit OutputArray(WritableArray array) : WritableArray(std::move(array)) {}
};

/// Throws Unsupported for dtypes that the library does not have, such as complex numbers.
comm::ConstView view_of(const InputArray& array);
comm::View view_of(const OutputArray& array);

/// An array in this memory, of any framework that takes DLPack.
nb::ndarray<nb::array_api> array_of(base::Buffer memory, std::size_t count, base::DType dtype);

}  // namespace tessera::python

namespace nanobind::detail {

template <>
struct type_caster<tessera::python::OutputArray> {
  using Writable = make_caster<tessera::python::WritableArray>;
  NB_TYPE_CASTER(tessera::python::OutputArray, Writable::Name)

  template <class Flags>  // whose type depends on nanobind's version
  bool from_python(handle source, Flags flags, cleanup_list* cleanup) noexcept {
    if (PyObject_CheckBuffer(source.ptr()) != 0) {
      Py_buffer buffer;
      if (PyObject_GetBuffer(source.ptr(), &buffer, PyBUF_STRIDED) != 0) {
        PyErr_Clear();
        return false;
      }
      PyBuffer_Release(&buffer);
    }
    Writable writable;
    if (!writable.from_python(source, flags, cleanup)) return false;
    value = tessera::python::OutputArray(std::move(writable.value));
    return true;
  }
};

}  // namespace nanobind::detail
