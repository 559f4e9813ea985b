// What ranks tell each other, where the communicator takes memory of the device only.
#include "tools/control.h"

#include <gtest/gtest.h>

#include "tessera/comm/context.h"
#include "tests/harness/guarded_device.h"

namespace tessera::tools {
namespace {

/// Runs `body` on two ranks of a device whose memory crashes the host that touches it.
void on_two_ranks(const std::function<void(nn::Context&, comm::Communicator&)>& body) {
  const auto device = harness::make_guarded_device({.lazy = true});
  comm::Config config;
  config.backend = "shm";
  config.device = device;
  comm::run_threads(2, config, [&](comm::Communicator& comm) {
    nn::Context context({.runtime = device});
    body(context, comm);
  });
}

TEST(Control, NumbersPassThroughTheDevice) {
  on_two_ranks([](nn::Context& context, comm::Communicator& comm) {
    double loss = comm.rank() + 1.0;
    const comm::View view = comm::view_of(&loss, 1);
    bool on_device = false;
    exchange_through_device(context, view, view, [&](comm::ConstView in, comm::View out) {
      on_device = in.device == context.device() && out.device == context.device();
      return comm.all_reduce(in, out, comm::ReduceOp::avg());
    });
    EXPECT_TRUE(on_device);
    EXPECT_EQ(loss, 1.5);
  });
}

TEST(Control, AlsoWhatIsEmptyOrOfDifferentLengths) {
  on_two_ranks([](nn::Context& context, comm::Communicator& comm) {
    const std::vector<std::size_t> counts = {3, 0};
    const std::vector<std::uint8_t> mine(counts[static_cast<std::size_t>(comm.rank())], 7);
    std::vector<std::uint8_t> all(3, 0);
    exchange_through_device(context, comm::view_of(mine.data(), mine.size()), comm::view_of(all.data(), all.size()),
                            [&](comm::ConstView in, comm::View out) { return comm.all_gather_v(in, out, counts); });
    EXPECT_EQ(all, std::vector<std::uint8_t>(3, 7));
  });
}

TEST(Control, MemoryOfTheHostStaysThereWhereItIsTaken) {
  on_two_ranks([](nn::Context& context, comm::Communicator& comm) {
    const auto all = gather_all(context, comm, std::vector<std::uint64_t>{static_cast<std::uint64_t>(comm.rank())});
    EXPECT_EQ(all, (std::vector<std::vector<std::uint64_t>>{{0}, {1}}));
    EXPECT_EQ(context.ledger().snapshot().total_peak, 0U) << "it took memory of the device";
  });
}

}  // namespace
}  // namespace tessera::tools
