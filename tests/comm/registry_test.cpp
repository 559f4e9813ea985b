// The registry, TESSERA_ALGO, and the checks before an operation starts.
#include <fstream>
#include <limits>

#include "tessera/comm/algorithms.h"
#include "tessera/comm/registry.h"
#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

const std::vector<std::string> kKnown = {"all_reduce=direct", "all_reduce=ring", "all_gather=direct"};

TEST(Algorithms, RangesAreHalfOpen) {
  const AlgorithmTable table("all_reduce=direct:0-64K;ring:64K-max,all_gather=direct", kKnown);
  EXPECT_EQ(table.choose(OpKind::all_reduce, 0), "direct");
  EXPECT_EQ(table.choose(OpKind::all_reduce, 65535), "direct");
  EXPECT_EQ(table.choose(OpKind::all_reduce, 65536), "ring");
  EXPECT_EQ(table.choose(OpKind::all_gather, 1u << 30), "direct");
  EXPECT_EQ(table.choose(OpKind::broadcast, 8), "");
}

TEST(Algorithms, RejectsUnknownText) {
  for (const char* text : {"all_reduce=tree", "all_reduc=ring", "all_reduce", "all_reduce=ring:5",
                           "all_reduce=ring:8-4", "all_gather=ring"}) {
    const std::string error = error_of([&] { AlgorithmTable(text, kKnown); });
    EXPECT_TRUE(error.starts_with("InvalidUsage")) << text << ": " << error;
  }
  EXPECT_NE(error_of([] { AlgorithmTable("all_reduce=tree", kKnown); }).find("all_reduce=ring"), std::string::npos);
}

/// shm has no schedules: what is right for another backend is reported as that, and what is wrong for all is not.
TEST(Algorithms, ShmNamesBackendsForThoseOfOthers) {
  const auto error_with = [](const std::string& setting) {
    InitOptions config;
    config.backend = "shm";
    config.algorithms = setting;
    return error_of([&] { run_threads(2, config, [](Communicator&) {}); });
  };
  EXPECT_EQ(error_with("all_reduce=symmetric:0-16K;ring:16K-max"),
            "InvalidUsage: TESSERA_ALGO: 'all_reduce=symmetric:0-16K;ring:16K-max' names an algorithm that exchanges "
            "messages; shm reads the other ranks' memory and has only direct and all_reduce=symmetric: use these or "
            "another backend, such as tcp");
  EXPECT_TRUE(error_with("all_reduce=rung").starts_with("InvalidUsage: TESSERA_ALGO: unknown algorithm"));
  EXPECT_TRUE(error_with("all_reduce=direct:9-4").starts_with("InvalidUsage: TESSERA_ALGO: range '9-4' is empty"));
}

TEST(Algorithms, FileEqualsOneLine) {
  const std::string path = testing::TempDir() + "algorithms_test.txt";
  const auto write = [&](const std::string& text) { std::ofstream(path, std::ios::trunc) << text; };
  write(
      "# measured by hand\nall_reduce = direct:0-64K; ring:64K-max  # two "
      "ranges\n\nall_gather=direct,\r\nall_reduce=ring\n");
  const AlgorithmTable table("@" + path, kKnown);
  EXPECT_EQ(table.choose(OpKind::all_reduce, 8), "direct");
  EXPECT_EQ(table.choose(OpKind::all_reduce, 1 << 20), "ring");
  EXPECT_EQ(table.choose(OpKind::all_gather, 8), "direct");
  const auto error_with = [&](const std::string& text) {
    write(text);
    return error_of([&] { AlgorithmTable("@" + path, kKnown); });
  };
  EXPECT_NE(error_with("all_reduce=tree\n").find("all_reduce=tree"), std::string::npos);
  EXPECT_NE(error_with("# nothing\n").find("names no algorithm"), std::string::npos);
  EXPECT_NE(error_with("").find("can't read the file"), std::string::npos);
  for (const char* wrong : {"@/no/such/file", "@/", "@"}) {
    const std::string error = error_of([&] { AlgorithmTable(wrong, kKnown); });
    EXPECT_TRUE(error.starts_with("InvalidUsage: TESSERA_ALGO: can't read the file '")) << wrong << ": " << error;
  }
}

TEST(Algorithms, ReportsAlgorithmThatRan) {
  const auto ran = [](const std::string& setting, std::size_t count) {
    std::string name;
    InitOptions config;
    config.timeout = std::chrono::seconds(20);
    config.algorithms = setting;
    run_threads(2, config, [&](Communicator& comm) {
      EXPECT_EQ(comm.last_algorithm(), "");
      std::vector<float> data(count);
      const View view = view_of(data.data(), count);
      comm.all_reduce(view, view, ReduceOp::sum()).wait();
      if (comm.rank() == 0) name = comm.last_algorithm();
      comm.barrier().wait();
      EXPECT_EQ(comm.last_algorithm(), "direct");
    });
    return name;
  };
  EXPECT_EQ(ran("", 1), "symmetric");
  EXPECT_EQ(ran("", 1 << 16), "direct");
  EXPECT_EQ(ran("all_reduce=direct", 1), "direct");
}

