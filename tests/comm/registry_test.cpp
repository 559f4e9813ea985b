// The registry, TESSERA_ALGO, and the checks before an operation starts.
#include <fstream>
#include <limits>
#include <thread>

#include "tessera/comm/algorithms.h"
#include "tessera/comm/bootstrap/thread_bootstrap.h"
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

/// Negative counts, and products and sums beyond 2^64, which would pass as small ones.
TEST(ArgumentChecks, RefuseMoreThanMemory) {
  constexpr std::size_t kNegative = SIZE_MAX;  // -1
  run_ranks(2, [](Communicator& comm) {
    std::vector<float> x(64);
    std::vector<float> y(64);
    const auto refuses = [](const std::function<void()>& call, std::string_view text) {
      const std::string error = error_of(call);
      EXPECT_TRUE(error.starts_with("InvalidUsage: ")) << error;
      EXPECT_NE(error.find(text), std::string::npos) << error;
      EXPECT_NE(error.find("more than memory can hold"), std::string::npos) << error;
    };
    const auto in = [&](std::size_t n) { return view_of(x.data(), n); };
    const auto out = [&](std::size_t n) { return view_of(y.data(), n); };
    refuses([&] { comm.all_reduce(in(kNegative), out(kNegative), ReduceOp::sum()); },
            "all_reduce: in has 18446744073709551615 f32");
    refuses([&] { comm.broadcast(in(std::size_t{1} << 62), out(std::size_t{1} << 62), 0); },
            " has 4611686018427387904 f32");
    refuses([&] { comm.send(in(kNegative), 1 - comm.rank()); }, "send: in has ");
    const P2POp receive = P2POp::recv(out(kNegative), 1 - comm.rank());
    refuses([&] { comm.batch(std::span(&receive, 1)); }, "recv: ");
    const View bytes{x.data(), std::size_t{1} << 62, DType::u8, {}};
    refuses(
        [&] {
          comm.all_gather(bytes, {y.data(), 0, DType::u8, {}});
        },
        "all_gather: out needs 4611686018427387904 u8 per rank x 2 ranks");
    refuses([&] { comm.gather(bytes, {y.data(), 0, DType::u8, {}}, 0); }, "gather: out needs ");
    const std::vector<std::size_t> counts = {5, kNegative};  // they add up to 4
    refuses([&] { comm.all_to_all_v(in(4), counts, out(4), counts); },
            "all_to_all: a part of in has 18446744073709551615 f32");
    const std::vector<std::size_t> halves(2, std::size_t{1} << 60);
    refuses([&] { comm.reduce_scatter_v(in(0), out(halves[0]), halves, ReduceOp::sum()); },
            "reduce_scatter: the sum of the counts of in has 2305843009213693952 f32");
    refuses([&] { comm.allocate(kNegative, MemoryKind::host, std::nullopt); }, "allocate: 18446744073709551615 bytes");
    refuses([&] { comm.allocate_symmetric(kNegative, MemoryKind::host, std::nullopt); }, "allocate_symmetric: ");
    // The control: the counts that memory has.
    EXPECT_EQ(error_of([&] { comm.all_reduce(in(64), out(64), ReduceOp::sum()).wait(); }), "");
  });
}

TEST(Launches, ImpossibleOnesAreRefused) {
  const auto error_with = [](int rank, int size) {
    InitOptions config = quick_config();
    config.launch = Launch{.launcher = "test", .rank = rank, .size = size};
    return error_of([&] { init(config); });
  };
  EXPECT_EQ(error_with(0, 0), "InvalidUsage: launch (test): size is 0, needs 1 to 65536");
  EXPECT_EQ(error_with(0, -3), "InvalidUsage: launch (test): size is -3, needs 1 to 65536");
  EXPECT_EQ(error_with(0, 1 << 30), "InvalidUsage: launch (test): size is 1073741824, needs 1 to 65536");
  EXPECT_EQ(error_with(2, 2), "InvalidUsage: launch (test): rank is 2, needs 0 to 1");
  EXPECT_EQ(error_with(-1, 1), "InvalidUsage: launch (test): rank is -1, needs 0 to 0");
  EXPECT_EQ(error_of([] { run_threads(0, quick_config(), [](Communicator&) {}); }),
            "InvalidUsage: launch (threads): size is 0, needs 1 to 65536");
  EXPECT_EQ(error_with(0, 1), "");
}

/// The error of each rank of a world whose ranks have these settings; "" for none.
std::vector<std::string> errors_with(const std::vector<InitOptions>& settings) {
  std::vector<std::string> errors(settings.size());
  const auto bootstraps = make_thread_bootstraps(static_cast<int>(settings.size()), 20s);
  std::vector<std::thread> ranks;
  for (std::size_t r = 0; r < settings.size(); ++r)
    ranks.emplace_back(
        [&, r] { errors[r] = error_of([&] { make_world(bootstraps[r], settings[r])->barrier().wait(); }); });
  for (std::thread& rank : ranks) rank.join();
  return errors;
}

/// As above for three ranks, of which rank 1 has `change`.
std::vector<std::string> errors_with_one(const char* backend, const std::function<void(InitOptions&)>& change) {
  InitOptions config = quick_config();
  config.backend = backend;
  std::vector<InitOptions> settings(3, config);
  change(settings[1]);
  return errors_with(settings);
}

