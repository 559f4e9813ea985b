// A custom backend: ranks are threads, and each collective is a barrier at which all ranks publish their buffers.
#include <barrier>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "tessera/fsdp/nn_model.h"
#include "tessera/nn/models/causal_model.h"

using namespace tessera;
using comm::OpDesc, comm::OpKind, comm::Work;

struct SharedState {
  explicit SharedState(int size) : calls(size), colors(size), arrived(size) {}
  std::vector<const OpDesc*> calls;
  std::vector<int> colors;
  std::mutex mutex;
  std::map<int, std::shared_ptr<SharedState>> splits;  // by color
  std::barrier<> arrived;
};

class ThreadCommunicator : public comm::Communicator {
 public:
  ThreadCommunicator(int rank, int size, std::shared_ptr<SharedState> m) : Communicator(rank, size, {}), shared_(m) {}
  const comm::Capabilities& capabilities() const noexcept override { return capabilities_; }

 private:
  template <class T>
  void reduce(const OpDesc& call, std::size_t first, std::vector<std::byte>& result) const {
    T* const out = reinterpret_cast<T*>(result.data());
    for (std::size_t i = 0; i < call.out.count; ++i) {
      for (const OpDesc* of : shared_->calls)
        out[i] = static_cast<T>(out[i] + static_cast<const T*>(of->in.data)[first + i]);
      if (call.op.kind == comm::ReduceOp::Kind::avg) out[i] = static_cast<T>(out[i] / static_cast<T>(call.op.scalar));
    }
  }
  Work do_start(const OpDesc& call) override {
    if (call.kind > OpKind::reduce_scatter && call.kind != OpKind::barrier)
      throw base::Unsupported(std::string(comm::name_of(call.kind)) + " over threads");
    shared_->calls[rank()] = &call;
    shared_->arrived.arrive_and_wait();  // all inputs are published
    std::vector<std::byte> result(call.out.bytes());
    const auto sum = call.in.dtype == base::DType::u8 ? &ThreadCommunicator::reduce<std::uint8_t>
                                                      : &ThreadCommunicator::reduce<float>;
    if (call.kind == OpKind::all_reduce) (this->*sum)(call, 0, result);
    if (call.kind == OpKind::reduce_scatter) (this->*sum)(call, rank() * call.out.count, result);
    for (std::size_t r = 0, n = call.in.bytes(); call.kind == OpKind::all_gather && r < shared_->calls.size(); ++r)
      std::memcpy(&result[r * n], shared_->calls[r]->in.data, n);
    shared_->arrived.arrive_and_wait();  // all inputs are read: now outputs, which may alias inputs, can be written
    if (call.kind != OpKind::barrier) std::memcpy(call.out.data, result.data(), call.out.bytes());
    shared_->arrived.arrive_and_wait();
    return Work();  // completed: this backend is never asynchronous
  }
  Work do_batch(std::span<const OpDesc>) override { throw base::Unsupported("batch over threads"); }
  std::unique_ptr<comm::Communicator> do_split(int color, int, const comm::SplitOptions&) override {
    shared_->colors[rank()] = color;
    shared_->arrived.arrive_and_wait();
    int members = 0, mine = 0;
    for (int r = 0; r < size(); ++r)
      mine += r < rank() && shared_->colors[r] == color, members += shared_->colors[r] == color;
    if (mine == 0) {
      const std::lock_guard lock(shared_->mutex);
      shared_->splits[color] = std::make_shared<SharedState>(members);
    }
    shared_->arrived.arrive_and_wait();
    return std::make_unique<ThreadCommunicator>(mine, members, shared_->splits.at(color));
  }
  base::Buffer do_allocate(std::size_t bytes, comm::MemoryKind, std::optional<base::MemoryCategory>) override {
    return {std::aligned_alloc(64, bytes / 64 * 64 + 64), bytes, [](void* data, std::size_t) { std::free(data); }};
  }
  void do_abort(std::string_view) noexcept override {}
  void do_traffic(comm::TrafficStats&) const override {}
  std::shared_ptr<SharedState> shared_;
  const comm::Capabilities capabilities_ = {
      .backend = "threads", .dtypes = {base::DType::f32, base::DType::u8}, .memory = {comm::MemoryKind::host}};
};

int main() {
  const auto shared = std::make_shared<SharedState>(2);
  const auto rank_main = [&](int rank) {
    ThreadCommunicator world(rank, 2, shared);
    nn::Context context;
    const auto model = nn::make_model(context, nn::preset("gpt-nano"));
    fsdp::Engine engine(*model, world, {});
    engine.initialize(0);
    const nn::Tensor tokens = nn::Tensor::zeros(context, {2, 16}, base::DType::i32);
    for (int step = 0; step < 5; ++step) {
      const nn::TapeScope recording(context);
      const nn::Tensor loss = model->loss(tokens, tokens);
      loss.backward();
      engine.step(1e-3);
      if (rank == 0) std::printf("step %d loss %.3f\n", step + 1, loss.item());
    }
  };
  const std::jthread other(rank_main, 1);
  rank_main(0);
}
