#include "tessera/fsdp/engine/exec_order_validator.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>

namespace tessera::fsdp {
namespace {

comm::View bytes_of(void* data, std::size_t bytes) { return {data, bytes, DType::u8, {}}; }
template <class T>
comm::View bytes_of(std::vector<T>& all) {
  return bytes_of(all.data(), all.size() * sizeof(T));
}

constexpr std::string_view kDifference = "execution order: the ranks differ:";

/// Runs a part of an exchange. The first rank that sees a difference aborts the communicator with its text, which ends
/// the exchange of ranks that have yet to see it: for them too it is a mismatch.
template <class Part>
auto with_mismatch_of_others(Part part) {
  try {
    return part();
  } catch (const base::Aborted& error) {
    const std::string_view text = error.what();
    const std::size_t at = text.find(kDifference);
    if (at == std::string_view::npos) throw;
    throw base::Mismatch(std::string(text.substr(at)));
  }
}

}  // namespace

ExecOrderValidator::ExecOrderValidator(comm::Communicator& world, base::DeviceRuntime& runtime)
    : communicator_(world.split(0, world.rank())),
      host_(*communicator_, runtime),
      gather_([this](comm::ConstView in, comm::View out, comm::OpOptions options) {
        options.label = "order";
        return communicator_->all_gather(in, out, options);
      }) {}

void ExecOrderValidator::record(std::string_view what) {
  hash_ = XXH3_64bits_withSeed(what.data(), what.size(), hash_ + 1);
  if (text_.size() > sizeof(OrderRecord::text)) return;
  text_ += ' ';
  text_ += what;
}

void ExecOrderValidator::discard_records() {
  hash_ = sent_hash_;
  text_.clear();
}

ExecOrderValidator::OrderRecord ExecOrderValidator::next_record(const std::string& next) {
  OrderRecord record;
  const std::string text = next + (text_.empty() ? "" : ", after" + text_);
  record.hash = XXH3_64bits_withSeed(text.data(), text.size(), hash_);
  std::copy_n(text.data(), std::min(text.size(), record.text.size() - 1), record.text.data());
  sent_hash_ = hash_;
  text_.clear();
  return record;
}

void ExecOrderValidator::begin(const std::string& next) {
  check();
  const OrderRecord mine = next_record(next);
  if (communicator_->size() == 1) return;
  auto exchange = std::make_unique<PendingCheck>();
  exchange->mine = mine;
  exchange->all.resize(static_cast<std::size_t>(communicator_->size()));
  exchange->pending = with_mismatch_of_others(
      [&] { return host_.begin(bytes_of(&exchange->mine, sizeof(OrderRecord)), bytes_of(exchange->all), gather_); });
  exchanges_.push_back(std::move(exchange));
}

void ExecOrderValidator::check() {
  const auto done = [this] { return exchanges_.front()->pending->done(); };
  while (!exchanges_.empty() && with_mismatch_of_others(done)) {
    const std::unique_ptr<PendingCheck> oldest = std::move(exchanges_.front());
    exchanges_.pop_front();
    for (const OrderRecord& record : oldest->all)
      if (record != oldest->mine) fail(oldest->all);
  }
}

bool ExecOrderValidator::idle() const noexcept {
  return std::all_of(exchanges_.begin(), exchanges_.end(), [](const auto& one) {
    try {
      return one->pending->done();
    } catch (const base::Error&) {
      return true;
    }
  });
}

std::uint64_t ExecOrderValidator::formula_bytes() const {
  if (communicator_->size() == 1) return 0;
  const auto ranks = static_cast<std::uint64_t>(communicator_->size());
  return comm::direct_bytes_sent(comm::OpKind::all_gather, ranks * sizeof(OrderRecord), 1, communicator_->size(), 0);
}

void ExecOrderValidator::agree(const std::string& next) {
  check();
  OrderRecord mine = next_record(next);
  if (communicator_->size() == 1) return;
  std::vector<OrderRecord> all(static_cast<std::size_t>(communicator_->size()));
  with_mismatch_of_others([&] { host_.exchange(bytes_of(&mine, sizeof(OrderRecord)), bytes_of(all), gather_); });
  for (const OrderRecord& record : all)
    if (record != mine) fail(all);
}

void ExecOrderValidator::fail(const std::vector<OrderRecord>& all) {
  std::string text(kDifference);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    text += (rank == 0 ? " rank " : "; rank ") + std::to_string(rank) + ": " + all[rank].text.data();
  communicator_->abort(text);  // exchanges in flight are not waited for
  throw base::Mismatch(text);
}

}  // namespace tessera::fsdp
