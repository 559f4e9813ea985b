// Every operation on every dtype and reduce op becomes the right NCCL calls: results equal the serial reference.
#include <array>
#include <future>
#include <numeric>
#include <semaphore>
#include <vector>

#include "tests/backends/nccl/support.h"
#include "tests/conformance/reference.h"

namespace tessera::nccl_test {
namespace {

using conformance::Bytes;

constexpr ReduceOp::Kind kReduces[] = {ReduceOp::Kind::sum,     ReduceOp::Kind::avg,    ReduceOp::Kind::prod,
                                       ReduceOp::Kind::min,     ReduceOp::Kind::max,    ReduceOp::Kind::premul_sum,
                                       ReduceOp::Kind::bit_and, ReduceOp::Kind::bit_or, ReduceOp::Kind::bit_xor};

/// Lengths of the ranks' parts: all equal to `count`, or different with one of them 0.
std::vector<std::size_t> part_lengths(int ranks, std::size_t count, bool ragged) {
  std::vector<std::size_t> lengths(static_cast<std::size_t>(ranks), count);
  for (std::size_t r = 0; ragged && r < lengths.size(); ++r) lengths[r] = r * 7 % (count + 3);
  return lengths;
}

/// The buffers of an operation, in place or not.
class Buffers {
 public:
  Buffers(Communicator& comm, DType dtype) : comm_(comm), dtype_(dtype) {}
  View make(std::size_t count) {
    memory_.push_back(comm_.allocate(count * size_of(dtype_), MemoryKind::device, {}));
    return {memory_.back().data(), count, dtype_, {DeviceType::cuda, comm_.rank()}};
  }
  View filled(const Bytes& bytes) {
    const View view = make(bytes.size() / size_of(dtype_));
    std::copy(bytes.begin(), bytes.end(), static_cast<std::byte*>(view.data));
    return view;
  }
  static View part(const View& whole, std::size_t offset, std::size_t count) {
    return {static_cast<std::byte*>(whole.data) + offset * size_of(whole.dtype), count, whole.dtype, whole.device};
  }

 private:
  Communicator& comm_;
  const DType dtype_;
  std::vector<Buffer> memory_;
};

struct Setting {
  DType dtype;
  ReduceOp::Kind reduce;
  std::size_t count;
  bool in_place;
  bool ragged;
};

/// All operations of one configuration on one rank, each compared with the reference.
class Case {
 public:
  Case(Communicator& comm, const Setting& s)
      : comm_(comm),
        s_(s),
        n_(static_cast<std::size_t>(comm.size())),
        me_(static_cast<std::size_t>(comm.rank())),
        lengths_(part_lengths(comm.size(), s.count, s.ragged)),
        buffers_(comm, s.dtype) {
    total_ = std::accumulate(lengths_.begin(), lengths_.end(), std::size_t{0});
    for (std::size_t r = 0; r < n_; ++r) {
      offsets_.push_back(r == 0 ? 0 : offsets_[r - 1] + lengths_[r - 1]);
      wholes_.push_back(conformance::make_input(s.dtype, 5, static_cast<int>(r), total_));
      parts_.push_back(conformance::make_input(s.dtype, 6, static_cast<int>(r), lengths_[r]));
      joined_.insert(joined_.end(), parts_[r].begin(), parts_[r].end());
    }
    op_ = {s.reduce, s.reduce == ReduceOp::Kind::premul_sum ? conformance::factor(comm.rank()) : 0};
    sum_ = conformance::reduce(s.dtype, op_, wholes_);
    if (s.reduce == ReduceOp::Kind::avg && s.dtype == DType::bf16)  // an exact factor, or divided afterwards
      sum_ = conformance::reduce(s.dtype, {s.reduce, double(n_)}, {conformance::reduce(s.dtype, {}, wholes_)});
  }

