// What a device can do for the layers above: memory, streams and copies. One abstract class for every kind of device.
//
// cpu and meta are built in. Any other device is a loadable module (device_module.h), so the program starts on machines
// that lack it and says why. Layers above put their own tables into a device without base knowing them: see find().
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/device.h"
#include "tessera/base/export.h"
#include "tessera/base/stream.h"

namespace tessera::base {

struct DeviceProperties {
  std::string name;              ///< the vendor's
  std::size_t memory_bytes = 0;  ///< 0: not known
  int processors = 0;            ///< that run blocks of threads at the same time; 0: not known
  int generation = 0;            ///< of the architecture, ten times major plus minor; 0 where that means nothing
  bool shares_memory = false;    ///< with the processes of its host; each may still refuse it
};

enum class CopyDirection : std::uint8_t { host_to_device, device_to_host, device_to_device };

struct DeviceTraits {
  bool host_accessible = false;  ///< the host may read and write the device's memory (in the order of its streams)
  bool slow_allocation = false;  ///< pools keep more idle memory, and cut small blocks out of large ones
  bool shares_memory = false;    ///< get_ipc_handle() and open_ipc_handle() are there
};

/// What another process needs to use memory of a device. Bytes that may be sent to it; what they mean is the device's.
struct IpcMemoryHandle {
  std::array<std::byte, 128> bytes{};
};

/// A point that the host reaches: how a stream comes after something that the host still has to do.
class TESSERA_API HostEvent {
 public:
  HostEvent() = default;
  virtual ~HostEvent();  ///< what is armed counts as reached
  HostEvent(const HostEvent&) = delete;
  HostEvent& operator=(const HostEvent&) = delete;
  /// A new event; the one before must have been reached. It may outlive the signal.
  virtual Event arm() = 0;
  /// Reaches the event. Any thread, once.
  virtual void set() noexcept = 0;
};

/// Work of a stream that was recorded once and runs again as a whole, on the same memory. Its device outlives it.
class TESSERA_API Graph {
 public:
  Graph() = default;
  virtual ~Graph();  ///< what was launched must have run
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  /// Appends it.
  virtual void launch(Stream& stream) = 0;
};

/// One device as one rank uses it. Thread-safe but for what a stream allows. Errors: SystemError where memory is short,
/// BackendError with the vendor's text for everything else.
class TESSERA_API DeviceRuntime {
 public:
  virtual ~DeviceRuntime();
  DeviceRuntime(const DeviceRuntime&) = delete;
  DeviceRuntime& operator=(const DeviceRuntime&) = delete;

  Device device() const { return device_; }
  const DeviceTraits& traits() const { return traits_; }
  bool host_accessible() const { return traits_.host_accessible; }
  virtual DeviceProperties properties() const = 0;

  virtual std::unique_ptr<Stream> make_stream() = 0;
  /// One for copies that must get on while all other streams wait for something.
  virtual std::unique_ptr<Stream> make_copy_stream() { return make_stream(); }
  /// Streams of this device that wait for its events wait on the device. The default's make the host wait instead.
  virtual std::unique_ptr<HostEvent> make_signal();

  /// At least `bytes` (0: a valid pointer), aligned to kAlignment, uninitialised. Slow: pools stand above it.
  virtual void* allocate(std::size_t bytes) = 0;
  /// Any work that uses the memory must have been done, or be ordered before what the device does for free.
  virtual void free(void* data, std::size_t bytes) noexcept = 0;

  /// For the processes of this host: `data` is all that one allocate() gave. It may be freed only when everybody who
  /// imported it has released it. Throws Unsupported where this device or system shares nothing.
  virtual IpcMemoryHandle get_ipc_handle(void* data, std::size_t bytes);
  /// Where this device reads and writes that memory, which may be another device's; in the process that exported it
  /// that is the memory's own address. Throws Unsupported, with the reason, where it can't reach it.
  virtual void* open_ipc_handle(const IpcMemoryHandle& handle);
  /// What open_ipc_handle() gave; as free() for what is under way.
  virtual void close_ipc_handle(void* imported) noexcept;

  /// Host memory that copies from and to this device may use without making the host wait.
  virtual void* allocate_host(std::size_t bytes) = 0;
  virtual void free_host(void* data, std::size_t bytes) noexcept = 0;
  /// Makes host memory that is there already such memory, until unpin_host().
  virtual void pin_host(void*, std::size_t) {}
  virtual void unpin_host(void*, std::size_t) noexcept {}

  /// Appends a copy to `stream`. Host memory that isn't allocate_host's works too, but may make the host wait.
  virtual void copy(Stream& stream, CopyDirection direction, void* to, const void* from, std::size_t bytes) = 0;
  /// Appends: every byte becomes `value`.
  virtual void fill(Stream& stream, void* data, unsigned char value, std::size_t bytes) = 0;

  /// From here to end_capture() work appended to `stream` is recorded instead of run; it must take no event, and nobody
  /// may wait for it. One at a time. Throws Unsupported where the device can't.
  virtual void begin_capture(Stream& stream);
  /// What was recorded. The stream is as before, also where this throws: something could not be recorded.
  virtual std::unique_ptr<Graph> end_capture(Stream& stream);

  /// The host waits for everything on this device.
  virtual void synchronize() = 0;

  /// Shows what the calling thread does from here to range_end() as "WHAT UNIT" to the vendor's profiler, if one is
  /// attached. Ranges of a thread nest, and each has its end.
  virtual void range_begin(std::string_view /*what*/, std::string_view /*unit*/) noexcept {}
  virtual void range_end() noexcept {}

  /// What this device has for a layer above, by the name that the layer chose; null where it has none. The layer's
  /// header fixes the type; find<Table>() asks under Table::kInterface.
  virtual const void* find(std::string_view interface) const noexcept = 0;
  template <class Table>
  const Table* find() const noexcept {
    return static_cast<const Table*>(find(Table::kInterface));
  }

 protected:
  DeviceRuntime(Device device, DeviceTraits traits) : device_(device), traits_(traits) {}

 private:
  const Device device_;
  const DeviceTraits traits_;
};

/// Throws InvalidUsage with the reason where the device can't be used on this machine. Makes nothing.
TESSERA_API void require_device(Device device);

/// The device, ready for use. Throws InvalidUsage with the reason where it can't be used on this machine.
TESSERA_API std::shared_ptr<DeviceRuntime> open_device(Device device);

struct DeviceInfo {
  std::string name;  ///< "cpu", "meta", "cuda"
  bool available = false;
  std::string reason;                     ///< why it isn't
  std::vector<DeviceProperties> devices;  ///< what was found
};

/// Every device that this library knows or finds a module for. Never throws for a device that can't be used.
TESSERA_API std::vector<DeviceInfo> list_devices();

}  // namespace tessera::base
