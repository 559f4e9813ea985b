// Collectives that send compressed data: as bf16, or as int8 in blocks with a scale each.
//
//   all_gather      each rank encodes its shard; all shards, its own too, are decoded, so all ranks have the same bits
//   reduce_scatter  each rank encodes its input for every rank; an all_to_all; the sum in f32 by rank, rounded once
//   all_reduce      that reduce_scatter, then that all_gather
//
// Error feedback adds the encoding errors of a reduction's values to those of the next step (Seide et al. 2014).
// Blocks: ZeRO++ (Wang et al., arXiv 2306.10209), its qwZ and, in one hop, its qgZ.
#pragma once

#include <map>

#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/nn_model.h"

namespace tessera::collectives {

using nn::kernels::Compression;

struct CompressionOptions {
  comm::OpKind collective = comm::OpKind::all_gather;
  Compression compression = Compression::bf16;
  bool feedback = false;  ///< error feedback, for reductions
};

class CompressedCollective final : public fsdp::CollectivePlugin {
 public:
  explicit CompressedCollective(const CompressionOptions& options);
  ~CompressedCollective() override;
  fsdp::CollectiveCapabilities capabilities() const override;
  void prepare(const fsdp::CollectiveSetup& setup) override;
  fsdp::WorkChain run(const fsdp::CollectiveCall& call) override;
  std::vector<State> state() override;
  void clear_state(base::Stream& stream) override;

 private:
  struct ErrorFeedback;
  struct InFlight;
  void send_parts(InFlight& flight, fsdp::WorkChain& works);
  void gather_part(InFlight& flight, fsdp::WorkChain& works);
  void decompress_parts(InFlight& flight, base::Stream& stream);
  void sum_parts(InFlight& flight, base::Stream& stream);

  const CompressionOptions options_;
  nn::Context* context_ = nullptr;
  fsdp::LeasePool* buffers_ = nullptr;
  std::map<std::pair<const fsdp::FlatLayout*, std::size_t>, ErrorFeedback> errors_;
};

/// The cost of CompressedCollective. 16-bit data gains nothing from bf16 and is sent unencoded.
fsdp::CollectiveCost compressed_cost(const CompressionOptions& options, const fsdp::CollectiveSize& size);

}  // namespace tessera::collectives