  /// Returns the operations whose result differs.
  std::vector<std::string> run() {
    const int root = comm_.size() - 1;
    const bool at_root = comm_.rank() == root;
    all_reduce_and_reduce(root, at_root);
    const View whole = buffers_.filled(wholes_[me_]);
    const View part = s_.in_place ? Buffers::part(whole, offsets_[me_], lengths_[me_]) : buffers_.make(lengths_[me_]);
    (s_.ragged ? comm_.reduce_scatter_v(whole, part, lengths_, op_) : comm_.reduce_scatter(whole, part, op_)).wait();
    expect("reduce_scatter", part, slice(sum_, offsets_[me_], lengths_[me_]));
    gathers(root, at_root);
    const View given = buffers_.filled(wholes_[static_cast<std::size_t>(root)]);
    const View taken =
        s_.in_place && at_root ? Buffers::part(given, offsets_[me_], lengths_[me_]) : buffers_.make(lengths_[me_]);
    (s_.ragged ? comm_.scatter_v(given, taken, lengths_, root) : comm_.scatter(given, taken, root)).wait();
    expect("scatter", taken, slice(wholes_[static_cast<std::size_t>(root)], offsets_[me_], lengths_[me_]));
    const View shared = buffers_.filled(wholes_[me_]);
    const View copy = s_.in_place ? shared : buffers_.make(total_);
    comm_.broadcast(shared, copy, root).wait();
    expect("broadcast", copy, wholes_[static_cast<std::size_t>(root)]);
    all_to_all();
    return wrong_;
  }

 private:
  void all_reduce_and_reduce(int root, bool at_root) {
    View in = buffers_.filled(wholes_[me_]);
    View out = s_.in_place ? in : buffers_.make(total_);
    comm_.all_reduce(in, out, op_).wait();
    expect("all_reduce", out, sum_);
    in = buffers_.filled(wholes_[me_]);
    out = s_.in_place ? in : buffers_.make(total_);
    comm_.reduce(in, at_root ? out : View{}, op_, root).wait();
    if (at_root) expect("reduce", out, sum_);
    if (!s_.in_place) expect("the input of reduce", in, wholes_[me_]);
  }

  void gathers(int root, bool at_root) {
    for (const bool all : {true, false}) {
      const View whole = buffers_.make(total_);
      View part = buffers_.filled(parts_[me_]);
      if (s_.in_place && (all || at_root)) {
        part = Buffers::part(whole, offsets_[me_], lengths_[me_]);
        std::copy(parts_[me_].begin(), parts_[me_].end(), static_cast<std::byte*>(part.data));
      }
      if (all)
        (s_.ragged ? comm_.all_gather_v(part, whole, lengths_) : comm_.all_gather(part, whole)).wait();
      else
        (s_.ragged ? comm_.gather_v(part, whole, lengths_, root) : comm_.gather(part, whole, root)).wait();
      if (all || at_root) expect(all ? "all_gather" : "gather", whole, joined_);
    }
  }

  /// Rank a sends rank b lengths[b] + a elements if parts are ragged, else `count`.
  void all_to_all() {
    std::vector<std::size_t> to(n_, s_.count);
    std::vector<std::size_t> from(n_, s_.count);
    for (std::size_t r = 0; s_.ragged && r < n_; ++r) {
      to[r] = lengths_[r] + me_;
      from[r] = lengths_[me_] + r;
    }
    const auto message = [&](std::size_t a, std::size_t b, std::size_t count) {
      return conformance::make_input(s_.dtype, 100 + a * n_ + b, 0, count);
    };
    Bytes sent;
    Bytes wanted;
    for (std::size_t r = 0; r < n_; ++r) {
      const Bytes out = message(me_, r, to[r]);
      const Bytes in = message(r, me_, from[r]);
      sent.insert(sent.end(), out.begin(), out.end());
      wanted.insert(wanted.end(), in.begin(), in.end());
    }
    const View in = buffers_.filled(sent);
    const View out = buffers_.make(wanted.size() / size_of(s_.dtype));
    (s_.ragged ? comm_.all_to_all_v(in, to, out, from) : comm_.all_to_all(in, out)).wait();
    expect("all_to_all", out, wanted);
  }

