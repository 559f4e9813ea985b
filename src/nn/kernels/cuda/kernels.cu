// The only file compiled by the device compiler: all kernels, for all element types.
#include "tessera/base/cuda/runtime.h"
#include "tessera/nn/kernels/cuda/kernels.cuh"

namespace tessera::nn::cuda {

NativeStream native_stream(Stream& stream) {
  auto* own = dynamic_cast<DeviceStream*>(&stream);
  if (own == nullptr || stream.device().type != DeviceType::cuda)
    throw InvalidUsage("cuda: stream is on " + name_of(stream.device()) + ", needs a cuda stream");
  own->prepare_launch();
  return static_cast<NativeStream>(own->native());
}

std::unique_ptr<DeviceKernels> make_cuda_kernels(MemoryPool& memory, std::unique_ptr<MatmulTable> products,
                                                 std::unique_ptr<AttentionTable> attention) {
  base::cuda::load_kernels(reinterpret_cast<const void*>(mean_loss_kernel));
  return std::make_unique<CudaDeviceKernels>(memory, std::move(products), std::move(attention));
}

}  // namespace tessera::nn::cuda
