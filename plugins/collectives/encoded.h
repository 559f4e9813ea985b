// Collectives whose data travels in fewer bytes: as bf16, or as int8 in blocks with a scale each.
//
//   all_gather      each rank encodes its part; all parts, its own too, are decoded, so all ranks have the same bits
//   reduce_scatter  each rank encodes what it has for every rank; an all_to_all; the sum in f32 by rank, rounded once
//   all_reduce      that reduce_scatter, then that all_gather
//
// With error feedback what encoding took off a sum's values is added to those of the next step (Seide et al. 2014).
// Blocks: ZeRO++ (Wang et al., arXiv 2306.10209), its qwZ and, in one hop, its qgZ.
#pragma once

#include <map>

#include "tessera/fsdp/collective.h"

namespace tessera::collectives {

using nn::kernels::Encoding;

struct EncodedOptions {
  comm::OpKind collective = comm::OpKind::all_gather;
  Encoding encoding = Encoding::bf16;
  bool feedback = false;  ///< of reductions
};

class Encoded final : public fsdp::CollectivePlugin {
 public:
  explicit Encoded(const EncodedOptions& options);
  ~Encoded() override;
  fsdp::CollectiveCapabilities capabilities() const override;
  void prepare(const fsdp::CollectiveSetup& setup) override;
  fsdp::Works run(const fsdp::CollectiveCall& call) override;
  std::vector<State> state() override;
  void clear_state(base::Stream& stream) override;

 private:
  struct Errors;
  struct Flight;
  void send_parts(Flight& flight, fsdp::Works& works);
  void gather_part(Flight& flight, fsdp::Works& works);
  void decode_parts(Flight& flight, base::Stream& stream);
  void sum_parts(Flight& flight, base::Stream& stream);

  const EncodedOptions options_;
  nn::Context* context_ = nullptr;
  fsdp::LeasePool* buffers_ = nullptr;
  std::map<std::pair<const fsdp::FlatLayout*, std::size_t>, Errors> errors_;
};

/// What Encoded sends. Data of 16 bits has nothing to gain from bf16 and travels as it is.
fsdp::CollectiveCost encoded_cost(const EncodedOptions& options, const fsdp::CollectiveSize& size);

}  // namespace tessera::collectives
