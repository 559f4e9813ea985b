// A device as the layers above use it: memory, streams and copies. One abstract class for all kinds of devices.
//
// cpu and meta are built in. Any other device is a loadable module (device_module.h), so the program starts on machines
// without the device and reports why it can't be used. Layers above add their own tables to a device without changes to
// base: see find().
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

/// Properties of one device of this machine.
struct DeviceProperties {
  std::string name;              ///< the vendor's name
  std::size_t memory_bytes = 0;  ///< 0: not known
  int processors = 0;            ///< multiprocessors, which run blocks of threads at the same time; 0: not known
  int generation = 0;            ///< generation of the architecture, ten times major plus minor; 0 if not applicable
  bool shares_memory = false;    ///< IPC with processes of its host is supported; each process may still refuse it
};

/// The memories between which DeviceRuntime::copy() copies.
enum class CopyDirection : std::uint8_t { host_to_device, device_to_host, device_to_device };

/// What the layers above must know of a kind of device.
struct DeviceTraits {
  bool host_accessible = false;  ///< the host may read and write the device's memory (in the order of its streams)
  bool slow_allocation = false;  ///< pools keep more idle memory, and split large blocks into small ones
  bool shares_memory = false;    ///< get_ipc_handle() and open_ipc_handle() are implemented
};

/// A handle by which another process maps memory of a device. Bytes that may be sent to it; their meaning is the
/// device's.
struct IpcMemoryHandle {
  std::array<std::byte, 128> bytes{};  ///< opaque to all but the device
};

/// An event that the host sets, which lets a stream wait for work of the host.
class TESSERA_API HostEvent {
 public:
  HostEvent() = default;
  virtual ~HostEvent();  ///< sets the event if it is armed
  HostEvent(const HostEvent&) = delete;
  HostEvent& operator=(const HostEvent&) = delete;
  /// Returns a new event; the previous one must have been set. It may outlive this object.
  virtual Event arm() = 0;
  /// Sets the event, unless it is set. Any thread.
  virtual void set() noexcept = 0;
};

/// Work of a stream that was captured once and is replayed as a whole, on the same memory. The device must outlive it.
class TESSERA_API Graph {
 public:
  Graph() = default;
  virtual ~Graph();  ///< launched work must have run
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  /// Appends the graph to `stream`.
  virtual void launch(Stream& stream) = 0;
};

/// One device as used by one rank. Thread-safe, subject to the rules of streams. Throws SystemError if memory is
/// exhausted, and BackendError with the vendor's text for all other errors.
class TESSERA_API DeviceRuntime {
 public:
  virtual ~DeviceRuntime();
  DeviceRuntime(const DeviceRuntime&) = delete;
  DeviceRuntime& operator=(const DeviceRuntime&) = delete;

  Device device() const { return device_; }                         ///< the device that this runtime opened
  const DeviceTraits& traits() const { return traits_; }            ///< constant for the lifetime of the runtime
  bool host_accessible() const { return traits_.host_accessible; }  ///< DeviceTraits::host_accessible
  virtual DeviceProperties properties() const = 0;  ///< queries the device; zeros for values that it doesn't know

  virtual std::unique_ptr<Stream> make_stream() = 0;  ///< a new stream; only events order it after other streams
  /// A stream for copies that must progress while all other streams wait.
  virtual std::unique_ptr<Stream> make_copy_stream() { return make_stream(); }
  /// A stream over a handle that another library of the process has made (as DeviceStream::native()), which must
  /// outlive it and its events. Throws Unsupported if the device has no such handles.
  virtual std::unique_ptr<Stream> borrow_stream(void* native);
  /// Streams of this device that wait for its events wait on the device. In the default implementation the host waits
  /// instead.
  virtual std::unique_ptr<HostEvent> make_signal();

  /// The host waits until no stream of this device waits for a HostEvent any more. To be called before anything that
  /// synchronizes the device or loads code, except by a thread that is to set such an event.
  virtual void wait_for_host_events() {}

