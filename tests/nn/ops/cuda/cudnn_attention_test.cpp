// How the CUDA device passes attention to cuDNN, on a fake of its functions that computes the graphs as described.
#include <gmock/gmock.h>

#include "tessera/nn/attention_library.h"
#include "tessera/nn/kernels/cuda/cudnn_attention.h"
#include "tests/nn/ops/cuda/attention_run.h"
#include "tests/nn/ops/cuda/fake_cudnn.h"
#include "tests/nn/ops/cuda/products_fixture.h"

namespace tessera::nn::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const cuda::Cudnn& open_fake() { return fake_cudnn_api(); }
const cuda::Cudnn& open_nothing() { throw Unsupported("cuda: no cuDNN: libcudnn.so.9: no such file"); }

class CudnnAttentionTest : public ProductsTest {
 protected:
  void SetUp() override {
    ProductsTest::SetUp();
    fake_cudnn() = {};
    device_.described.generation = 90;
  }
  std::unique_ptr<DeviceKernels> make(AttentionLibrary library = AttentionLibrary::automatic,
                                      cuda::OpenCudnn open = open_fake) {
    return cuda::make_cuda_kernels(memory_, cuda::make_products(resources_, fake_cublas_lt_api()),
                                   cuda::make_cudnn_attention(resources_, library, open));
  }
  template <class T>
  std::vector<double> outputs(DeviceKernels& kernels, const AttentionRun& run) {
    return run(*kernels.of<T>(), stream_);
  }
  /// The largest difference from the host's results in double, in rounding units of T.
  template <class T>
  double error(DeviceKernels& kernels, const AttentionRun& run) {
    const std::vector<double> got = outputs<T>(kernels, run),
                              expected = run(*host_.device_kernels().f64_kernels(), host_.stream());
    EXPECT_EQ(got.size(), expected.size());
    double worst = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double difference = std::abs(got[i] - expected[i]) / std::max(1.0, std::abs(expected[i]));
      worst = difference <= worst ? worst : difference;  // also if it is NaN
    }
    return worst / unit<T>();
  }
  /// The run is right and needs no kernel of this library; `calls` of cuDNN.
  template <class T>
  void expect_by_cudnn(const AttentionCase& c) {
    SCOPED_TRACE(std::to_string(c.positions) + " positions, heads of " + std::to_string(c.dim));
    const auto kernels = make();
    const std::size_t launches = kernel_launches();
    fake_cudnn().runs = 0;
    EXPECT_LT(error<T>(*kernels, AttentionRun::of<T>(c)), kUnits);
    EXPECT_EQ(fake_cudnn().runs, 2);
    EXPECT_EQ(fake_cudnn().sums_in_memory, 0);
    EXPECT_EQ(kernel_launches(), launches);
  }
  /// The run is right without cuDNN.
  template <class T>
  void expect_by_own_kernels(DeviceKernels& kernels, const AttentionCase& c) {
    SCOPED_TRACE(std::to_string(c.positions) + " positions, heads of " + std::to_string(c.dim));
    const std::size_t launches = kernel_launches();
    EXPECT_LT(error<T>(kernels, AttentionRun::of<T>(c)), sizeof(T) < 4 ? kUnits : 400);
    EXPECT_EQ(fake_cudnn().runs, 0);
    EXPECT_GT(kernel_launches(), launches);
  }

  static constexpr double kUnits = 12;  // weights and their gradients are rounded before the next product
  static constexpr AttentionCase kCase{
      .batch = 2, .positions = 40, .heads = 2, .kv_heads = 2, .dim = 16, .fused = true};
  Context host_;
};

TEST_F(CudnnAttentionTest, ComputesEveryLayoutAndHeadSize) {
  const AttentionCase cases[] = {kCase,
                                 {.batch = 2, .positions = 67, .heads = 4, .kv_heads = 2, .dim = 24},
                                 {.batch = 1, .positions = 33, .heads = 6, .kv_heads = 1, .dim = 8},
                                 {.batch = 1, .positions = 2, .heads = 1, .kv_heads = 1, .dim = 128, .fused = true},
                                 {.batch = 3, .positions = 20, .heads = 3, .kv_heads = 3, .dim = 40, .scale = 0.3}};
  for (const AttentionCase& c : cases) {
    expect_by_cudnn<bf16>(c);
    expect_by_cudnn<f16>(c);
  }
}

