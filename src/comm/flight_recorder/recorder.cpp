#include "tessera/comm/flight_recorder/recorder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/core/op_traits.h"

namespace tessera::comm {
namespace {

constexpr int kMaxFailures = 16;  // all pending calls fail with the first cause

[[noreturn]] void refuse(const std::string& path, int error) {
  throw InvalidUsage("flight recorder: can't write '" + path + "': " + std::generic_category().message(error) +
                     "; name a directory in which this rank may create a file");
}

/// A new file, since another rank may still have the old one mapped. Its blocks are reserved: a mapping can't report a
/// full disk.
UniqueFd create(const std::string& directory, const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) refuse(directory, error.value());
  NewFile file = create_beside(path, ".partial-", O_RDWR | O_APPEND);
  if (!file.fd) refuse(path, file.code);
  int problem = ::posix_fallocate(file.fd.get(), 0, static_cast<off_t>(flight::kTextOffset));
  if (problem == 0 && ::rename(file.path.c_str(), path.c_str()) != 0) problem = errno;
  if (problem != 0) {
    ::unlink(file.path.c_str());
    refuse(path, problem);
  }
  return std::move(file.fd);
}

template <class T>
std::atomic_ref<T> atomic(T& value) {
  return std::atomic_ref<T>(value);
}

}  // namespace

FlightRecorder::FlightRecorder(const std::string& directory, int rank) : exceptions_(std::uncaught_exceptions()) {
  const std::string path = directory + "/rank-" + std::to_string(rank) + ".flight";
  file_ = create(directory, path);
  memory_ = ::mmap(nullptr, flight::kTextOffset, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (memory_ == MAP_FAILED) refuse(path, errno);
  auto& header = *static_cast<flight::Header*>(memory_);
  header = {.magic = flight::kMagic, .entries = flight::kEntries, .entry_bytes = sizeof(flight::Entry), .reserved = {}};
  entries_ = reinterpret_cast<flight::Entry*>(&header + 1);
}

FlightRecorder::~FlightRecorder() {
  if (made_in_ != base::forks_so_far()) return;  // the record is the parent's
  add_line("end",
           std::to_string(host_time_ns()) + (std::uncaught_exceptions() > exceptions_ ? " exception" : " closed"));
  ::munmap(memory_, flight::kTextOffset);
}

void FlightRecorder::issue(CallNumber number, const OpDesc& call, const Place& place) noexcept {
  flight::Entry& entry = entry_of(number);
  atomic(entry.number).store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // before what follows, which a reader may see early
  const DType dtype = call.kind == OpKind::send ? call.in.dtype : call.out.dtype;
  const std::size_t count =
      is_message(call.kind) ? std::max(call.in.count, call.out.count) : larger_count(call, place.ranks);
  atomic(entry.state).store(static_cast<std::uint32_t>(flight::State::issued), std::memory_order_relaxed);
  entry.kind = static_cast<std::uint8_t>(call.kind);
  entry.dtype = static_cast<std::uint8_t>(dtype);
  entry.reduce = static_cast<std::uint8_t>(call.op.kind);
  entry.communicator = place.communicator;
  entry.root = call.root;
  entry.sequence = place.sequence;
  entry.bytes = count * size_of(dtype);
  entry.step = step_.load(std::memory_order_relaxed);
  entry.issued_ns = host_time_ns();
  atomic(entry.ended_ns).store(0, std::memory_order_relaxed);
  entry.label = {};
  std::copy_n(call.label.data(), std::min(call.label.size(), entry.label.size()), entry.label.data());
  atomic(entry.number).store(number, std::memory_order_release);
}

void FlightRecorder::set_state(Calls calls, flight::State state) noexcept {
  for (CallNumber call = calls.first; call < calls.first + calls.count; ++call) {
    flight::Entry& entry = entry_of(call);
    if (atomic(entry.number).load(std::memory_order_relaxed) != call) continue;  // a later call has the entry
    if (state >= flight::State::done) atomic(entry.ended_ns).store(host_time_ns(), std::memory_order_relaxed);
    atomic(entry.state).store(static_cast<std::uint32_t>(state), std::memory_order_release);
  }
}

void FlightRecorder::fail(Calls calls, std::string_view reason) noexcept {
  if (calls.first != 0) set_state(calls, flight::State::failed);
  if (failures_.fetch_add(1) >= kMaxFailures) return;
  try {
    add_line("failure", std::to_string(host_time_ns()) + " " + std::to_string(calls.first) + " " + std::string(reason));
  } catch (const std::bad_alloc&) {  // the entry has the state
  }
}

void FlightRecorder::add_line(std::string_view key, std::string_view text) noexcept {
  try {
    const std::string line = std::string(key) + " " + printable(text) + "\n";
    // One call, so that lines of threads don't mix. A disk that is full has no room for it: the entries remain.
    [[maybe_unused]] const ssize_t written = ::write(file_.get(), line.data(), line.size());
  } catch (const std::bad_alloc&) {
  }
}

}  // namespace tessera::comm
