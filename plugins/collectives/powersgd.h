// all_reduce of matrices as products of two thin ones: PowerSGD (Vogels, Karimireddy, Jaggi, arXiv 1905.13727).
//
// M = this rank's gradient + what was lost so far. P = the sum of M Q over ranks, its columns made orthonormal; Q = the
// sum of M^T P, divided as the call says; the result is P Q^T, and a rank's share of it is taken off M: the rest is
// what was lost. Q is where the next step begins. Where both have fewer numbers than the matrix; other parameters
// travel whole, with P.
//
// P and Q are the same on all ranks, so the results are, on ranks whose processors compute alike.
#pragma once

#include <map>
#include <memory>

#include "tessera/fsdp/collective_plugin.h"

namespace tessera::collectives {

class PowerSgd final : public fsdp::CollectivePlugin {
 public:
  /// `feedback` false: what was lost stays lost, which is for showing that it matters.
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

/// What PowerSgd sends.
fsdp::CollectiveCost powersgd_cost(int rank, const fsdp::CollectiveSize& size);

}  // namespace tessera::collectives
