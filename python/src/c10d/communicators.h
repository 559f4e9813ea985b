// The communicators of one process group.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "c10d/tensor_device.h"
#include "tessera/comm/communicator.h"

namespace tessera::c10d_backend {

/// How a process group is made.
struct GroupSettings {
  c10::intrusive_ptr<::c10d::Store> store;  ///< of this group
  int rank = 0;
  int size = 0;
  std::chrono::milliseconds timeout{0};
  std::vector<int> global_ranks;      ///< of each member; empty: their own. Of a group: the parent's ranks, ascending
  std::optional<c10::Device> device;  ///< init_process_group's device_id; none, or the host: no device is known yet
};

/// Host memory moves by one communicator. Device memory moves by the same one, staged through host memory or, between
/// ranks of a host, from device to device (IPC); with TESSERA_BACKEND=nccl by another one, beside the first, which is
/// then of backend `auto`. Used by one thread at a time, but groups may be made of it at any time.
class Communicators {
 public:
  /// Collective over the ranks of the world.
  explicit Communicators(const GroupSettings& settings);
  /// Members of `parent` alone; collective over them. Shares the parent's connections and threads.
  Communicators(const std::shared_ptr<Communicators>& parent, const GroupSettings& settings,
                const std::string& group_name);

  /// Throws PyTorch's error if a device's staging could not be set up.
  comm::Communicator& host() const;
  /// Null before the first call with a device.
  const std::shared_ptr<const TensorDevice>& device() const { return device_; }
  /// The communicator of a device's memory. Without a device_id the group's first call decides which one it is, and is
  /// with nccl a collective. Throws PyTorch's errors.
  comm::Communicator& on(const c10::Device& device);
  /// Whether operations of the device are in the order of streams, so that no host waits for them.
  bool device_uses_streams() const { return on_device_ != nullptr; }
  void abort(const std::string& reason) noexcept;

 private:
  void open(const c10::Device& device);
  /// `backend`: null for TESSERA_BACKEND's. `device`: null for host memory only.
  std::unique_ptr<comm::Communicator> make_world(const char* backend, const std::string& prefix,
                                                 std::shared_ptr<base::DeviceRuntime> device) const;

  const std::shared_ptr<Communicators> parent_;  ///< outlives the group's communicators
  const GroupSettings settings_;
  std::mutex mutex_;  ///< guards the next three, which open() may replace while another thread makes a group
  std::shared_ptr<const TensorDevice> device_;
  bool staged_ = false;  ///< `host_` moves the device's memory, too
  std::unique_ptr<comm::Communicator> host_;
  std::unique_ptr<comm::Communicator> on_device_;  ///< null: none yet, or `host_` is staged
};

}  // namespace tessera::c10d_backend
