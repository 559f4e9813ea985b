// Fully sharded data parallel by hand, without overlap: a rank keeps a shard of each unit, gathers the unit for its
// forward and again for its backward, and gets its shard of the averaged gradients. The engine (examples/04) does the
// same ahead of time. tessera run -n 4 -- ./parallel_fsdp
#include <memory>

#include "report.h"

using namespace tiny;

namespace {

/// The embedding, a block or the head: parameters that are used and sent together.
class Unit {
 public:
  Unit(nn::Context& context, comm::Communicator& world, Report& report, const std::string& name)
      : parameters(context, /*with_memory=*/false), context_(context), world_(world), report_(report), name_(name) {}

  /// Once its parameters are known: this rank's shard of their initial values, one after the other and padded.
  void shard() {
    for (const Parameter& p : parameters.all()) elements_ += p.count();
    const std::int64_t ranks = world_.size(), padded = (elements_ + ranks - 1) / ranks * ranks;
    std::vector<float> whole(static_cast<std::size_t>(padded), 0);
    float* next = whole.data();
    for (const Parameter& p : parameters.all()) {
      Parameters::initialize(p, {next, static_cast<std::size_t>(p.count())});
      next += p.count();
    }
    shard_ = Tensor::empty(context_, {padded / ranks}, base::DType::f32, base::MemoryCategory::parameter);
    std::copy_n(whole.data() + world_.rank() * shard_.count(), shard_.count(), shard_.data<float>());
  }
  /// Unsharded while `work` runs.
  template <class Work>
  auto unsharded(Work&& work) {
    unshard();
    auto result = work();
    reshard();
    return result;
  }
  void unshard() {
    whole_ = Tensor::empty(context_, {shard_.count() * world_.size()}, base::DType::f32,
                           base::MemoryCategory::unsharded_parameter);
    report_.wait(name_, whole_.bytes(), false, [&] { return world_.all_gather(view(shard_), view(whole_)); });
    bind(whole_, [](Parameter& p, float* at) { p.value.bind(at); });
  }
  void reshard() {
    for (Parameter& p : parameters.all()) p.value.unbind("it is sharded");
    whole_ = Tensor();
  }
  /// Before the backward: where the gradients go.
  void bind_gradients() {
    gradients_ = Tensor::zeros(context_, {shard_.count() * world_.size()}, base::DType::f32,
                               base::MemoryCategory::unsharded_gradient);
    bind(gradients_, [](Parameter& p, float* at) { p.value.gradient()->bind(at, false); });
  }
  /// After it: the average over the ranks, of this rank's shard.
  void reduce() {
    gradient_shard_ = Tensor::empty(context_, {shard_.count()}, base::DType::f32, base::MemoryCategory::gradient);
    report_.wait(name_, gradients_.bytes(), true,
                 [&] { return world_.reduce_scatter(view(gradients_), view(gradient_shard_), comm::ReduceOp::avg()); });
    for (Parameter& p : parameters.all()) p.value.gradient()->unbind();
    gradients_ = Tensor();
  }
  void update() {
    for (std::int64_t i = 0; i < shard_.count(); ++i)
      shard_.data<float>()[i] -= static_cast<float>(kRate) * gradient_shard_.data<float>()[i];
    gradient_shard_ = Tensor();
  }

  Parameters parameters;

 private:
  static comm::View view(const Tensor& x) {
    return comm::view_of(x.data<float>(), static_cast<std::size_t>(x.count()));
  }
  template <class Bind>
  void bind(const Tensor& flat, Bind&& bind) {
    float* next = flat.data<float>();
    for (Parameter& p : parameters.all()) {
      bind(p, next);
      next += p.count();
    }
  }
  nn::Context& context_;
  comm::Communicator& world_;
  Report& report_;
  const std::string name_;
  std::int64_t elements_ = 0;
  Tensor shard_, whole_, gradients_, gradient_shard_;
};

}  // namespace

int main(int argc, char** argv) {
  const auto world = comm::init();
  nn::Context context(options());
  Report report(*world, context, "fsdp", argc, argv);
  report.share = 1.0 / world->size();
  std::vector<std::unique_ptr<Unit>> units;
  for (const char* name : kUnits) units.push_back(std::make_unique<Unit>(context, *world, report, name));
  const Tensor embedding = add_embedding(units.front()->parameters);
  std::vector<Block> blocks;
  for (int i = 0; i < kBlocks; ++i) blocks.emplace_back(units[i + 1]->parameters, i);
  const Head head(units.back()->parameters);
  for (auto& unit : units) unit->shard();

  const std::int64_t sequences = kSequences / world->size();
  for (int step = 0; step < report.steps(); ++step) {
    report.begin_step();
    const auto [tokens, targets] = batch(context, step, {sequences * world->rank(), sequences});
    const auto forward = [&](std::size_t i, const Tensor& in) {
      if (i == 0) return nn::ops::embedding(tokens, embedding);
      return i <= blocks.size() ? blocks[i - 1].forward(in) : head.loss(in, targets);
    };
    std::vector<Segment> segments(units.size());
    Tensor x;
    for (std::size_t i = 0; i < units.size(); ++i)
      x = units[i]->unsharded([&] {
        return report.time(TraceEventKind::forward, kUnits[i], 0, [&] {
          return segments[i].forward(context, x, [&](const Tensor& in) { return forward(i, in); });
        });
      });
    const Tensor loss = x;
    Tensor gradient;
    for (std::size_t i = units.size(); i-- > 0;) {
      gradient = units[i]->unsharded([&] {
        units[i]->bind_gradients();
        return report.time(TraceEventKind::backward, kUnits[i], 0, [&] { return segments[i].backward(gradient); });
      });
      units[i]->reduce();
    }
    for (std::size_t i = 0; i < units.size(); ++i)
      report.time(TraceEventKind::optimizer_step, kUnits[i], 0, [&] { units[i]->update(); });
    report.end_step(loss.item());
  }

  std::vector<Parameter> all;
  for (auto& unit : units) {
    unit->unshard();
    all.insert(all.end(), unit->parameters.all().begin(), unit->parameters.all().end());
  }
  report.finish(all);
}
