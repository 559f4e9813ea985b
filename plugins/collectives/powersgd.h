// all_reduce of matrices as products of two thin matrices: PowerSGD (Vogels, Karimireddy, Jaggi, arXiv 1905.13727).
//
// M = this rank's gradient + its accumulated error. P = the sum of M Q over ranks, with columns made orthonormal; Q =
// the sum of M^T P, divided as the call says. The result is P Q^T; a rank's share of it is subtracted from M, and the
// rest is the error. The next step begins with Q. This applies where P and Q have fewer elements than the matrix; other
// parameters are sent whole, with P.
//
// P and Q, and so the results, are the same on all ranks whose processors compute alike.
#pragma once

#include <map>

#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/nn_model.h"

namespace tessera::collectives {

class PowerSgd final : public fsdp::CollectivePlugin {
 public:
  /// `feedback` false: the error is dropped, to show that error feedback matters.
  PowerSgd(std::string name, int rank, bool feedback = true);
  ~PowerSgd() override;
  fsdp::CollectiveCapabilities capabilities() const override;
  void prepare(const fsdp::CollectiveSetup& setup) override;
  fsdp::WorkChain run(const fsdp::CollectiveCall& call) override;
  std::vector<State> state() override;
  void clear_state(base::Stream& stream) override;

 private:
  struct PowerSgdState;
  struct InFlight;
  void sum_q(InFlight& flight, base::Stream& stream, fsdp::WorkChain& works);
  void finish(InFlight& flight, base::Stream& stream);

  const std::string name_;
  const int rank_;
  const bool feedback_;
  nn::Context* context_ = nullptr;
  fsdp::LeasePool* buffers_ = nullptr;
  std::map<const fsdp::FlatLayout*, PowerSgdState> plugin_state_;
};

/// The cost of PowerSgd.
fsdp::CollectiveCost powersgd_cost(int rank, const fsdp::CollectiveSize& size);

}  // namespace tessera::collectives