  Bytes slice(const Bytes& whole, std::size_t offset, std::size_t count) const {
    const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(offset * size_of(s_.dtype));
    return {begin, begin + static_cast<std::ptrdiff_t>(count * size_of(s_.dtype))};
  }
  void expect(const char* what, const View& have, const Bytes& want) {
    const auto* data = static_cast<const std::byte*>(have.data);
    if (have.bytes() == want.size() && conformance::first_difference(s_.dtype, data, want.data(), have.count) < 0)
      return;
    wrong_.push_back(std::string(what) + " " + std::string(name_of(s_.dtype)) + " " + std::string(name_of(s_.reduce)) +
                     " count " + std::to_string(s_.count) + " rank " + std::to_string(me_) + " of " +
                     std::to_string(n_) + (s_.in_place ? " in place" : "") + (s_.ragged ? " ragged" : ""));
  }

  Communicator& comm_;
  const Setting s_;
  const std::size_t n_;
  const std::size_t me_;
  const std::vector<std::size_t> lengths_;
  std::vector<std::size_t> offsets_;
  std::size_t total_ = 0;
  std::vector<Bytes> wholes_;
  std::vector<Bytes> parts_;
  Bytes joined_;
  Bytes sum_;
  ReduceOp op_;
  Buffers buffers_;
  std::vector<std::string> wrong_;
};

class NcclOperations : public testing::TestWithParam<int> {};

TEST_P(NcclOperations, EqualReference) {
  reset_fake();
  run_ranks(GetParam(), [](Communicator& comm) {
    int seed = 0;
    for (const DType dtype : kDTypes)
      for (const ReduceOp::Kind reduce : kReduces)
        for (const std::size_t count : {0u, 1u, 37u}) {
          ++seed;
          if (!is_defined(reduce, dtype)) continue;
          const Setting setting{dtype, reduce, count, seed % 2 == 0, seed / 2 % 2 == 0};
          EXPECT_EQ(Case(comm, setting).run(), std::vector<std::string>{});
        }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclOperations, testing::Values(1, 2, 3, 5));

TEST(NcclOperations, DetectsWrongCall) {
  static const comm::nccl::NcclApi wrong = [] {
    comm::nccl::NcclApi api = fake_api();
    api.ncclReduceScatter = [](const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t,
                               ncclComm_t comm, cudaStream_t stream) {
      return fake_api().ncclReduceScatter(in, out, count, type, ncclMax, comm, stream);
    };
    api.ncclSend = [](const void* data, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
      return fake_api().ncclSend(static_cast<const char*>(data) + 4, count, type, peer, comm, stream);
    };
    return api;
  }();
  reset_fake();
  run_ranks(
      3,
      [](Communicator& comm) {
        const std::string me = " f32 sum count 5 rank " + std::to_string(comm.rank()) + " of 3";
        std::vector<std::string> seen = {"reduce_scatter" + me, "scatter" + me, "all_to_all" + me};
        if (comm.rank() == 2) seen = {"reduce_scatter" + me, "gather" + me, "all_to_all" + me};
        EXPECT_EQ(Case(comm, {DType::f32, ReduceOp::Kind::sum, 5, false, false}).run(), seen);
      },
      quick_options(), wrong);
}

TEST(NcclOperations, SupportFactorPerRank) {
  reset_fake();
  run_ranks(2, [](Communicator& comm) {
    OnDevice<float> x(comm, comm.rank(), 8, 1);
    comm.all_reduce(x.view(), x.view(), ReduceOp::premul_sum(comm.rank() + 1)).wait();
    EXPECT_EQ(x.values(), std::vector<float>(8, 3));
  });
}

TEST(NcclOperations, AverageOverOtherCountThanRanks) {
  reset_fake();
  run_ranks(2, [](Communicator& comm) {
    const int device = comm.rank();
    for (const auto& [over, want] : {std::pair(8, 1.5F), std::pair(1, 12.0F), std::pair(2, 6.0F)}) {
      OnDevice<float> x(comm, device, 4, 6);
      comm.all_reduce(x.view(), x.view(), ReduceOp::average_over(over)).wait();
      EXPECT_EQ(x.values(), std::vector<float>(4, want)) << over;
      OnDevice<bf16> y(comm, device, 4, bf16(6));
      comm.reduce_scatter(y.view(), y.view(2 * static_cast<std::size_t>(device), 2), ReduceOp::average_over(over))
          .wait();
      EXPECT_EQ(static_cast<float>(y.values()[2 * static_cast<std::size_t>(device)]), want);
    }
    OnDevice<std::int32_t> n(comm, device, 4, 7);
    comm.all_reduce(n.view(), n.view(), ReduceOp::average_over(8)).wait();
    EXPECT_EQ(n.values(), std::vector<std::int32_t>(4, 1));
    std::fill_n(n.data(), 4, 7);
    comm.all_reduce(n.view(), n.view(), ReduceOp::avg()).wait();  // the communicator is still usable
    EXPECT_EQ(n.values(), std::vector<std::int32_t>(4, 7));
  });
}

TEST(NcclOperations, SupportMessagesAndBatches) {
  reset_fake();
  run_ranks(3, [](Communicator& comm) {
    const int r = comm.rank();
    OnDevice<float> mine(comm, r, 5, static_cast<float>(r));
    OnDevice<float> left(comm, r, 5, -1);
    OnDevice<float> right(comm, r, 5, -1);
    const int next = (r + 1) % 3;
    const int previous = (r + 2) % 3;
    const P2POp parts[] = {P2POp::send(mine.view(), next),     P2POp::send(mine.view(), previous),
                           P2POp::recv(left.view(), previous), P2POp::recv(right.view(), next),
                           P2POp::send(mine.view(0, 0), next), P2POp::recv(left.view(0, 0), previous)};
    comm.batch(parts).wait();
    EXPECT_EQ(left.values(), std::vector<float>(5, static_cast<float>(previous)));
    EXPECT_EQ(right.values(), std::vector<float>(5, static_cast<float>(next)));
    comm.batch({}).wait();
    if (r == 0) comm.send(mine.view(), 2).wait();
    if (r == 2) comm.recv(left.view(), 0).wait();
    if (r == 2) {
      EXPECT_EQ(left.values(), std::vector<float>(5, 0));
    }
    comm.barrier().wait();
  });
}

TEST(NcclOperations, MayBeAwaitedInAnyOrder) {
  reset_fake();
  run_ranks(3, [](Communicator& comm) {
    std::vector<OnDevice<std::int64_t>> x;
    for (std::size_t i = 0; i < 6; ++i)
      x.emplace_back(comm, comm.rank(), 100, comm.rank() + static_cast<std::int64_t>(i));
    std::vector<Work> works;
    for (auto& one : x) works.push_back(comm.all_reduce(one.view(), one.view(), ReduceOp::sum()));
    for (std::size_t i = 6; i-- > 0;) works[i].wait();
    for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(x[i].values()[99], 3 + 3 * static_cast<std::int64_t>(i));
  });
}

TEST(NcclOperations, MayBeAwaitedInAnotherThread) {
  reset_fake();
  run_ranks(3, [](Communicator& comm) {
    constexpr std::size_t kCalls = 100;
    std::vector<OnDevice<float>> x;
    for (std::size_t i = 0; i < kCalls; ++i) x.emplace_back(comm, comm.rank(), 100, static_cast<float>(i));
    std::vector<Work> works(kCalls);
    std::counting_semaphore<2 * kCalls> issued(0);
    const std::future<void> waiter = std::async(std::launch::async, [&] {
      for (std::size_t i = 0; i < kCalls; ++i) {
        issued.acquire();
        EXPECT_EQ(error_of([&] { works[i].wait(); }), "");
        EXPECT_EQ(x[i].values(), std::vector<float>(100, static_cast<float>(3 * i)));
      }
    });
    const std::string error = error_of([&] {
      for (std::size_t i = 0; i < kCalls; ++i) {
        works[i] = comm.all_reduce(x[i].view(), x[i].view(), ReduceOp::sum());
        issued.release();
      }
    });
    if (!error.empty()) issued.release(kCalls);  // the waiter must not wait for calls that were not made
    waiter.wait();
    EXPECT_EQ(error, "");
  });
}

TEST(NcclOperations, SplitOrdersByKeyAndSharesMemory) {
  reset_fake();
  run_ranks(5, [](Communicator& world) {
    OnDevice<float> x(world, world.rank(), 3, static_cast<float>(world.rank()));
    const auto none = world.split(world.rank() == 4 ? -1 : 0, 0);
    EXPECT_EQ(none == nullptr, world.rank() == 4);
    const auto half = world.split(world.rank() % 2, -world.rank());
    const int size = world.rank() % 2 == 0 ? 3 : 2;
    ASSERT_EQ(half->size(), size);
    EXPECT_EQ(half->rank(), size - 1 - world.rank() / 2);
    half->all_reduce(x.view(), x.view(), ReduceOp::sum()).wait();
    EXPECT_EQ(x.values()[0], world.rank() % 2 == 0 ? 6 : 4);
    half->broadcast(x.view(), x.view(), 0).wait();
    const auto pair = half->split(half->rank() / 2, 0);
    pair->barrier().wait();
  });
}

/// Rank 2 makes no group; the other two do so twice.
TEST(NcclOperations, MembersCreateGroupsWithoutTheOthers) {
  reset_fake();
  run_ranks(3, [](Communicator& world) {
    OnDevice<float> x(world, world.rank(), 3, static_cast<float>(world.rank()));
    if (world.rank() < 2) {
      const std::vector<std::unique_ptr<Communicator>> groups = [&] {
        std::vector<std::unique_ptr<Communicator>> made;
        for (int i = 0; i < 2; ++i) made.push_back(world.create_group(std::array{1, 0}, {.tag = 7}));
        return made;
      }();
      EXPECT_EQ(groups[0]->rank(), 1 - world.rank());
      for (const auto& group : groups) group->all_reduce(x.view(), x.view(), ReduceOp::sum()).wait();
      EXPECT_EQ(x.values()[0], 2);
      groups[0]->broadcast(x.view(), x.view(), 0).wait();
      const auto alone = groups[1]->create_group(std::vector{groups[1]->rank()});
      alone->barrier().wait();
    }
    world.all_reduce(x.view(), x.view(), ReduceOp::max()).wait();
  });
}

TEST(NcclOperations, TrafficEqualsFormulas) {
  reset_fake();
  run_ranks(3, [](Communicator& comm) {
    const int r = comm.rank();
    OnDevice<float> whole(comm, r, 30, 1);
    OnDevice<float> part(comm, r, 10, 1);
    comm.all_reduce(whole.view(), whole.view(), ReduceOp::sum()).wait();
    comm.all_gather(part.view(), whole.view()).wait();
    comm.reduce_scatter(whole.view(), part.view(), ReduceOp::sum()).wait();
    comm.broadcast(whole.view(), whole.view(), 1).wait();
    comm.scatter(whole.view(), part.view(), 2).wait();
    comm.gather(part.view(), whole.view(), 2).wait();
    if (r == 0) comm.send(part.view(), 1).wait();
    if (r == 1) comm.recv(part.view(), 0).wait();
    const TrafficStats traffic = comm.traffic();
    const auto expect = [&](OpKind kind, std::uint64_t count, int root) {
      EXPECT_EQ(traffic.of(kind).bytes_sent, direct_bytes_sent(kind, count, 4, 3, r, root)) << name_of(kind);
      EXPECT_EQ(traffic.of(kind).calls, 1u);
    };
    expect(OpKind::all_reduce, 30, 0);
    expect(OpKind::all_gather, 30, 0);
    expect(OpKind::reduce_scatter, 30, 0);
    expect(OpKind::broadcast, 30, 1);
    expect(OpKind::scatter, 30, 2);
    expect(OpKind::gather, 30, 2);
    EXPECT_EQ(traffic.of(OpKind::send).bytes_sent, r == 0 ? 40u : 0u);
    EXPECT_EQ(std::accumulate(traffic.bytes_to_peer.begin(), traffic.bytes_to_peer.end(), std::uint64_t{0}),
              traffic.bytes_sent());
    EXPECT_EQ(traffic.bytes_to_peer[static_cast<std::size_t>(r)], 0u);
  });
}

}  // namespace
}  // namespace tessera::nccl_test
