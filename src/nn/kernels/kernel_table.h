// Kernel tables of a device: all computations of operations, gradients, optimizers and the engine.
//
// There is one table per element type. Every function appends its work to `stream` and returns; pointers are device
// pointers. Invalid arguments throw InvalidUsage if the host can detect them. Scratch memory comes from the context's
// pool, so functions that need scratch (as documented) must run on the compute stream.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "tessera/base/device_runtime.h"
#include "tessera/base/log.h"
#include "tessera/nn/kernels/activation.h"
#include "tessera/nn/kernels/attention.h"
#include "tessera/nn/kernels/compression.h"
#include "tessera/nn/kernels/cross_entropy.h"
#include "tessera/nn/kernels/dropout.h"
#include "tessera/nn/kernels/elementwise.h"
#include "tessera/nn/kernels/embedding.h"
#include "tessera/nn/kernels/fp8.h"
#include "tessera/nn/kernels/gemm.h"
#include "tessera/nn/kernels/norm.h"
#include "tessera/nn/kernels/opmath.h"
#include "tessera/nn/kernels/optimizer.h"
#include "tessera/nn/kernels/orthonormalize.h"
#include "tessera/nn/kernels/rope.h"
#include "tessera/nn/products.h"
#include "tessera/nn/random.h"
#include "tessera/nn/types.h"

namespace tessera::nn {

using kernels::ConvertArgs;

/// out = mean + deviation * normal; out[0] is element range.begin.
template <class T>
struct NormalFill {
  StreamRange range;            ///< part of a stream
  kernels::OpMath<T> mean = 0,  ///< mean of the values
      deviation = 1;            ///< standard deviation of the values
  T* out = nullptr;             ///< end - begin elements
};

/// out = low + (high - low) * u, u in [0, 1); out[0] is element range.begin.
template <class T>
struct UniformFill {
  StreamRange range;           ///< part of a stream
  kernels::OpMath<T> low = 0,  ///< lower bound
      high = 1;                ///< upper bound
  T* out = nullptr;            ///< end - begin elements
};

/// out[b, c, r] = in[b, r, c]
template <class T>
struct TransposeArgs {
  const T* in = nullptr;  ///< [batch, rows, columns]
  T* out = nullptr;       ///< [batch, columns, rows]; does not overlap `in`
  std::size_t batch = 0,  ///< number of matrices
      rows = 0,           ///< rows of each matrix of `in`
      columns = 0;        ///< columns of each matrix of `in`
};

/// out[i] = the partial result of a norm (kernels::norm_part) of x[i * count, (i + 1) * count).
template <class T>
struct NormParts {
  kernels::Norm norm = kernels::Norm::two;  ///< norm of the partial results
  const T* x = nullptr;                     ///< [slices, count]
  std::size_t count = 0,                    ///< elements of a slice
      slices = 1;                           ///< number of slices
  /// [slices]: zeros, which kernels that split a slice use to combine it, and leave zero. Calls on one stream may share
  /// them.
  std::uint32_t* counters = nullptr;
  double* out = nullptr;  ///< [slices]
};

/// The kernels for elements of type T. The argument structs in kernels/ document the functions.
template <class T>
class KernelTable {
 public:
  virtual ~KernelTable() = default;

  virtual void fill(Stream& stream, T value, T* out, std::size_t count) = 0;    ///< see kernels::fill
  virtual void fill_normal(Stream& stream, const NormalFill<T>& args) = 0;      ///< see NormalFill
  virtual void fill_uniform(Stream& stream, const UniformFill<T>& args) = 0;    ///< see UniformFill
  virtual void assign(Stream& stream, const kernels::AssignArgs<T>& args) = 0;  ///< see kernels::assign
  virtual void add(Stream& stream, const kernels::AddArgs<T>& args) = 0;        ///< see kernels::add
  virtual void scale(Stream& stream, const kernels::ScaleArgs<T>& args) = 0;    ///< see kernels::scale
  virtual void transpose(Stream& stream, const TransposeArgs<T>& args) = 0;     ///< see TransposeArgs
  virtual void norm_parts(Stream& stream, const NormParts<T>& args) = 0;        ///< see NormParts; needs scratch