/// What cuDNN can't compute, or computes in another way than this library's bits need.
TEST_F(CudnnAttentionTest, LeavesOtherCallsToThisLibrary) {
  const auto kernels = make();
  const AttentionCase cases[] = {
      {.batch = 1, .positions = 40, .heads = 2, .kv_heads = 1, .dim = 16, .dropout = 0.25},
      {.batch = 1, .positions = 40, .heads = 2, .kv_heads = 1, .dim = 12},
      {.batch = 1, .positions = 40, .heads = 1, .kv_heads = 1, .dim = 136},
      {.batch = 2, .positions = 1, .heads = 2, .kv_heads = 1, .dim = 16},
      {.batch = 1, .positions = 40, .heads = 2, .kv_heads = 1, .dim = 16, .scale = -0.2},
      {.batch = 1, .positions = 40, .heads = 2, .kv_heads = 1, .dim = 16, .causal = false},
      {.batch = 1, .positions = 40, .heads = 2, .kv_heads = 2, .dim = 16, .fused = true, .offset = 1}};
  for (const AttentionCase& c : cases) expect_by_own_kernels<bf16>(*kernels, c);
  expect_by_own_kernels<float>(*kernels, kCase);
}

/// Gradients that are added to others: the forward is cuDNN's, whose statistics this library's backward reads.
TEST_F(CudnnAttentionTest, ItsStatisticsSuitThisLibrarysBackward) {
  const auto kernels = make();
  AttentionCase c = kCase;
  c.accumulate = true;
  EXPECT_LT(error<bf16>(*kernels, AttentionRun::of<bf16>(c)), kUnits);
  EXPECT_EQ(fake_cudnn().runs, 1);
}

TEST_F(CudnnAttentionTest, IsNotUsedWhereItIsMissingTooOldOrUntried) {
  struct Reason {
    cuda::OpenCudnn open;
    std::size_t version;
    int generation;
    std::string line;
  };
  const Reason reasons[] = {
      {open_nothing, 92600, 90, "cuda: attention by this library: cuda: no cuDNN: libcudnn.so.9: no such file"},
      {open_fake, 91702, 90,
       "cuda: attention by this library: cuda: cuDNN is version 9.17.2, needs 9.18.0 or newer of its generation"},
      {open_fake, 92600, 100, ""}};
  for (const Reason& reason : reasons) {
    logged_.clear();
    fake_cudnn().version = reason.version;
    device_.described.generation = reason.generation;
    const auto kernels = make(AttentionLibrary::automatic, reason.open);
    for (int turn = 0; turn < 2; ++turn) expect_by_own_kernels<bf16>(*kernels, kCase);
    EXPECT_EQ(kernels->libraries(), "products by cuBLASLt 130000, attention by this library");
    if (reason.line.empty()) {
      EXPECT_THAT(logged_, IsEmpty());
    } else {
      EXPECT_THAT(logged_, ElementsAre(reason.line));
    }
    const auto demanding = make(AttentionLibrary::cudnn, reason.open);
    for (int turn = 0; turn < 2; ++turn)
      EXPECT_THROW(outputs<bf16>(*demanding, AttentionRun::of<bf16>(kCase)), Unsupported);
  }
}

TEST_F(CudnnAttentionTest, SkipsEnginesThatAreNotDeterministicOrCantPlan) {
  fake_cudnn().engines = {{.index = 1, .is_deterministic = false}, {.index = 5, .can_plan = false}, {.index = 6}};
  EXPECT_LT(error<bf16>(*make(), AttentionRun::of<bf16>(kCase)), kUnits);
  EXPECT_THAT(fake_cudnn().chosen, ElementsAre(6, 6));
}

TEST_F(CudnnAttentionTest, RefusedShapesAreComputedByThisLibrary) {
  const std::string shape = " for a forward of 2 x 40 positions with 2 heads of 16";
  const auto refuse = [&](const std::string& why) {
    logged_.clear();
    const auto kernels = make();
    for (int turn = 0; turn < 2; ++turn) expect_by_own_kernels<bf16>(*kernels, kCase);
    EXPECT_THAT(logged_.at(0), HasSubstr("cuda: attention by this library: cuDNN has " + why + shape));
    EXPECT_EQ(logged_.size(), 2U);  // a line for each direction, once
    const auto demanding = make(AttentionLibrary::cudnn);
    for (int turn = 0; turn < 2; ++turn)
      EXPECT_THROW(outputs<bf16>(*demanding, AttentionRun::of<bf16>(kCase)), Unsupported);
  };
  fake_cudnn().engines = {{.index = 1, .is_deterministic = false}};
  refuse("no deterministic plan");
  fake_cudnn() = {};
  fake_cudnn().rejects_graphs = true;
  refuse("cuda: cudnnBackendFinalize: a fake's error (a fake's reason)");
  fake_cudnn() = {};
  fake_cudnn().workspace = std::int64_t{3} << 30;
  refuse("a plan with a workspace of 3072 MiB");
}