TEST(SharedSettings, DifferenceIsOneErrorOnAllRanks) {
  const auto all = [](const std::string& text) { return std::vector<std::string>(3, "InvalidUsage: init: " + text); };
  const std::string remedy = "; choose the same on all ranks";
  for (const char* backend : {"shm", "tcp"}) {
    EXPECT_EQ(
        errors_with_one(backend, [](InitOptions& one) { one.algorithms = "all_reduce=direct"; }),
        all("TESSERA_ALGO differs between the ranks: it is unset on ranks 0, 2; all_reduce=direct on rank 1" + remedy));
    EXPECT_EQ(errors_with_one(backend, [](InitOptions& one) { one.deterministic = false; }),
              all("TESSERA_DETERMINISTIC differs between the ranks: it is 0 on rank 1; 1 on ranks 0, 2" + remedy));
    EXPECT_EQ(errors_with_one(backend, [](InitOptions& one) { one.check = true; }),
              all("TESSERA_CHECK differs between the ranks: it is 0 on ranks 0, 2; 1 on rank 1" + remedy));
    // The control, with defaults that one rank writes out.
    EXPECT_EQ(errors_with_one(backend,
                              [](InitOptions& one) {
                                one.deterministic = true;
                                one.check = false;
                              }),
              std::vector<std::string>(3));
  }
  EXPECT_EQ(errors_with_one("tcp", [](InitOptions& one) { one.backend = "shm"; }),
            all("TESSERA_BACKEND differs between the ranks: it is shm on rank 1; tcp on ranks 0, 2" + remedy));
  EXPECT_EQ(errors_with_one("auto", [](InitOptions& one) { one.backend = "shm"; }), std::vector<std::string>(3));
  // Ranks have the numbers of their job.
  EXPECT_EQ(errors_with([] {
              std::vector<InitOptions> settings(2, quick_config());
              for (InitOptions& one : settings) one.global_ranks = {4, 7};
              settings[1].check = true;
              return settings;
            }()),
            std::vector<std::string>(2,
                                     "InvalidUsage: init: TESSERA_CHECK differs between the ranks: it is 0 on rank 4; "
                                     "1 on rank 7" +
                                         remedy));
}

TEST(SharedSettings, ErrorOfOneRankIsThatOfAll) {
  for (const std::string& error : errors_with_one("tcp", [](InitOptions& one) { one.backend = "carrier-pigeon"; }))
    EXPECT_TRUE(error.starts_with("InvalidUsage: rank 1: unknown backend 'carrier-pigeon'; known: ")) << error;
  for (const std::string& error : errors_with_one("tcp", [](InitOptions& one) { one.algorithms = "@/no/such"; }))
    EXPECT_TRUE(error.starts_with("InvalidUsage: rank 1: TESSERA_ALGO: can't read the file '/no/such'")) << error;
}

/// What is compared is the text of a table, not the name of its file.
TEST(SharedSettings, FilesAreComparedByContent) {
  const auto file = [](const std::string& name, const std::string& text) {
    std::ofstream(testing::TempDir() + name) << text;
    return "@" + testing::TempDir() + name;
  };
  const std::string table = "all_reduce=ring:0-1K;direct:1K-2K;ring:2K-3K;direct:3K-4K;ring:4K-max";
  const std::string same = file("same_table.txt", "# measured\n" + table + "\n");
  const std::string other = file("other_table.txt", table + ",all_gather=ring\n");
  const auto errors = [&](const std::string& of_rank_1) {
    InitOptions config = quick_config();
    config.backend = "tcp";
    config.deterministic = false;
    config.algorithms = table;
    std::vector<InitOptions> settings(3, config);
    settings[1].algorithms = of_rank_1;
    return errors_with(settings);
  };
  EXPECT_EQ(errors(same), std::vector<std::string>(3));
  // Of long values, the part that differs.
  EXPECT_EQ(errors(other),
            std::vector<std::string>(3,
                                     "InvalidUsage: init: TESSERA_ALGO differs between the ranks: it is "
                                     "...ct:3K-4K;ring:4K-max on ranks 0, 2; ...ct:3K-4K;ring:4K-max,all_gather=ring "
                                     "on rank 1; choose the same on all ranks"));
}

TEST(SharedSettings, RanksOfAValueAreListedShortly) {
  const std::vector<std::string> values = {"a", "b", "a", "a", "a", "", "b"};
  EXPECT_EQ(by_value(values), "unset on rank 5; a on ranks 0, 2-4; b on ranks 1, 6");
  EXPECT_EQ(by_value(std::vector<std::string>{"x\ny", "x"}), "x on rank 1; x\\x0ay on rank 0");
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
            comm.all_reduce(view_of(whole.data(), 4), view_of(whole.data(), 4),
                            ReduceOp{ReduceOp::Kind::premul_sum, factor});
          },
          "all_reduce: premul_sum of i32 needs a number between -2^63 and 2^63, not ");
    says([&] { comm.all_reduce(view_of(whole.data(), 4), view_of(whole.data(), 4), ReduceOp::premul_sum(2.5)); },
         "all_reduce: premul_sum of i32 multiplies by a whole number, not 2.5");
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
