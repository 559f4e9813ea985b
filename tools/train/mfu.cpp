#include "tools/train/mfu.h"

#include <array>

#include "tessera/base/device_runtime.h"
#include "tools/cli/machine.h"

namespace tessera::tools {
namespace {

/// From the data sheets of NVIDIA, without sparsity: of products in fp8 (0: it has none) and in half precision, and in
/// f32 outside the tensor cores.
struct GpuPeak {
  std::string_view part_of_name;
  double fp8, half, single;
};
/// The first match counts.
constexpr std::array kGpuPeaks = {
    GpuPeak{"H100 PCIe", 1513e12, 756e12, 51e12}, GpuPeak{"H100 NVL", 1671e12, 835e12, 60e12},
    GpuPeak{"H100", 1979e12, 989e12, 67e12},      GpuPeak{"H200 NVL", 1671e12, 835e12, 60e12},
    GpuPeak{"H200", 1979e12, 989e12, 67e12},      GpuPeak{"A100", 0, 312e12, 19.5e12}};

}  // namespace

double model_flops_utilization(const TrainPlan& plan, double tokens_per_second, double peak_flops) {
  const nn::ModelConfig& model = plan.model;
  // The weights of a model with adapters are frozen: no product computes their gradients.
  const std::int64_t frozen = plan.lora ? nn::parameter_count(model) : 0;
  const double per_token = 6.0 * static_cast<double>(plan.parameters) - 2.0 * static_cast<double>(frozen) +
                           12.0 * static_cast<double>(model.layers * model.heads * model.head_dim * plan.seq_len);
  return per_token * tokens_per_second / peak_flops;
}

std::optional<double> peak_flops_of(std::string_view device, std::string_view dtype) {
  for (const GpuPeak& gpu : kGpuPeaks) {
    if (device.find(gpu.part_of_name) == std::string_view::npos) continue;
    const double peak = dtype == "fp8" ? gpu.fp8 : dtype == "f32" ? gpu.single : gpu.half;
    return peak > 0 ? std::optional(peak) : std::nullopt;
  }
  return std::nullopt;
}

std::optional<double> peak_flops_of(const TrainPlan& plan) {
  if (plan.task) return std::nullopt;  // the operations of its step are not known
  if (plan.peak_flops) return plan.peak_flops;
  const base::Device device = device_of_rank(plan.options.device);
  if (device.type != base::DeviceType::cuda) return std::nullopt;
  for (const base::DeviceInfo& kind : base::list_devices())
    if (kind.name == "cuda" && static_cast<std::size_t>(device.index) < kind.devices.size())
      return peak_flops_of(kind.devices[static_cast<std::size_t>(device.index)].name, product_dtype_of(plan));
  return std::nullopt;
}

}  // namespace tessera::tools
