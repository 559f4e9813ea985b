// What symmetric windows of NCCL, and gathers by copy engines, change: the same all_gather between memory of allocate()
// on a plain communicator, and between memory of allocate_symmetric() on one that is made for gathers. In turns, twenty
// calls on a stream and one wait for the last; medians over rounds, in microseconds per call. Each rank has a GPU of
// its own, whose number is the rank. Without the variable the multiprocessors gather.
//
//   TESSERA_NCCL_COPY_ENGINES=1 tessera run --ranks 2 -- bench_nccl_windows [--json FILE]
#include <fmt/format.h>

#include <string>
#include <vector>

#include "bench/table_program.h"
#include "tessera/base/device_runtime.h"
#include "tessera/base/error.h"
#include "tessera/comm/init.h"

namespace {

using namespace tessera;

constexpr int kRounds = 15, kInARow = 20;

std::unique_ptr<comm::Communicator> open_world() {
  comm::InitOptions config;
  config.backend = "nccl";
  return comm::init(std::move(config));
}

/// A gather of one communicator between buffers of its own.
class Gather {
 public:
  /// Collective. `bytes`: of the whole.
  Gather(comm::Communicator& group, base::DeviceRuntime& device, std::size_t bytes, bool symmetric)
      : group_(group), device_(device), bytes_(bytes), part_(bytes / static_cast<std::size_t>(group.size())) {
    const auto allocate = [&](std::size_t size) {
      return symmetric ? group.allocate_symmetric(size, comm::MemoryKind::device, std::nullopt)
                       : group.allocate(size, comm::MemoryKind::device, std::nullopt);
    };
    in_ = allocate(part_);
    out_ = allocate(bytes);
  }

  /// Gathers the ranks' numbers. Throws BackendError if a part of the result is wrong.
  void check(base::Stream& stream) {
    device_.fill(stream, in_.data(), static_cast<unsigned char>(group_.rank() + 1), part_);
    run(stream, 1);
    std::vector<unsigned char> result(bytes_);
    device_.copy(stream, base::CopyDirection::device_to_host, result.data(), out_.data(), bytes_);
    stream.synchronize();
    for (std::size_t i = 0; i < bytes_; ++i)
      if (result[i] != i / part_ + 1) throw base::BackendError(fmt::format("byte {} of the gather is wrong", i));
  }

  /// Returns the microseconds of a call.
  double run(base::Stream& stream, int calls) {
    const std::int64_t begin = base::host_time_ns();
    const comm::ConstView from{in_.data(), part_, base::DType::u8, device_.device()};
    const comm::View to{out_.data(), bytes_, base::DType::u8, device_.device()};
    for (int i = 0; i < calls; ++i) group_.all_gather(from, to, {.after = &stream}).wait_on(stream);
    stream.synchronize();
    return static_cast<double>(base::host_time_ns() - begin) * 1e-3 / calls;
  }

 private:
  comm::Communicator& group_;
  base::DeviceRuntime& device_;
  const std::size_t bytes_, part_;
  base::Buffer in_, out_;
};

bench::Table run() {
  const std::unique_ptr<comm::Communicator> world = open_world();
  const auto device = base::open_device({base::DeviceType::cuda, world->rank()});
  const std::unique_ptr<base::Stream> stream = device->make_stream();
  const std::unique_ptr<comm::Communicator> plain = world->split(0, world->rank());
  const std::unique_ptr<comm::Communicator> special = world->split(0, world->rank(), {.for_gathers = true});
  bench::Table table;
  table.text = fmt::format("{:>12} {:>10} {:>10}  (us an all_gather)\n", "bytes", "plain", "symmetric");
  for (const int mebibytes : {8, 64, 256}) {
    const std::size_t part = (static_cast<std::size_t>(mebibytes) << 20) / static_cast<std::size_t>(world->size());
    const std::size_t bytes = part * static_cast<std::size_t>(world->size());
    Gather before(*plain, *device, bytes, false), after(*special, *device, bytes, true);
    before.check(*stream);
    after.check(*stream);
    std::vector<double> without, with;
    for (int round = 0; round < kRounds; ++round) {
      without.push_back(before.run(*stream, kInARow));
      with.push_back(after.run(*stream, kInARow));
    }
    table.text += fmt::format("{:>12} {:>10.2f} {:>10.2f}\n", bytes, bench::median(without), bench::median(with));
    table.rows.push_back(
        {{"bytes", bytes}, {"plain_us", bench::median(without)}, {"symmetric_us", bench::median(with)}});
  }
  table.written = world->rank() == 0;
  return table;
}

}  // namespace

int main(int count, char** arguments) {
  return bench::table_program(count, arguments, "bench_nccl_windows",
                              "what symmetric windows of NCCL change in a gather", run);
}
