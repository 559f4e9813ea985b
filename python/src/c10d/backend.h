// torch.distributed's backend "tessera".
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "c10d/communicators.h"
#include "c10d/monitored_barrier.h"
#include "c10d/reduction.h"
#include "c10d/tensors.h"
#include "c10d/torch_version.h"
#include "c10d/work.h"
#include "tessera/comm/communicator.h"

namespace tessera::c10d_backend {

/// One process group: the world, which its ranks make through their store, or a group of some of its ranks. Any thread
/// may call it; calls are issued one after another. Tensors must be dense and, in one call, on one device; those that
/// are not contiguous, and lists whose tensors don't lie one after another, go through temporary ones. Operations on
/// tensors of a device start after what PyTorch's current stream holds; their results are valid on the stream that is
/// current in wait().
class TorchBackend final : public ::c10d::Backend {
 public:
  struct Options final : ::c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout) : ::c10d::Backend::Options("tessera", timeout) {}
#if TESSERA_TORCH >= 214
    c10::intrusive_ptr<::c10d::Backend::Options> clone() const override { return c10::make_intrusive<Options>(*this); }
#endif
  };

  /// Collective over the members. `name`: as the program asked for it.
  TorchBackend(const GroupSettings& settings, std::string name);
  /// A group of some ranks of `parent`, `settings.global_ranks`, which shares its memory, connections and threads.
  /// Collective over them. `group_name` is for errors. The parent may be destroyed first.
  TorchBackend(const TorchBackend& parent, const GroupSettings& settings, const std::string& group_name,
               std::string name);
  ~TorchBackend() override;

  const std::string getBackendName() const override { return name_; }
  bool closed() const {
    const std::lock_guard lock(mutex_);
    return ranks_ == nullptr;
  }
  std::string transport() const;  ///< "shm", "tcp": what TESSERA_BACKEND chose
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override;
  bool supportsCoalescing() const TESSERA_OVERRIDE_SINCE_2_7 { return true; }
  /// init_process_group's device_id: connects the ranks, unless they are connected.
  void eagerConnectSingleDevice(at::Device device) override;
#if TESSERA_TORCH >= 209
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<::c10d::Backend> split(const c10::intrusive_ptr<::c10d::Store>& store,
                                            const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<::c10d::Backend::Options>& options) override;
#endif
  void startCoalescing() override;
  c10::intrusive_ptr<::c10d::Work> endCoalescing() override;
  bool supportsTensorAlloc(c10::DeviceIndex index) TESSERA_OVERRIDE_SINCE_2_7;
  at::Tensor allocateTensor(long count, at::TensorOptions options) TESSERA_OVERRIDE_SINCE_2_7;
  void abort() TESSERA_OVERRIDE_SINCE_2_7;
  void shutdown() TESSERA_OVERRIDE_SINCE_2_7;
  /// Ends the process group at the process's end: as shutdown(), but operations that are still in flight after
  /// `patience` are aborted, so that the process does end.
  void leave(std::chrono::milliseconds patience);

  c10::intrusive_ptr<::c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                             const ::c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                             const ::c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                    const ::c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                       const ::c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                          const ::c10d::ReduceOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                             std::vector<at::Tensor>& inputs,
                                             const ::c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                   const ::c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                       std::vector<at::Tensor>& inputs,
                                                       const ::c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                   std::vector<at::Tensor>& inputs,
                                                                   const ::c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                  std::vector<std::vector<at::Tensor>>& inputs,
                                                  const ::c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                        const ::c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const ::c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const ::c10d::GatherOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                           std::vector<std::vector<at::Tensor>>& inputs,
                                           const ::c10d::ScatterOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                                 std::vector<std::int64_t>& output_splits,
                                                 std::vector<std::int64_t>& input_splits,
                                                 const ::c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                            const ::c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<::c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<::c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<::c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  c10::intrusive_ptr<::c10d::Work> barrier(const ::c10d::BarrierOptions& options) override;
  void monitoredBarrier(const ::c10d::BarrierOptions& options, bool all_ranks) override;

 private:
  /// Issues one operation.
  using Issue = std::function<comm::Work(comm::Communicator& world, comm::OpOptions options)>;
  struct Call {
    ::c10d::OpType type;
    std::chrono::milliseconds timeout;
    std::vector<Issue> issues;
    Holding holding;
    std::vector<at::Tensor> results;
    std::string title;                    ///< of the event in PyTorch's profiler, after the backend's name
    std::vector<at::Tensor> inputs = {};  ///< of the event; empty: `results`
  };
  c10::intrusive_ptr<::c10d::Work> issue(Call call);
  /// `peer`: a rank, or comm::kAnyRank.
  c10::intrusive_ptr<::c10d::Work> receive(std::vector<at::Tensor>& tensors, int peer, int tag, ::c10d::OpType type);
  void remember(const std::shared_ptr<PendingCall>& call);
  /// Of one tensor, which all reductions in place use.
  Issue reduction_in_place(const at::Tensor& tensor, const ::c10d::ReduceOp& op, Holding& holding);
  Issue gathering(const at::Tensor& output, const at::Tensor& input, Holding& holding);
  Issue scattering(const at::Tensor& output, const at::Tensor& input, const ::c10d::ReduceOp& op, Holding& holding);
  Issue gathering_lists(const std::vector<at::Tensor>& outputs, const at::Tensor& input, Holding& holding);
  Communicators& ranks() const;
  std::shared_ptr<Communicators> shared_ranks() const;
  void check_count(std::size_t have, std::size_t want, const char* what) const;

  const std::string name_;
  MonitoredBarrier monitored_barrier_;
  mutable std::mutex mutex_;              ///< guards what follows
  std::shared_ptr<Communicators> ranks_;  ///< null: shut down; groups made from it keep it
  std::chrono::milliseconds timeout_;
  std::uint64_t calls_ = 0;
  bool coalescing_ = false;
  std::vector<std::shared_ptr<PendingCall>> coalesced_;
  std::vector<std::weak_ptr<PendingCall>> in_flight_;  ///< perhaps
  std::vector<at::Tensor> coalesced_results_;
};

}  // namespace tessera::c10d_backend
