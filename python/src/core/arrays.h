// Arrays of Python as views: NumPy, PyTorch, JAX and others, by DLPack or the buffer protocol.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>

#include "tessera/base/memory_pool.h"
#include "tessera/comm/types.h"

namespace tessera::python {

namespace nb = nanobind;

/// A contiguous array in host memory that an operation reads.
using InputArray = nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig>;
/// One that an operation writes.
using OutputArray = nb::ndarray<nb::device::cpu, nb::c_contig>;

/// Throws Unsupported for dtypes that the library does not have, such as complex numbers.
comm::ConstView view_of(const InputArray& array);
comm::View view_of(const OutputArray& array);

/// An array in this memory, of any framework that takes DLPack.
nb::ndarray<nb::array_api> array_of(base::Buffer memory, std::size_t count, base::DType dtype);

}  // namespace tessera::python
