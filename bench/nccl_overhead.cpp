// The overhead of the nccl backend over direct calls of NCCL: the same buffers, in turns, between the ranks of a launch
// (without one, a single rank, whose calls are copies).
//
// "alone": one call, and the host waits for it. "in a row": twenty calls on a stream, and the host waits for the last,
// as nccl-tests does; calls of the backend depend on the stream as in the engine. Medians over rounds, in microseconds
// per call.
//
//   tessera run --ranks 2 -- bench_nccl_overhead [--json FILE]
#include <fmt/format.h>

#include <functional>
#include <string>
#include <vector>

#include "backends/nccl/api.h"
#include "bench/table_program.h"
#include "tessera/base/device_runtime.h"
#include "tessera/base/device_stream.h"
#include "tessera/base/error.h"
#include "tessera/comm/host_collectives.h"
#include "tessera/comm/init.h"

namespace {

using namespace tessera;

constexpr int kRounds = 15, kInARow = 20, kAlone = 20;

struct Row {
  std::string op;
  std::size_t bytes = 0;
  double alone_us = 0, direct_alone_us = 0, in_a_row_us = 0, direct_in_a_row_us = 0;
};

double microseconds(const std::function<void()>& work) {
  const std::int64_t begin = base::host_time_ns();
  work();
  return static_cast<double>(base::host_time_ns() - begin) * 1e-3;
}

class Overhead {
 public:
  Overhead() : device_(base::open_device({base::DeviceType::cuda, 0})), stream_(device_->make_stream()) {
    comm::InitOptions config;
    config.backend = "nccl";
    config.device = device_;
    config.deterministic = false;
    ours_ = comm::init(std::move(config));
    if (const auto& loaded = comm::nccl::loaded_api(); !loaded.problem.empty()) throw base::Unsupported(loaded.problem);
    native_ = static_cast<cudaStream_t>(static_cast<base::DeviceStream&>(*stream_).native());
    ncclUniqueId id;
    check(api_.ncclGetUniqueId(&id));
    comm::HostCollectives control(*ours_, *device_);
    const std::vector<std::uint8_t> first =
        control.gather_all(std::vector<std::uint8_t>(id.internal, std::end(id.internal))).front();
    std::copy(first.begin(), first.end(), id.internal);
    ncclConfig_t settings = NCCL_CONFIG_INITIALIZER;
    check(api_.ncclCommInitRankConfig(&direct_, ours_->size(), id, ours_->rank(), &settings));
  }
  ~Overhead() {
    if (direct_ != nullptr) api_.ncclCommDestroy(direct_);
  }
  Overhead(const Overhead&) = delete;
  Overhead& operator=(const Overhead&) = delete;

  bool reports() const { return ours_->rank() == 0; }

  /// `bytes`: of the whole, of which each rank gathers or keeps its part.
  Row measure(const std::string& op, std::size_t bytes) {
    const base::Buffer in = ours_->allocate(bytes, comm::MemoryKind::device, std::nullopt);
    const base::Buffer out = ours_->allocate(bytes, comm::MemoryKind::device, std::nullopt);
    const std::size_t whole = bytes / sizeof(float), part = whole / static_cast<std::size_t>(ours_->size());
    const std::size_t count = op == "all_reduce" ? whole : part;  // NCCL's
    const comm::ConstView from{in.data(), op == "all_gather" ? part : whole, base::DType::f32, device_->device()};
    const comm::View to{out.data(), op == "reduce_scatter" ? part : whole, base::DType::f32, device_->device()};
    const auto ours = [&](comm::OpOptions options) {
      if (op == "all_reduce") return ours_->all_reduce(from, to, comm::ReduceOp::sum(), options);
      if (op == "all_gather") return ours_->all_gather(from, to, options);
      return ours_->reduce_scatter(from, to, comm::ReduceOp::sum(), options);
    };
    const auto direct = [&] {
      if (op == "all_reduce")
        return check(api_.ncclAllReduce(in.data(), out.data(), count, ncclFloat, ncclSum, direct_, native_));
      if (op == "all_gather")
        return check(api_.ncclAllGather(in.data(), out.data(), count, ncclFloat, direct_, native_));
      check(api_.ncclReduceScatter(in.data(), out.data(), count, ncclFloat, ncclSum, direct_, native_));
    };
    std::vector<double> alone, direct_alone, in_a_row, direct_in_a_row;
    for (int round = -2; round < kRounds; ++round) {
      const double a = microseconds([&] {
        for (int i = 0; i < kAlone; ++i) ours({}).wait();
      });
      const double b = microseconds([&] {
        for (int i = 0; i < kAlone; ++i) direct(), stream_->synchronize();
      });
      const double c = microseconds([&] {
        for (int i = 0; i < kInARow; ++i) ours({.after = stream_.get()}).wait_on(*stream_);
        stream_->synchronize();
      });
      const double d = microseconds([&] {
        for (int i = 0; i < kInARow; ++i) direct();
        stream_->synchronize();
      });
      if (round < 0) continue;
      alone.push_back(a / kAlone), direct_alone.push_back(b / kAlone);
      in_a_row.push_back(c / kInARow), direct_in_a_row.push_back(d / kInARow);
    }
    return {op,
            bytes,
            bench::median(alone),
            bench::median(direct_alone),
            bench::median(in_a_row),
            bench::median(direct_in_a_row)};
  }

 private:
  void check(ncclResult_t result) {
    if (result != ncclSuccess) throw base::BackendError(std::string("NCCL: ") + api_.ncclGetErrorString(result));
  }

  const comm::nccl::NcclApi& api_ = comm::nccl::loaded_api().api;
  const std::shared_ptr<base::DeviceRuntime> device_;
  const std::unique_ptr<base::Stream> stream_;
  std::unique_ptr<comm::Communicator> ours_;
  cudaStream_t native_ = nullptr;
  ncclComm_t direct_ = nullptr;
};

bench::Table run() {
  Overhead overhead;
  bench::Table table;
  table.text = fmt::format("{:<16} {:>10} {:>10} {:>10} {:>10} {:>10}  (us a call)\n", "op", "bytes", "alone", "direct",
                           "in a row", "direct");
  for (const char* op : {"all_reduce", "all_gather", "reduce_scatter"})
    for (const std::size_t bytes :
         {std::size_t{1} << 10, std::size_t{1} << 20, std::size_t{16} << 20, std::size_t{256} << 20}) {
      const Row r = overhead.measure(op, bytes);
      table.text += fmt::format("{:<16} {:>10} {:>10.2f} {:>10.2f} {:>10.2f} {:>10.2f}\n", r.op, r.bytes, r.alone_us,
                                r.direct_alone_us, r.in_a_row_us, r.direct_in_a_row_us);
      table.rows.push_back({{"op", r.op},
                            {"bytes", r.bytes},
                            {"alone_us", r.alone_us},
                            {"direct_alone_us", r.direct_alone_us},
                            {"in_a_row_us", r.in_a_row_us},
                            {"direct_in_a_row_us", r.direct_in_a_row_us}});
    }
  table.written = overhead.reports();
  return table;
}

}  // namespace

int main(int count, char** arguments) {
  return bench::table_program(count, arguments, "bench_nccl_overhead",
                              "what the nccl backend costs over NCCL's own calls", run);
}
