// Deterministic mode and other operations that use messages and the library's own kernel, never NCCL's reductions.
#include <cmath>
#include <cstring>

#include "backends/nccl/tree_kernels.h"
#include "tessera/comm/kernels/reduce.h"
#include "tests/backends/nccl/support.h"
#include "tests/conformance/reference.h"

namespace tessera::nccl_test {
namespace {

constexpr ReduceOp::Kind kReduces[] = {ReduceOp::Kind::sum,     ReduceOp::Kind::avg,    ReduceOp::Kind::prod,
                                       ReduceOp::Kind::min,     ReduceOp::Kind::max,    ReduceOp::Kind::premul_sum,
                                       ReduceOp::Kind::bit_and, ReduceOp::Kind::bit_or, ReduceOp::Kind::bit_xor};

/// One dtype and op over `ranks` sources: compares the kernel's arithmetic on the host with reduce_tree. The inputs are
/// random bits (of bool 0 and 1), which include subnormals, infinities and NaN.
std::ptrdiff_t first_other_bits(DType dtype, ReduceOp::Kind kind, int ranks) {
  constexpr std::size_t kCount = 3000;
  const std::size_t bytes = kCount * size_of(dtype);
  std::vector<std::byte> slices(bytes * static_cast<std::size_t>(ranks));
  for (std::size_t i = 0; i < slices.size(); ++i)
    slices[i] = static_cast<std::byte>(conformance::scramble(i + 77 * static_cast<std::size_t>(ranks)) %
                                       (dtype == DType::boolean ? 2 : 256));
  std::vector<const void*> sources;
  std::vector<double> factors;
  for (int r = 0; r < ranks; ++r) {
    sources.push_back(slices.data() + static_cast<std::size_t>(r) * bytes);
    factors.push_back(r + 1.3);
  }
  const ReduceOp op{kind, kind == ReduceOp::Kind::avg ? 3.0 : 0.0};
  std::vector<std::byte> want(bytes);
  std::vector<std::byte> have(bytes);
  reduce_tree(op, dtype, sources, factors, want.data(), kCount);
  const int own = ranks / 2;
  const comm::nccl::TreeReduceArgs work{
      op,    dtype,          ranks,       own,   sources[static_cast<std::size_t>(own)], slices.data(),
      bytes, factors.data(), have.data(), kCount};
  with_dtype(dtype, [&](auto zero) {
    for (std::size_t i = 0; i < kCount; ++i) comm::nccl::tree_element<decltype(zero)>(work, i);
  });
  return conformance::first_difference(dtype, have.data(), want.data(), kCount);
}

TEST(NcclOrderedReduce, IsBitwiseEqualToHostTree) {
  for (const DType dtype : kDTypes)
    for (const ReduceOp::Kind kind : kReduces)
      for (const int ranks : {1, 2, 3, 5, 8, 13})
        if (is_defined(kind, dtype)) {
          EXPECT_EQ(first_other_bits(dtype, kind, ranks), -1)
              << name_of(dtype) << " " << name_of(kind) << " of " << ranks;
        }
}

TEST(NcclOrderedReduce, ConvertsEveryF16AndBf16) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const auto h = f16::of_bits(static_cast<std::uint16_t>(bits));
    const auto b = bf16::of_bits(static_cast<std::uint16_t>(bits));
    const float x = SumNumber<f16>::load(h);
    if (std::isnan(x)) continue;
    ASSERT_EQ(x, static_cast<float>(h));
    ASSERT_EQ(SumNumber<f16>::store(x).bits, bits);
    const float y = SumNumber<bf16>::load(b);
    if (std::isnan(y)) continue;
    ASSERT_EQ(SumNumber<bf16>::store(y).bits, bits);
  }
}

BackendOptions deterministic_options() {
  BackendOptions options = quick_options();
  options.deterministic = true;
  return options;
}

/// NCCL's reductions fail, except for the byte of a barrier.
const comm::nccl::NcclApi& without_sums() {
  static const comm::nccl::NcclApi kApi = [] {
    comm::nccl::NcclApi api = fake_api();
    api.ncclAllReduce = [](const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
      if (type != ncclUint8 || count != 1) return ncclInvalidUsage;
      return fake_api().ncclAllReduce(in, out, count, type, op, comm, stream);
    };
    api.ncclReduceScatter = [](const void*, void*, std::size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) {
      return ncclInvalidUsage;
    };
    api.ncclReduce = [](const void*, void*, std::size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, cudaStream_t) {
      return ncclInvalidUsage;
    };
    return api;
  }();
  return kApi;
}