TEST_F(CudnnAttentionTest, AnErrorOfARunIsOneLine) {
  fake_cudnn().fails_to_run = true;
  try {
    outputs<bf16>(*make(), AttentionRun::of<bf16>(kCase));
    FAIL() << "no error";
  } catch (const base::BackendError& error) {
    EXPECT_STREQ(error.what(), "cuda: cudnnBackendExecute: a fake's error (a fake's reason)");
  }
}

/// A captured graph may contain only work: the second call allocates nothing from the device, plans nothing and waits
/// for nothing.
TEST_F(CudnnAttentionTest, PlansOnceForEachShape) {
  MemoryPool pool(std::make_shared<base::MemoryTracker>(), {},
                  std::shared_ptr<DeviceRuntime>(std::shared_ptr<void>(), &device_));
  const KernelResources resources{device_, pool, threads_, resources_.logger};
  auto kernels = cuda::make_cuda_kernels(pool, cuda::make_products(resources, fake_cublas_lt_api()),
                                         cuda::make_cudnn_attention(resources, AttentionLibrary::automatic, open_fake));
  const std::size_t without = device_.used;
  const AttentionRun run = AttentionRun::of<bf16>(kCase);
  const std::vector<double> first = outputs<bf16>(*kernels, run);
  const std::size_t used = device_.used;
  const std::int64_t live = fake_cudnn().live;
  const int waits = device_.host_waits;
  EXPECT_GT(used, without);  // the controls: the first call does all that
  EXPECT_GT(waits, 0);
  EXPECT_TRUE(same_bits(outputs<bf16>(*kernels, run), first));
  EXPECT_EQ(fake_cudnn().opened, 1);
  EXPECT_EQ(fake_cudnn().plans, 2);
  EXPECT_EQ(device_.used, used);
  EXPECT_EQ(device_.host_waits, waits);
  EXPECT_EQ(fake_cudnn().live, live);  // of the library's objects
  EXPECT_THAT(logged_, ElementsAre("cuda: attention by cuDNN 9.26.0 (engine 2)"));

  AttentionCase other = kCase;
  other.fused = false;  // other strides
  outputs<bf16>(*kernels, AttentionRun::of<bf16>(other));
  EXPECT_EQ(fake_cudnn().plans, 4);
  kernels.reset();
  EXPECT_EQ(fake_cudnn().live, 0);
}

TEST_F(CudnnAttentionTest, ItsWorkspaceIsTrackedAndItsScratchIsNotAllocatedTwice) {
  fake_cudnn().workspace = 1 << 20;
  const auto kernels = make();
  KernelTable<bf16>& table = *kernels->bf16_kernels();
  EXPECT_EQ(table.attention_backward_scratch({2, 200, 2, 2, 16, 0.0}), 0U);
  EXPECT_GT(table.attention_backward_scratch({2, 200, 2, 2, 12, 0.0}), 0U);  // for this library's kernels
  outputs<bf16>(*kernels, AttentionRun::of<bf16>(kCase));
  const std::size_t rows = (2 * 2 * 40 * sizeof(float) + 255) / 256 * 256;
  EXPECT_EQ(memory_.memory_tracker().snapshot().peak_of(MemoryCategory::activation), (std::size_t{1} << 20) + rows);
}

/// Evaluation and recomputation give the bits of training: the plan is the same.
TEST_F(CudnnAttentionTest, ForwardWithoutStatisticsHasTheSameBits) {
  const auto kernels = make();
  const AttentionRun run = AttentionRun::of<bf16>(kCase);
  const std::vector<double> all = outputs<bf16>(*kernels, run);
  Array<bf16> in(run.qkv), y = Array<bf16>::poisoned(kCase.queries());
  const kernels::AttentionShape shape{kCase.batch, kCase.positions, kCase.heads, kCase.kv_heads, kCase.dim, 0.0};
  const auto part = [&](std::size_t index) {
    return kernels::fused_qkv_view<const bf16>(in.data(), index, kCase.positions, kCase.heads, kCase.dim);
  };
  kernels->bf16_kernels()->attention_forward(
      stream_,
      {shape, part(0), part(1), part(2), kernels::heads_view<bf16>(y.data(), kCase.positions, kCase.heads, kCase.dim)});
  EXPECT_EQ(fake_cudnn().plans, 2);
  const std::vector<double> got = y.values();
  EXPECT_TRUE(std::equal(got.begin(), got.end(), all.begin()));
}

