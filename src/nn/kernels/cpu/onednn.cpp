#include "tessera/nn/kernels/cpu/products.h"

#include "tessera/base/error.h"

#ifdef TESSERA_HAS_ONEDNN
#include <array>
#include <cstdint>
#include <dnnl.hpp>
#include <map>
#include <unordered_map>
#include <vector>

// Of the OpenMP library that oneDNN uses. Its header omp.h belongs to a compiler, and is missing for others.
extern "C" void omp_set_num_threads(int);
#endif

namespace tessera::nn::kernels {

#ifdef TESSERA_HAS_ONEDNN

namespace {

using Memory = dnnl::memory;

/// Whether an instruction set contains another: a newer set has the bits of those that it extends, so a set that only
/// a newer oneDNN knows counts, too.
bool contains(dnnl::cpu_isa isa, dnnl::cpu_isa part) {
  const auto bits = static_cast<unsigned>(part);
  return (static_cast<unsigned>(isa) & bits) == bits;
}

/// The largest of the instruction sets for which oneDNN's kernels are at least twice as wide as those of a generic
/// BLAS; null if it has none.
const char* name_of(dnnl::cpu_isa isa) {
  if (contains(isa, dnnl::cpu_isa::avx512_core_amx)) return "avx512_core_amx";
  if (contains(isa, dnnl::cpu_isa::avx512_core_bf16)) return "avx512_core_bf16";
  if (contains(isa, dnnl::cpu_isa::avx512_core_vnni)) return "avx512_core_vnni";
  return contains(isa, dnnl::cpu_isa::avx512_core) ? "avx512_core" : nullptr;
}

bool multiplies_bf16(dnnl::cpu_isa isa) { return contains(isa, dnnl::cpu_isa::avx512_core_bf16); }

Memory::data_type type_of(base::DType dtype) {
  return dtype == base::DType::bf16 ? Memory::data_type::bf16 : Memory::data_type::f32;
}

/// All properties that a kernel depends on.
using Key = std::array<std::size_t, 11>;
Key key_of(const OnednnProduct& p) {
  return {p.m,
          p.n,
          p.k,
          p.a_row,
          p.a_column,
          p.b_row,
          p.b_column,
          p.c_row,
          p.accumulate ? 1U : 0U,
          p.bias != nullptr ? 1U : 0U,
          static_cast<std::size_t>(p.dtype)};
}

Memory::dim dim(std::size_t value) { return static_cast<Memory::dim>(value); }

/// Kernels of one thread, because oneDNN's kernels must not be used by several threads at once.
class Kernels {
 public:
  Kernels() : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    omp_set_num_threads(1);  // for this thread: the pool has the threads
  }

  void run(const OnednnProduct& p) {
    const Entry& entry = find(p);
    // Memory objects only reference memory; oneDNN writes only the destination.
    const auto at = [&](const Memory::desc& desc, const void* data) {
      return Memory(desc, engine_, const_cast<void*>(data));
    };
    std::unordered_map<int, Memory> arguments = {
        {DNNL_ARG_SRC, at(entry.a, p.a)}, {DNNL_ARG_WEIGHTS, at(entry.b, p.b)}, {DNNL_ARG_DST, at(entry.c, p.c)}};
    if (p.bias != nullptr) arguments.emplace(DNNL_ARG_BIAS, at(entry.bias, p.bias));
    arguments.emplace(DNNL_ARG_SCRATCHPAD, at(entry.scratch, scratch(entry.scratch.get_size())));
    entry.kernel.execute(stream_, arguments);
    stream_.wait();
  }

 private:
  struct Entry {
    Memory::desc a, b, bias, c, scratch;
    dnnl::matmul kernel;
  };

  const Entry& find(const OnednnProduct& p) {
    const Key key = key_of(p);
    const auto found = entries_.find(key);
    if (found != entries_.end()) return found->second;
    constexpr std::size_t kMax = 1024;  // a training run uses a few dozen
    if (entries_.size() == kMax) entries_.clear();
    return entries_.emplace(key, make(p)).first->second;
  }