  /// Allocates at least `bytes` (0: returns a valid pointer), aligned to kAlignment, uninitialized. Slow; pools use it.
  virtual void* allocate(std::size_t bytes) = 0;
  /// All work that uses the memory must have completed, or be ordered before the device's own free operation.
  virtual void free(void* data, std::size_t bytes) noexcept = 0;

  /// Exports memory to processes of this host. `data` is a complete allocation from allocate(). It may be freed only
  /// after every importer has closed it. Throws Unsupported if this device or system doesn't support it.
  virtual IpcMemoryHandle get_ipc_handle(void* data, std::size_t bytes);
  /// Returns the address at which this device accesses the exported memory, which may be another device's; in the
  /// exporting process that is the memory's own address. Throws Unsupported, with the reason, if the device can't
  /// access it.
  virtual void* open_ipc_handle(const IpcMemoryHandle& handle);
  /// Closes what open_ipc_handle() returned; the rules of free() apply to work in flight.
  virtual void close_ipc_handle(void* imported) noexcept;

  /// Allocates host memory that copies from and to this device can use without making the host wait.
  virtual void* allocate_host(std::size_t bytes) = 0;
  /// Frees memory of allocate_host(), with the size requested there. No copy may still use it.
  virtual void free_host(void* data, std::size_t bytes) noexcept = 0;
  /// Pins existing host memory for such copies, until unpin_host().
  virtual void pin_host(void*, std::size_t) {}
  virtual void unpin_host(void*, std::size_t) noexcept {}  ///< reverses pin_host(); no copy may still use the memory

  /// Appends a copy to `stream`. Host memory not from allocate_host() also works, but may make the host wait.
  virtual void copy(Stream& stream, CopyDirection direction, void* to, const void* from, std::size_t bytes) = 0;
  /// Appends a fill: every byte becomes `value`.
  virtual void fill(Stream& stream, void* data, unsigned char value, std::size_t bytes) = 0;

  /// Until end_capture(), work appended to `stream` is captured instead of run. During a capture the stream must
  /// not use events, and nothing may wait for it. One capture at a time. Throws Unsupported if the device doesn't
  /// support it.
  virtual void begin_capture(Stream& stream);
  /// Returns the captured graph. The stream leaves capture mode even if this throws because something couldn't be
  /// captured.
  virtual std::unique_ptr<Graph> end_capture(Stream& stream);

  /// The host waits for everything on this device.
  virtual void synchronize() = 0;

  /// Shows the calling thread's work up to range_end() as "WHAT UNIT" in the vendor's profiler, if one is attached.
  /// Ranges of a thread nest, and each must be ended.
  virtual void range_begin(std::string_view /*what*/, std::string_view /*unit*/) noexcept {}
  virtual void range_end() noexcept {}  ///< ends the calling thread's innermost range

  /// Returns this device's table for a layer above, by the name that the layer chose; null if it has none. The layer's
  /// header defines the type; find<Table>() looks up Table::kInterface.
  virtual const void* find(std::string_view interface) const noexcept = 0;
  /// The table of type Table, or null if the device has none.
  template <class Table>
  const Table* find() const noexcept {
    return static_cast<const Table*>(find(Table::kInterface));
  }

 protected:
  /// Called by derived classes; both values are constant.
  DeviceRuntime(Device device, DeviceTraits traits) : device_(device), traits_(traits) {}

 private:
  const Device device_;
  const DeviceTraits traits_;
};

/// Throws InvalidUsage with the reason if the device can't be used on this machine. Creates nothing.
TESSERA_API void require_device(Device device);

/// Opens the device. Throws InvalidUsage with the reason if it can't be used on this machine.
TESSERA_API std::shared_ptr<DeviceRuntime> open_device(Device device);

/// A kind of device and whether this machine can use it.
struct DeviceInfo {
  std::string name;                       ///< "cpu", "meta", "cuda"
  bool available = false;                 ///< true if at least one can be used
  std::string reason;                     ///< why it isn't available
  std::vector<DeviceProperties> devices;  ///< the devices found
  std::string libraries = {};             ///< one line: which vendors' libraries compute what; "": nothing to say
};

/// Lists every built-in device and every device with a module. Never throws for a device that can't be used.
TESSERA_API std::vector<DeviceInfo> list_devices();

}  // namespace tessera::base