/// Over shm, symmetric reads payloads from the slots, which hold 16 KiB.
TEST(Algorithms, SymmetricRejectsMoreThanItsWindow) {
  InitOptions config = quick_config();
  config.algorithms = "all_reduce=symmetric";
  run_threads(2, config, [](Communicator& comm) {
    std::vector<float> x(4097, 1);
    const auto sum = [&](std::size_t count) {
      return error_of(
          [&] { comm.all_reduce(view_of(x.data(), count), view_of(x.data(), count), ReduceOp::sum()).wait(); });
    };
    EXPECT_NE(sum(4097).find("algorithm symmetric supports at most 16384 bytes, not 16388"), std::string::npos);
    EXPECT_EQ(sum(4096), "");
  });
}

TEST(Registry, UnknownBackendErrorListsAll) {
  const std::string error = error_of([] { find_backend("carrier-pigeon"); });
  EXPECT_TRUE(error.starts_with("InvalidUsage: unknown backend 'carrier-pigeon'")) << error;
  EXPECT_NE(error.find("shm (available)"), std::string::npos) << error;
  EXPECT_EQ(find_backend("shm").name, "shm");
}

TEST(Registry, VariablesAreUniqueAndSorted) {
  const auto all = variables();
  for (std::size_t i = 1; i < all.size(); ++i) EXPECT_LT(all[i - 1].name, all[i].name);
}

TEST(ArgumentChecks, NameValues) {
  run_ranks(2, [](Communicator& comm) {
    std::vector<float> in(8);
    std::vector<float> out(12);
    const auto says = [](const std::function<void()>& call, std::string_view text) {
      const std::string error = error_of(call);
      EXPECT_TRUE(error.starts_with("InvalidUsage")) << error;
      EXPECT_NE(error.find(text), std::string::npos) << error;
    };
    const auto view = [](std::vector<float>& x, std::size_t n) { return view_of(x.data(), n); };
    says([&] { comm.all_gather(view(in, 4), view(out, 12)); },
         "all_gather: out has 12 elements, needs 8 (4 per rank x 2 ranks)");
    says([&] { comm.reduce_scatter(view(in, 8), view(out, 3), ReduceOp::sum()); },
         "reduce_scatter: in has 8 elements, needs 6");
    says([&] { comm.all_reduce(view(in, 8), view(in, 8 - 1), ReduceOp::sum()); }, "out has 7 elements, needs 8");
    says([&] { comm.all_reduce(view(in, 4), view_of(in.data() + 2, 4), ReduceOp::sum()); }, "in and out overlap");
    says([&] { comm.all_to_all(view(in, 8), view(in, 8)); }, "does not work in place");
    says([&] { comm.all_to_all(view(in, 3), view(out, 3)); }, "a multiple of the 2 ranks");
    says([&] { comm.broadcast(view(in, 4), view(out, 4), 2); }, "root is 2, needs 0 to 1");
    says([&] { comm.send(view(in, 4), comm.rank()); }, "peer is");
    says([&] { comm.all_reduce({nullptr, 4}, view(out, 4), ReduceOp::sum()); }, "in is null with 4 elements");
    says(
        [&] {
          comm.all_reduce({in.data(), 1, DType::f64}, view(out, 1), ReduceOp::sum());
        },
        "in is f64 but out is f32");
    says(
        [&] {
          comm.all_reduce(view(in, 4), view(out, 4), ReduceOp{ReduceOp::Kind::avg, -2});
        },
        "avg divides by a whole number");
    says([&] { comm.all_reduce(view(in, 4), view(out, 4), ReduceOp::bit_or()); },
         "all_reduce: bit_or of f32 is not defined");
    std::array<std::int32_t, 4> whole = {};
    for (const double factor : {1e19, -1e300, std::numeric_limits<double>::quiet_NaN()})
      says(
          [&] {
            comm.all_reduce(view_of(whole.data(), 4), view_of(whole.data(), 4), ReduceOp{ReduceOp::Kind::premul_sum, factor});
          },
          "all_reduce: premul_sum of i32 needs a number between -2^63 and 2^63, not ");
    std::array<bool, 4> flags = {};
    says([&] { comm.all_reduce(view_of(flags.data(), 4), view_of(flags.data(), 4), ReduceOp::avg()); },
         "all_reduce: avg of bool is not defined");
    const std::string error = error_of([&] {
      comm.all_reduce({in.data(), 4, DType::f32, {DeviceType::cuda, 0}}, view(out, 4), ReduceOp::sum());
    });
    EXPECT_TRUE(error.starts_with("Unsupported: all_reduce: backend shm")) << error;
    comm.barrier().wait();  // the communicator is still usable
  });
}

TEST(ArgumentChecks, WorldOfOneWorksLocally) {
  const auto comm = init({.backend = "shm", .launch = Launch{}, .timeout = 5s});
  std::vector<float> in = {1, 2, 3};
  std::vector<float> out(3);
  comm->all_reduce(view_of(in.data(), 3), view_of(out.data(), 3), ReduceOp::average_over(2)).wait();
  EXPECT_EQ(out, (std::vector<float>{0.5f, 1, 1.5f}));
  comm->all_gather(view_of(in.data(), 3), view_of(out.data(), 3)).wait();
  EXPECT_EQ(out, in);
  comm->barrier().wait();
  EXPECT_EQ(comm->split(0, 0)->size(), 1);
  EXPECT_EQ(comm->split(-1, 0), nullptr);
  EXPECT_EQ(comm->traffic().bytes_sent(), 0u);
}

}  // namespace
}  // namespace tessera::comm_test