  Entry make(const OnednnProduct& p) const {
    const Memory::data_type type = type_of(p.dtype);
    Entry entry;
    entry.a = Memory::desc({dim(p.m), dim(p.k)}, type, Memory::dims{dim(p.a_row), dim(p.a_column)});
    entry.b = Memory::desc({dim(p.k), dim(p.n)}, type, Memory::dims{dim(p.b_row), dim(p.b_column)});
    entry.c = Memory::desc({dim(p.m), dim(p.n)}, type, Memory::dims{dim(p.c_row), 1});
    if (p.bias != nullptr) entry.bias = Memory::desc({1, dim(p.n)}, type, Memory::dims{dim(p.n), 1});
    dnnl::primitive_attr attributes;
    attributes.set_fpmath_mode(dnnl::fpmath_mode::strict);
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (p.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0F);
      attributes.set_post_ops(sum);
    }
    const dnnl::matmul::primitive_desc primitive = describe(entry, attributes);
    entry.scratch = primitive.scratchpad_desc();
    entry.kernel = dnnl::matmul(primitive);
    return entry;
  }

  dnnl::matmul::primitive_desc describe(const Entry& entry, const dnnl::primitive_attr& attributes) const {
    const bool has_bias = !entry.bias.is_zero();
#if DNNL_VERSION_MAJOR >= 3
    if (has_bias) return {engine_, entry.a, entry.b, entry.bias, entry.c, attributes};
    return {engine_, entry.a, entry.b, entry.c, attributes};
#else
    const auto description = has_bias ? dnnl::matmul::desc(entry.a, entry.b, entry.bias, entry.c)
                                      : dnnl::matmul::desc(entry.a, entry.b, entry.c);
    return {description, attributes, engine_};
#endif
  }

  /// Reused by all products, because new memory costs a page fault per page. Aligned to a cache line.
  void* scratch(std::size_t bytes) {
    constexpr std::size_t kLine = 64;
    if (scratch_.size() < bytes + kLine) scratch_ = std::vector<std::byte>(bytes + kLine);
    const std::size_t past = reinterpret_cast<std::uintptr_t>(scratch_.data()) % kLine;
    return scratch_.data() + (kLine - past) % kLine;
  }

  dnnl::engine engine_;
  dnnl::stream stream_;
  std::map<Key, Entry> entries_;
  std::vector<std::byte> scratch_;
};

}  // namespace

bool has_onednn_product(base::DType dtype) {
  static const dnnl::cpu_isa isa = dnnl::get_effective_cpu_isa();
  if (dtype == base::DType::f32) return name_of(isa) != nullptr;
  return dtype == base::DType::bf16 && multiplies_bf16(isa);
}

std::string onednn_name() {
  if (!has_onednn_product(base::DType::f32)) return "";
  const dnnl_version_t& version = *dnnl::version();
  return "oneDNN " + std::to_string(version.major) + "." + std::to_string(version.minor) + "." +
         std::to_string(version.patch) + " (" + name_of(dnnl::get_effective_cpu_isa()) + ")";
}

void multiply(const OnednnProduct& product) {
  static thread_local Kernels kernels;
  try {
    kernels.run(product);
  } catch (const dnnl::error& error) {
    throw base::BackendError("matrix product: oneDNN: " + std::string(error.message) + " (" +
                             std::to_string(product.m) + " x " + std::to_string(product.k) + " by " +
                             std::to_string(product.k) + " x " + std::to_string(product.n) +
                             "); set ONEDNN_MAX_CPU_ISA=AVX2 to compute without it");
  }
}

#else

bool has_onednn_product(base::DType) { return false; }
std::string onednn_name() { return ""; }
void multiply(const OnednnProduct&) { throw base::Unsupported("matrix product: built without oneDNN"); }

#endif

}  // namespace tessera::nn::kernels