/// all_reduce, reduce and reduce_scatter(_v) of one kind compared with the reference; returns those that differ.
template <class T>
std::string sums(Communicator& comm, ReduceOp::Kind kind, double scalar, bool in_place, int device = -1) {
  const int ranks = comm.size();
  const auto me = static_cast<std::size_t>(comm.rank());
  const auto n = static_cast<std::size_t>(ranks);
  ReduceOp op{kind, kind == ReduceOp::Kind::premul_sum ? conformance::factor(comm.rank()) : scalar};
  std::vector<std::size_t> lengths;
  std::size_t total = 0;
  for (std::size_t r = 0; r < n; ++r) lengths.push_back(in_place ? 37 : 40 * r);
  for (const std::size_t length : lengths) total += length;
  std::vector<conformance::Bytes> inputs;
  for (int r = 0; r < ranks; ++r) inputs.push_back(conformance::make_input(dtype_of<T>, 9, r, total));
  const conformance::Bytes want = conformance::reduce(dtype_of<T>, op, inputs);
  if (device < 0) device = comm.rank();
  OnDevice<T> in(comm, device, total);
  OnDevice<T> out(comm, device, total);
  const auto refill = [&] { std::memcpy(in.data(), inputs[me].data(), inputs[me].size()); };
  const auto differs = [&](const T* have, std::size_t from, std::size_t count) {
    return conformance::first_difference(dtype_of<T>, reinterpret_cast<const std::byte*>(have),
                                         want.data() + from * sizeof(T), count) >= 0;
  };
  refill();
  comm.all_reduce(in.view(), in_place ? in.view() : out.view(), op).wait();
  if (differs(in_place ? in.data() : out.data(), 0, total)) return "all_reduce";
  refill();
  comm.reduce(in.view(), in_place ? in.view() : out.view(), op, ranks - 1).wait();
  if (comm.rank() == ranks - 1 && differs(in_place ? in.data() : out.data(), 0, total)) return "reduce";
  refill();
  std::size_t offset = 0;
  for (std::size_t r = 0; r < me; ++r) offset += lengths[r];
  const View part = in_place ? in.view(offset, lengths[me]) : out.view(0, lengths[me]);
  (in_place ? comm.reduce_scatter(in.view(), part, op) : comm.reduce_scatter_v(in.view(), part, lengths, op)).wait();
  return differs(static_cast<const T*>(part.data), offset, lengths[me]) ? "reduce_scatter" : "";
}

class NcclDeterministic : public testing::TestWithParam<int> {};

TEST_P(NcclDeterministic, SumsFollowTreeForEveryDtype) {
  reset_fake();
  run_ranks(
      GetParam(),
      [](Communicator& comm) {
        EXPECT_TRUE(comm.capabilities().deterministic);
        for (const ReduceOp::Kind kind : kReduces)
          for (const bool in_place : {false, true})
            for (const DType dtype : kDTypes)
              conformance::with_type(dtype, [&](auto zero) {
                if (!is_defined(kind, dtype)) return;
                EXPECT_EQ(sums<decltype(zero)>(comm, kind, 0, in_place), "") << name_of(kind) << " " << name_of(dtype);
              });
        const auto half = comm.split(comm.rank() % 2, 0);
        EXPECT_EQ(sums<float>(*half, ReduceOp::Kind::sum, 0, false, comm.rank()), "");
      },
      deterministic_options(), without_sums());
}
INSTANTIATE_TEST_SUITE_P(Ranks, NcclDeterministic, testing::Values(1, 2, 3, 5));

TEST(NcclOrderedReduce, HandlesOpsThatNcclLacksInAnyMode) {
  reset_fake();
  run_ranks(
      3,
      [](Communicator& comm) {
        using Kind = ReduceOp::Kind;
        EXPECT_EQ(sums<std::int32_t>(comm, Kind::avg, 7, false), "");
        EXPECT_EQ(sums<f16>(comm, Kind::avg, 7, true), "");
        EXPECT_EQ(sums<f16>(comm, Kind::premul_sum, 0, false), "");
        EXPECT_EQ(sums<float>(comm, Kind::min, 0, false), "");
        EXPECT_EQ(sums<double>(comm, Kind::max, 0, true), "");
        EXPECT_EQ(sums<std::int16_t>(comm, Kind::sum, 0, true), "");
        EXPECT_EQ(sums<std::uint32_t>(comm, Kind::bit_xor, 0, false), "");
        EXPECT_EQ(sums<bool>(comm, Kind::bit_xor, 0, false), "");
      },
      quick_options(), without_sums());
}

