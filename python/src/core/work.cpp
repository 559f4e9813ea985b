#include "core/work.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include "core/errors.h"
#include "tessera/base/deadline.h"
#include "tessera/base/error.h"

namespace tessera::python {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSignalsEvery = std::chrono::milliseconds(100);

/// Owns a value that must be released with the GIL, by whichever thread is last.
template <class T>
std::shared_ptr<T> with_gil(T value) {
  return {new T(std::move(value)), [](T* held) {
            if (!Py_IsInitialized()) return;  // the process ends; its memory goes with it
            const nb::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace

PyWork::~PyWork() {
  const nb::gil_scoped_release without_gil;  // callbacks, which the communicator's end waits for, need it
  work_ = comm::Work();
  world_.reset();
}

bool PyWork::done() {
  const nb::gil_scoped_release without_gil;
  return work_.done();
}

void PyWork::wait(std::optional<double> seconds) {
  const auto until = seconds ? base::deadline_after(std::chrono::milliseconds(
                                   static_cast<std::int64_t>(std::ceil(std::clamp(*seconds * 1e3, 0.0, 1e15)))))
                             : Clock::time_point::max();
  for (;;) {
    bool ended = false;
    {
      const nb::gil_scoped_release without_gil;
      ended = work_.wait_until(std::min(until, Clock::now() + kSignalsEvery));
    }
    if (ended) {
      const nb::gil_scoped_release without_gil;
      return work_.wait();  // throws its error
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (Clock::now() >= until)
      throw base::Timeout("wait: the operation has not ended within " + std::to_string(*seconds) +
                          " s; it is still under way");
  }
}

void PyWork::on_done(nb::object callback) {
  const auto held = with_gil(std::move(callback));
  const nb::gil_scoped_release without_gil;
  work_.on_done([held](const std::exception_ptr& error) {
    if (!Py_IsInitialized()) return;
    const nb::gil_scoped_acquire gil;
    try {
      (*held)(exception_of(error));
    } catch (nb::python_error& raised) {
      raised.discard_as_unraisable("a callback of tessera.Work.on_done()");
    }
  });
}

void PyWork::detach() {
  const auto held = with_gil(std::move(arrays_));
  const nb::gil_scoped_release without_gil;
  work_.on_done([held, source = source_](const std::exception_ptr&) {});
  work_.detach();
}

std::optional<int> PyWork::source() const {
  if (source_ == nullptr || *source_ < 0) return std::nullopt;
  return *source_;
}

}  // namespace tessera::python