  /// See kernels::activation_forward.
  virtual void activation_forward(Stream& stream, const kernels::ActivationForward<T>& args) = 0;
  /// See kernels::activation_backward.
  virtual void activation_backward(Stream& stream, kernels::Activation kind, const kernels::ActivationBackward<T>&) = 0;
  virtual void swiglu_forward(Stream& stream,
                              const kernels::SwigluForward<T>& args) = 0;  ///< see kernels::swiglu_forward
  /// See kernels::swiglu_backward.
  virtual void swiglu_backward(Stream& stream, const kernels::SwigluBackward<T>& args) = 0;
  virtual void dropout(Stream& stream, const kernels::DropoutArgs<T>& args) = 0;  ///< see kernels::dropout
  virtual void rope(Stream& stream, const kernels::RopeArgs<T>& args) = 0;        ///< see kernels::rope

  virtual void norm_forward(Stream& stream, const kernels::NormForward<T>& args) = 0;    ///< see NormForward
  virtual void norm_backward(Stream& stream, const kernels::NormBackward<T>& args) = 0;  ///< needs scratch

  /// Ids and targets out of range throw InvalidUsage if the host reads them; otherwise the values that they select are
  /// NaN.
  virtual void embedding_forward(Stream& stream, const kernels::EmbeddingForward<T>& args) = 0;
  virtual void embedding_backward(Stream& stream, const kernels::EmbeddingBackward<T>& args) = 0;    ///< needs scratch
  virtual void cross_entropy_forward(Stream& stream, const kernels::MeanCrossEntropy<T>& args) = 0;  ///< needs scratch
  /// See MeanCrossEntropyBackward.
  virtual void cross_entropy_backward(Stream& stream, const kernels::MeanCrossEntropyBackward<T>& args) = 0;

  virtual void linear_forward(Stream& stream, const kernels::LinearForward<T>& args) = 0;    ///< needs scratch
  virtual void linear_backward(Stream& stream, const kernels::LinearBackward<T>& args) = 0;  ///< needs scratch

  /// Bytes of AttentionForward::scratch and AttentionBackward::scratch.
  virtual std::size_t attention_forward_scratch(const kernels::AttentionShape& shape) const = 0;
  /// Bytes of AttentionBackward::scratch.
  virtual std::size_t attention_backward_scratch(const kernels::AttentionShape& shape) const = 0;
  /// See kernels::attention_forward.
  virtual void attention_forward(Stream& stream, const kernels::AttentionForward<T>& args) = 0;
  /// See kernels::attention_backward.
  virtual void attention_backward(Stream& stream, const kernels::AttentionBackward<T>& args) = 0;

  /// See kernels::sgd_step. The call reads `parts` before it returns, and updates each part with its weight decay.
  virtual void sgd_step(Stream& stream, const kernels::SgdStep<T>& args) = 0;
  /// See kernels::adam_step, and sgd_step() for `parts`.
  virtual void adam_step(Stream& stream, const kernels::AdamStep<T>& args) = 0;

 protected:
  /// Adds, for tables whose norms don't, and returns what is left to do.
  kernels::NormForward<T> add_first(Stream& stream, kernels::NormForward<T> args) {
    if (args.added == nullptr) return args;
    add(stream, {args.x, args.added, args.sum, args.rows * args.width});
    args.x = args.sum;
    args.added = nullptr;
    return args;
  }
};

/// Decodes an nf4.h encoding, aligned to 4 bytes, to its `count` values, computed in f32 and rounded to a floating
/// type.
struct DecodeArgs {
  const void* encoded = nullptr;  ///< nf4_bytes(count) bytes
  std::int64_t count = 0;         ///< values
  void* out = nullptr;            ///< [count]
  DType dtype = DType::f32;       ///< type of `out`
};

/// DeviceKernels::row_multiple() of GPUs: wide loads and the tensor memory accelerator need rows that begin at
/// multiples of 16 bytes; 128 elements are whole cache lines and tiles of a product.
inline constexpr std::int64_t kGpuRowMultiple = 128;

/// All kernels of a device; created for one context and used by its thread.
class TESSERA_API DeviceKernels {
 public:
  virtual ~DeviceKernels();