/// Averages over `comm` of elements that every sum and quotient represents; returns the calls that differ.
template <class T>
std::string averages(Communicator& comm, double divisor) {
  const auto n = static_cast<std::size_t>(comm.size());
  const std::size_t count = 40 * n;
  OnDevice<T> in(comm, comm.rank(), count);
  OnDevice<T> out(comm, comm.rank(), count);
  const auto value = [&](std::size_t i, std::size_t rank) { return static_cast<float>(divisor * (i % 7 + rank)); };
  const auto want = [&](std::size_t i) {
    float sum = 0;
    for (std::size_t r = 0; r < n; ++r) sum += static_cast<float>(i % 7 + r);
    return sum;
  };
  for (std::size_t i = 0; i < count; ++i) in.data()[i] = T(value(i, static_cast<std::size_t>(comm.rank())));
  const auto differs = [&](std::size_t from, std::size_t elements) {
    for (std::size_t i = 0; i < elements; ++i)
      if (static_cast<float>(out.data()[i]) != want(from + i)) return true;
    return false;
  };
  std::string wrong;
  const ReduceOp op{ReduceOp::Kind::avg, divisor};
  comm.all_reduce(in.view(), out.view(), op).wait();
  if (differs(0, count)) wrong += " all_reduce";
  comm.reduce(in.view(), out.view(), op, 1).wait();
  if (comm.rank() == 1 && differs(0, count)) wrong += " reduce";
  comm.reduce_scatter(in.view(), out.view(0, 40), op).wait();
  if (differs(40 * static_cast<std::size_t>(comm.rank()), 40)) wrong += " reduce_scatter";
  return wrong;
}

/// Messages and kernels fail.
comm::nccl::NcclApi without_tree_exchange() {
  comm::nccl::NcclApi api = fake_api();
  api.ncclSend = [](const void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
    return ncclInternalError;
  };
  api.ncclRecv = [](void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclInternalError; };
  return api;
}

TEST(NcclAverages, UseTheReductionsOfNccl) {
  reset_fake();
  const comm::nccl::NcclApi api = without_tree_exchange();
  run_ranks(
      4,
      [](Communicator& comm) {
        EXPECT_EQ(averages<bf16>(comm, 4), "");
        EXPECT_EQ(averages<f16>(comm, 4), "");
        EXPECT_EQ(averages<float>(comm, 4), "");
      },
      quick_options(), api);
}

TEST(NcclAverages, OfBf16AreDividedAfterwardsWhereAFactorIsRounded) {
  reset_fake();
  comm::nccl::NcclApi api = without_tree_exchange();
  api.ncclRedOpCreatePreMulSum = [](ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
    return ncclInternalError;
  };
  run_ranks(
      3,
      [](Communicator& comm) {
        EXPECT_EQ(averages<bf16>(comm, 3), "");
        EXPECT_EQ(averages<bf16>(comm, 6), "") << "not the number of ranks";
      },
      quick_options(), api);
  // The control: a division that does nothing is seen.
  static constexpr comm::nccl::TreeKernels kNothing{
      [] { return cudaSuccess; }, [](const comm::nccl::TreeReduceArgs&, cudaStream_t) { return cudaSuccess; },
      [](double*, double, cudaStream_t) { return cudaSuccess; }};
  api.tree = &kNothing;
  run_ranks(
      3, [](Communicator& comm) { EXPECT_NE(averages<bf16>(comm, 3), ""); }, quick_options(), api);
}

TEST(NcclAverages, OfTheDeterministicModeUseTheTree) {
  reset_fake();
  run_ranks(
      3, [](Communicator& comm) { EXPECT_EQ(averages<bf16>(comm, 3), ""); }, deterministic_options(), without_sums());
}

TEST(NcclOrderedReduce, BuildWithoutKernelsSaysWhatItCannotReduce) {
  reset_fake();
  comm::nccl::NcclApi api = fake_api();
  api.tree = nullptr;
  run_ranks(
      3,
      [](Communicator& comm) {
        using Kind = ReduceOp::Kind;
        for (const Kind kind : {Kind::sum, Kind::prod, Kind::min, Kind::max, Kind::bit_and, Kind::bit_or})
          EXPECT_EQ(sums<bool>(comm, kind, 0, false), "");
        const std::string why = "and this build has no CUDA kernels for it";
        EXPECT_EQ(error_of([&] { sums<std::int16_t>(comm, Kind::sum, 0, false); }),
                  "Unsupported: all_reduce: NCCL has no sum of i16, " + why);
        EXPECT_EQ(error_of([&] { sums<bool>(comm, Kind::bit_xor, 0, false); }),
                  "Unsupported: all_reduce: NCCL has no bit_xor of bool, " + why);
      },
      quick_options(), api);
}

TEST(NcclOrderedReduce, DetectsMissingOrWrongKernel) {
  reset_fake();
  static constexpr comm::nccl::TreeKernels kNothing{
      [] { return cudaSuccess; }, [](const comm::nccl::TreeReduceArgs&, cudaStream_t) { return cudaSuccess; },
      [](double*, double, cudaStream_t) { return cudaSuccess; }};
  comm::nccl::NcclApi api = without_sums();
  api.tree = &kNothing;
  run_ranks(
      2, [](Communicator& comm) { EXPECT_EQ(sums<float>(comm, ReduceOp::Kind::sum, 0, false), "all_reduce"); },
      deterministic_options(), api);
  api.tree = nullptr;
  const std::string error = run_world(
                                2, deterministic_options(), [](Communicator&) {}, api)
                                .front();
  EXPECT_TRUE(error.starts_with("Unsupported: nccl: this build lacks the kernels of deterministic mode")) << error;
}

}  // namespace
}  // namespace tessera::nccl_test
