// A solution of assignment 2.
#include "ddp.h"

#include <algorithm>
#include <ranges>
#include <vector>

namespace assignment {
namespace {

using namespace tessera;

/// Gradients that are reduced together.
struct Bucket {
  std::vector<std::size_t> parameters;  ///< as indices
  std::size_t elements = 0;
  std::size_t missing = 0;     ///< units that have not finished this backward
  std::vector<bool> of_units;  ///< by unit: whether it has parameters here
  std::vector<float> buffer;
  comm::Work work;
};

class Buckets final : public Ddp {
 public:
  Buckets(nn::Module& model, comm::Communicator& world, std::size_t bucket_bytes)
      : world_(world), parameters_(model.parameters()), places_(parameters_.size()) {
    std::vector<std::size_t> unit_of;
    for (std::size_t unit = 0; unit < model.children().size(); ++unit)
      unit_of.resize(unit_of.size() + model.children()[unit]->parameters().size(), unit);
    fill_buckets(bucket_bytes);
    for (Bucket& bucket : buckets_) {
      bucket.of_units.resize(model.children().size());
      for (const std::size_t index : bucket.parameters) bucket.of_units[unit_of[index]] = true;
    }
    for (std::size_t unit = 0; unit < model.children().size(); ++unit)
      model.children()[unit]->set_hooks({.pre_forward = [this](nn::Phase) { begin_if_finished(); },
                                         .post_forward = {},
                                         .pre_backward = {},
                                         .post_backward = [this, unit] { on_unit(unit); }});
    begin();
  }

  void finish() override {
    while (next_ < buckets_.size()) reduce(buckets_[next_++]);
    for (Bucket& bucket : buckets_) bucket.work.wait();
    finished_ = true;
  }

  std::span<const float> gradient(std::size_t parameter) const override {
    const Place& place = places_[parameter];
    return {buckets_[place.bucket].buffer.data() + place.offset,
            static_cast<std::size_t>(parameters_[parameter]->count())};
  }

 private:
  struct Place {
    std::size_t bucket = 0, offset = 0;
  };

  void fill_buckets(std::size_t bucket_bytes) {
    for (std::size_t index = parameters_.size(); index-- > 0;) {
      const auto count = static_cast<std::size_t>(parameters_[index]->count());
      if (buckets_.empty() || (buckets_.back().elements + count) * sizeof(float) > bucket_bytes)
        buckets_.emplace_back();
      Bucket& bucket = buckets_.back();
      places_[index] = {buckets_.size() - 1, bucket.elements};
      bucket.parameters.push_back(index);
      bucket.elements += count;
    }
    for (Bucket& bucket : buckets_) bucket.buffer.resize(bucket.elements);
  }

  /// Prepares a backward: nothing is reduced, gradients of units that are not used are zero.
  void begin() {
    next_ = 0;
    finished_ = false;
    for (Bucket& bucket : buckets_) {
      std::ranges::fill(bucket.buffer, 0.0F);
      bucket.missing = static_cast<std::size_t>(std::ranges::count(bucket.of_units, true));
    }
    for (std::size_t index = 0; index < parameters_.size(); ++index)
      parameters_[index]->gradient().bind(buckets_[places_[index].bucket].buffer.data() + places_[index].offset, false);
  }

  void begin_if_finished() {
    if (finished_) begin();
  }

  void on_unit(std::size_t unit) {
    for (Bucket& bucket : buckets_)
      if (bucket.of_units[unit]) --bucket.missing;
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) reduce(buckets_[next_++]);
  }

  void reduce(Bucket& bucket) {
    const comm::View all = comm::view_of(bucket.buffer.data(), bucket.elements);
    bucket.work = world_.all_reduce(all, all, comm::ReduceOp::avg());
  }

  comm::Communicator& world_;
  const std::vector<std::shared_ptr<nn::Parameter>> parameters_;
  std::vector<Place> places_;  // by parameter
  std::vector<Bucket> buckets_;
  std::size_t next_ = 0;   // the bucket that is reduced next, in the same order on all ranks
  bool finished_ = false;  // the gradients may be read; the next forward begins anew
};

}  // namespace

std::unique_ptr<Ddp> data_parallel(nn::Module& model, comm::Communicator& world, std::size_t bucket_bytes) {
  return std::make_unique<Buckets>(model, world, bucket_bytes);
}

}  // namespace assignment