/// All ranks compare this text before the first backward.
TEST_F(CudnnAttentionTest, IsNamedAmongTheLibrariesOnceItIsUsed) {
  const auto kernels = make();
  EXPECT_EQ(kernels->libraries(), "products by cuBLASLt 130000, attention by this library");
  outputs<bf16>(*kernels, AttentionRun::of<bf16>(kCase));
  EXPECT_EQ(kernels->libraries(), "products by cuBLASLt 130000, attention by cuDNN 9.26.0 (engine 2)");
}

TEST(AttentionLibrary, IsParsed) {
  EXPECT_EQ(parse_attention_library("auto"), AttentionLibrary::automatic);
  EXPECT_EQ(parse_attention_library("cudnn"), AttentionLibrary::cudnn);
  EXPECT_EQ(parse_attention_library("own"), AttentionLibrary::own);
  try {
    parse_attention_library("cuDNN");
    FAIL() << "no error";
  } catch (const InvalidUsage& error) {
    EXPECT_STREQ(error.what(), "TESSERA_ATTENTION is 'cuDNN', needs auto, cudnn or own");
  }
}

/// Negative controls: the fake's results depend on what the graph describes.
class CudnnGraphControl : public CudnnAttentionTest {
 protected:
  /// The largest error of out, of the problem after `change`.
  double forward_error(const std::function<void(cuda::CudnnAttentionProblem&)>& change) {
    const AttentionRun run = AttentionRun::of<bf16>(kCase);
    const std::vector<double> expected = run(*host_.device_kernels().f64_kernels(), host_.stream());
    Array<bf16> in(run.qkv), y = Array<bf16>::poisoned(kCase.queries());
    const std::int64_t width = 2 * 16;
    const cuda::HeadsStrides fused{40 * 3 * width, 3 * width, 16};
    cuda::CudnnAttentionProblem problem{
        .batch = 2, .positions = 40, .heads = 2, .kv_heads = 2, .dim = 16, .scale = 0.25F};
    problem.q = problem.k = problem.v = fused, problem.out = {40 * width, width, 16};
    change(problem);
    cuda::CudnnAttention attention(resources_, AttentionLibrary::cudnn, open_fake);
    attention.run(stream_, problem,
                  {.q = in.data(), .k = in.data() + width, .v = in.data() + 2 * width, .out = y.data()});
    const std::vector<double> got = y.values();
    double worst = 0;
    for (std::size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(got[i] - expected[i]));
    return worst / unit<bf16>();
  }
};

TEST_F(CudnnGraphControl, WrongStridesAndScalesAreDetected) {
  EXPECT_LT(forward_error([](auto&) {}), kUnits);
  EXPECT_GT(forward_error([](auto& p) { std::swap(p.k.position, p.k.head); }), 3 * kUnits);
  EXPECT_GT(forward_error([](auto& p) { p.v.batch = 0; }), 3 * kUnits);
  EXPECT_GT(forward_error([](auto& p) { p.out.head = 0; }), 3 * kUnits);
  EXPECT_GT(forward_error([](auto& p) { p.scale = 0.5F; }), 3 * kUnits);
}

/// In the form of the backward that is not deterministic, a product of dq goes to f32 memory.
TEST_F(CudnnGraphControl, ProductsInMemoryAreDetected) {
  cuda::CudnnGraph graph(fake_cudnn_api());
  const auto layout = cuda::CudnnLayout::packed(1, 1, 4, 4);
  Array<bf16> a(numbers<bf16>("a", 16));
  Array<float> sums = Array<float>::poisoned(16);
  graph.matmul(graph.tensor(1, CUDNN_DATA_BFLOAT16, layout), graph.tensor(1, CUDNN_DATA_BFLOAT16, layout),
               graph.tensor(2, CUDNN_DATA_FLOAT, layout));
  const auto plan = graph.plan({});
  ASSERT_TRUE(plan.has_value());
  const std::int64_t ids[] = {1, 2};
  void* const data[] = {a.data(), sums.data()};
  std::array<std::byte, 256> workspace{};
  cuda::CudnnDescriptor pack(fake_cudnn_api(), CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, std::span<const std::int64_t>(ids));
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, std::span<void* const>(data));
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, static_cast<void*>(workspace.data()));
  pack.finalize();
  EXPECT_EQ(fake_cudnn_api().cudnnBackendExecute(nullptr, plan->descriptor().get(), pack.get()), CUDNN_STATUS_SUCCESS);
  EXPECT_EQ(fake_cudnn().sums_in_memory, 1);
}

}  // namespace
}  // namespace tessera::nn::test