  /// Null if the device has no kernels for the type.
  virtual KernelTable<float>* f32_kernels() { return nullptr; }
  virtual KernelTable<double>* f64_kernels() { return nullptr; }  ///< the same as f32_kernels(), for f64
  virtual KernelTable<f16>* f16_kernels() { return nullptr; }     ///< the same as f32_kernels(), for f16
  virtual KernelTable<bf16>* bf16_kernels() { return nullptr; }   ///< the same as f32_kernels(), for bf16

  /// Rows of a large matrix that both a product and a kernel over rows read are best padded to a multiple of so many
  /// elements.
  virtual std::int64_t row_multiple() const { return 1; }

  /// Names the libraries that determine the bits of results in this process, such as "products by OpenBLAS 0.3.21
  /// (Zen)";
  /// "": none do. A library that is chosen at its first use is named from then on.
  virtual std::string libraries() const { return {}; }
  /// What multiplies matrices, which all ranks of a job must have alike; empty: the device leaves no choice.
  virtual std::optional<Products> products() const { return {}; }

  /// out[i] = i % period
  virtual void positions(Stream& stream, std::int32_t* out, std::size_t count, std::size_t period) = 0;
  virtual void clip_factor(Stream& stream, const ClipArgs& args) = 0;            ///< see ClipArgs
  virtual void convert(Stream& stream, const ConvertArgs& args) = 0;             ///< see kernels::ConvertArgs
  virtual void compress(Stream& stream, const kernels::CompressArgs& args) = 0;  ///< see kernels::compress
  virtual void sum_compressed(Stream& stream,
                              const kernels::SumCompressedArgs& args) = 0;  ///< see kernels::sum_compressed
  virtual void decode_nf4(Stream& stream, const DecodeArgs& args) = 0;      ///< see DecodeArgs
  /// Why the device can't multiply 8-bit floating-point numbers, and what to do; "": it can.
  virtual std::string fp8_reason() const { return ""; }
  virtual void fp8_quantize(Stream& stream, const kernels::Fp8QuantizeArgs& args) = 0;  ///< needs scratch
  virtual void fp8_product(Stream& stream, const kernels::Fp8ProductArgs& args) = 0;    ///< see Fp8ProductArgs
  /// See kernels::orthonormalize.
  virtual void orthonormalize(Stream& stream, const kernels::OrthonormalizeArgs& args) = 0;

  /// The table of type T; null if the device has none.
  template <class T>
  KernelTable<T>* of() {
    if constexpr (std::is_same_v<T, float>) return f32_kernels();
    if constexpr (std::is_same_v<T, double>) return f64_kernels();
    if constexpr (std::is_same_v<T, f16>) return f16_kernels();
    if constexpr (std::is_same_v<T, bf16>) return bf16_kernels();
  }
};

/// The device whose scratch memory the kernels of a device without data allocate.
enum class PlannedKernels : std::uint8_t {
  host,              ///< this host's
  gpu,               ///< those of a CUDA GPU, with attention by cuDNN where it can be; to a few MB
  gpu_without_cudnn  ///< those of a CUDA GPU, with this library's attention; to a few MB
};

/// Resources that kernels use; they must outlive the kernels.
struct KernelResources {
  DeviceRuntime& runtime;                          ///< runtime of the device
  MemoryPool& memory;                              ///< memory pool of the device, for scratch
  ThreadPool& threads;                             ///< thread pool of kernels on the host
  std::shared_ptr<base::Logger> logger = nullptr;  ///< null: no logging
  PlannedKernels planned = PlannedKernels::host;   ///< kernels that the device without data stands for
  Products products = Products::library;           ///< matrix products on the host
};

/// Interface that DeviceRuntime::find() returns for nn.
struct KernelFactory {
  static constexpr std::string_view kInterface = "nn.kernels";  ///< the name for find()
  /// Creates the kernels of one context.
  std::unique_ptr<DeviceKernels> (*make)(const KernelResources& resources) = nullptr;
};

/// The kernels of the resources' device. Throws Unsupported if it has none.
TESSERA_API std::unique_ptr<DeviceKernels> make_kernels(const KernelResources& resources);

/// The host's kernels on any device, for devices that share memory with the host.
TESSERA_API std::unique_ptr<DeviceKernels> make_host_kernels(const KernelResources& resources);

}  // namespace tessera::nn
