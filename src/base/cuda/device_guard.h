// The device that the vendor's functions use for the calling thread.
#pragma once

namespace tessera::base::cuda {

/// Makes a device current for the calling thread while the guard lives. Then the device before it is current again, if
/// the process has a context there: to choose a device that nothing else uses would create one, half a gigabyte of that
/// device's memory. So a thread that had not chosen a device stays on this one.
///
/// Errors are left to the calls that follow.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  ///< -1: the device was current
};

}  // namespace tessera::base::cuda
