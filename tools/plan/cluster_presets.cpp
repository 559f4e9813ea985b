#include "tools/plan/cluster_file.h"

namespace tessera::tools {
namespace {

constexpr const char* kAssumed = "assumed; tessera bench measures the machine at hand";
constexpr const char* kTopology = "NCCL, src/graph/topo.h: rates of NVLink by generation";
constexpr const char* kTuning = "NCCL, src/graph/tuning.cc (commit 5067397c): hardware latencies of a ring, Simple";
constexpr const char* kMatmul =
    "github.com/stas00/ml-engineering (commit 744d01e), compute/accelerator: measured matrix products";
constexpr const char* kPcie = "PCI Express base specification, rate of 16 lanes after encoding";
constexpr const char* kA100Sheet = "NVIDIA A100 Tensor Core GPU data sheet, SXM";
constexpr const char* kH100Sheet = "NVIDIA H100 Tensor Core GPU data sheet, SXM";

const std::map<std::string, std::string> kNccl = {
    {"all_reduce", "nccl"}, {"all_gather", "nccl"}, {"reduce_scatter", "nccl"}, {"broadcast", "nccl"}};

/// Efficiencies of a processor, without measurements.
constexpr Efficiencies kProcessor{.product = 0.8, .attention = 0.5, .memory = 0.8};
const Reference kProcessorParts{"compute.efficiencies", "0.8 of the peak in products, 0.5 in attention, 0.8 of memory",
                                kAssumed};

ClusterSpec laptop() {
  constexpr const char* kSheet = "Intel Core i5-8250U product specifications";
  return {
      .name = "laptop",
      .description = "one laptop with 4 cores, a rank on each",
      .hosts = 1,
      .ranks_per_host = 4,
      .intra = {.latency_us = 1, .bytes_per_second = 4.26e9},
      .compute = {.memory_bytes = 4e9,
                  .peak_flops = {{"f32", 51.2e9}},
                  .memory_bytes_per_second = 8.525e9,
                  .kernel_latency_us = 1,
                  .efficiencies = kProcessor},
      .sources = {{"compute.peak_flops", "1.6 GHz x 32 operations (2 fused units of 8 f32 values), one core", kSheet},
                  {"compute.memory_bytes_per_second", "34.1 GB/s over 4 cores", kSheet},
                  {"compute.memory_bytes", "16 GB over 4 ranks", kAssumed},
                  {"compute.kernel_latency_us", "1 us", kAssumed},
                  {"links.intra", "half of a core's memory rate: a copy reads and writes; 1 us", kAssumed},
                  kProcessorParts}};
}

/// One rank per server, on Ethernet with this payload rate.
ClusterSpec servers(const std::string& name, const std::string& speed, LinkSpec inter, const std::string& standard) {
  constexpr const char* kSheet = "AMD EPYC 7302 product specifications";
  return {
      .name = name,
      .description = "servers with 16 cores on " + speed + " Ethernet over TCP, one rank per server",
      .ranks_per_host = 1,
      .intra = {.latency_us = 1, .bytes_per_second = 80e9},
      .inter = inter,
      .compute = {.memory_bytes = 128e9,
                  .peak_flops = {{"f32", 1.536e12}},
                  .memory_bytes_per_second = 204.8e9,
                  .kernel_latency_us = 5,
                  .efficiencies = kProcessor},
      .sources = {{"compute.peak_flops", "16 cores x 3.0 GHz x 32 operations (2 fused units of 8 f32 values)", kSheet},
                  {"compute.memory_bytes_per_second", "204.8 GB/s: 8 channels of DDR4-3200", kSheet},
                  {"compute.memory_bytes", "128 GB", kAssumed},
                  {"compute.kernel_latency_us", "5 us: 16 threads begin and end together", kAssumed},
                  {"links.intra", "80 GB/s, 1 us: not used by one rank per host", kAssumed},
                  {"links.inter.bytes_per_second",
                   speed + " x 1448 / 1538: the data of a frame of 1500 bytes under TCP", standard},
                  {"links.inter.latency_us", "25 us: TCP of the kernel", kAssumed},
                  kProcessorParts}};
}

ComputeSpec a100(double memory_bytes, double memory_bytes_per_second) {
  return {.kind = ComputeSpec::Kind::device,
          .memory_bytes = memory_bytes,
          .peak_flops = {{"bf16", 312e12}, {"f16", 312e12}, {"f32", 19.5e12}},
          .memory_bytes_per_second = memory_bytes_per_second,
          .host_link_bytes_per_second = 31e9,
          .kernel_latency_us = 5,
          .efficiencies = {.product = 0.869, .attention = 0.6, .memory = 0.85}};
}

std::vector<Reference> a100_sources(const std::string& memory) {
  return {{"compute.peak_flops", "312 Tflop/s in bf16 and f16 without sparsity, 19.5 in f32", kA100Sheet},
          {"compute.memory_bytes", memory, kA100Sheet},
          {"compute.memory_bytes_per_second", memory, kA100Sheet},
          {"compute.host_link_bytes_per_second", "31 GB/s: PCIe 4.0 with 16 lanes", kPcie},
          {"compute.kernel_latency_us", "5 us", kAssumed},
          {"compute.efficiencies.product", "271.2 of 312 Tflop/s, the best of a sweep of shapes", kMatmul},
          {"compute.efficiencies.attention", "50 to 73% of the peak", "FlashAttention-2, arXiv 2307.08691"},
          {"compute.efficiencies.memory", "0.85", kAssumed},
          {"links.intra.bytes_per_second", "12 NVLink3 of 20 GB/s (nominal 300 GB/s)", kTopology},
          {"links.intra.latency_us", "3.4 us for a hop over NVLink", kTuning},
          {"links.inter.latency_us", "14 us for a hop over the network", kTuning}};
}

ClusterSpec a100_200g() {
  ClusterSpec cluster{.name = "a100-200g",
                      .description = "hosts with 8 A100 80 GB (NVLink3), InfiniBand HDR 200 Gb/s per GPU",
                      .ranks_per_host = 8,
                      .nics_per_host = 8,
                      .intra = {.latency_us = 3.4, .bytes_per_second = 240e9},
                      .inter = LinkSpec{.latency_us = 14, .bytes_per_second = 24e9},
                      .algorithms = kNccl,
                      .compute = a100(80e9, 2.039e12),
                      .sources = a100_sources("80 GB at 2,039 GB/s")};
  cluster.sources.push_back({"links.inter.bytes_per_second", "24 of nominal 25 GB/s: 96 GB/s over 4 HDR cards",
                             "github.com/NVIDIA/nccl-tests, issue 119"});
  return cluster;
}

ClusterSpec a100_efa() {
  ClusterSpec cluster{.name = "a100-efa",
                      .description = "AWS p4d.24xlarge: 8 A100 40 GB (NVLink3), 4 EFA cards of 100 Gb/s per host",
                      .ranks_per_host = 8,
                      .nics_per_host = 4,
                      .intra = {.latency_us = 3.4, .bytes_per_second = 240e9},
                      .inter = LinkSpec{.latency_us = 14, .bytes_per_second = 12.5e9},
                      .algorithms = kNccl,
                      .compute = a100(40e9, 1.555e12),
                      .sources = a100_sources("40 GB at 1,555 GB/s")};
  cluster.sources.push_back({"links.inter.bytes_per_second",
                             "nominal 12.5 GB/s per card; all_reduce measured 29.6 to 57.2 GB/s per host of nominal 50",
                             "AWS, Amazon EC2 P4 instances; github.com/NVIDIA/nccl, issue 527"});
  return cluster;
}

/// Hosts with 8 H100 and a network card for each.
ClusterSpec h100(const std::string& name, const std::string& network, double card, const Reference& source) {
  ClusterSpec cluster{.name = name,
                      .description = "hosts with 8 H100 80 GB (NVLink4), " + network + " per GPU",
                      .ranks_per_host = 8,
                      .nics_per_host = 8,
                      .intra = {.latency_us = 3.4, .bytes_per_second = 370.8e9},
                      .inter = LinkSpec{.latency_us = 14, .bytes_per_second = card},
                      .algorithms = kNccl};
  cluster.compute = {.kind = ComputeSpec::Kind::device,
                     .memory_bytes = 80e9,
                     .peak_flops = {{"bf16", 989e12}, {"f16", 989e12}, {"f32", 67e12}, {"fp8", 1979e12}},
                     .memory_bytes_per_second = 3.35e12,
                     .host_link_bytes_per_second = 63e9,
                     .kernel_latency_us = 5,
                     .efficiencies = {.product = 0.803, .attention = 0.35, .memory = 0.85}};
  cluster.sources = {
      {"compute.peak_flops", "1979 Tflop/s in fp8 and 989 in bf16 and f16 without sparsity, 67 in f32", kH100Sheet},
      {"compute.memory_bytes", "80 GB", kH100Sheet},
      {"compute.memory_bytes_per_second", "3.35 TB/s", kH100Sheet},
      {"compute.host_link_bytes_per_second", "63 GB/s: PCIe 5.0 with 16 lanes", kPcie},
      {"compute.kernel_latency_us", "5 us", kAssumed},
      {"compute.efficiencies.product", "794.5 of 989 Tflop/s, the best of a sweep of shapes", kMatmul},
      {"compute.efficiencies.attention", "FlashAttention-2 reaches 35% of the peak of an H100",
       "FlashAttention-3, arXiv 2407.08608"},
      {"compute.efficiencies.memory", "0.85", kAssumed},
      {"links.intra.bytes_per_second", "18 NVLink4 of 20.6 GB/s (nominal 450 GB/s)", kTopology},
      {"links.intra.latency_us", "3.4 us for a hop over NVLink", kTuning},
      {"links.inter.latency_us", "14 us for a hop over the network", kTuning},
      source};
  return cluster;
}

}  // namespace

std::vector<ClusterSpec> cluster_presets() {
  return {laptop(),
          servers("cpu-10gbe", "10 Gbit/s", {.latency_us = 25, .bytes_per_second = 1.177e9}, "IEEE 802.3ae"),
          servers("cpu-25gbe", "25 Gbit/s", {.latency_us = 25, .bytes_per_second = 2.942e9}, "IEEE 802.3by"),
          a100_200g(),
          a100_efa(),
          h100("h100-200g", "200 Gb/s", 24e9,
               {"links.inter.bytes_per_second", "24 of nominal 25 GB/s: 96 GB/s over 4 HDR cards of 200 Gb/s",
                "github.com/NVIDIA/nccl-tests, issue 119"}),
          h100("h100-400g", "InfiniBand NDR 400 Gb/s", 47e9,
               {"links.inter.bytes_per_second", "46 to 48 GB/s per NDR card, nominal 50",
                "github.com/NVIDIA/nccl-tests, issue 290"})};
}

}  // namespace tessera::tools
