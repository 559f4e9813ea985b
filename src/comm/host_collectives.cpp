#include "tessera/comm/host_collectives.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "tessera/base/checksum.h"
#include "tessera/base/error.h"

namespace tessera::comm {

bool finished(Work& work) {
  if (!work.done()) return false;
  work.wait();
  return true;
}

HostCollectives::~HostCollectives() {
  if (std::ranges::none_of(rooms_, [](const auto& room) { return room->used; })) return;
  try {
    stream_->synchronize();
  } catch (const std::exception&) {  // the device has failed, and with it what used the memory
  }
}

bool HostCollectives::supports_host_memory() const {
  const std::vector<MemoryKind>& kinds = communicator_.capabilities().memory;
  return std::ranges::find(kinds, MemoryKind::host) != kinds.end();
}

void HostCollectives::exchange(ConstView in, View out, const Exchange& run) { begin(in, out, run)->wait(); }

void HostCollectives::exchange_through_device(ConstView in, View out, const Exchange& run) {
  begin_through_device(in, out, run)->wait();
}

std::unique_ptr<HostCollectives::AsyncCollective> HostCollectives::begin(ConstView in, View out, const Exchange& run) {
  if (!supports_host_memory()) return begin_through_device(in, out, run);
  std::unique_ptr<AsyncCollective> pending(new AsyncCollective);
  pending->work_ = run(in, out, {});
  return pending;
}

HostCollectives::StagingBuffer& HostCollectives::room_for(std::size_t bytes) {
  if (stream_ == nullptr) stream_ = device_.make_stream();
  for (const auto& room : rooms_)
    if (!room->used && room->device.bytes() >= bytes) return *room;
  device_.wait_for_host_events();  // to allocate may wait for all streams
  auto room = std::make_unique<StagingBuffer>();
  base::DeviceRuntime& device = device_;
  room->pinned = {device.allocate_host(bytes), bytes, [&device](void* p, std::size_t n) { device.free_host(p, n); }};
  room->device = {device.allocate(bytes), bytes, [&device](void* p, std::size_t n) { device.free(p, n); }};
  return *rooms_.emplace_back(std::move(room));
}

std::unique_ptr<HostCollectives::AsyncCollective> HostCollectives::begin_through_device(ConstView in, View out,
                                                                                        const Exchange& run) {
  const std::size_t second = (in.bytes() + base::kAlignment - 1) / base::kAlignment * base::kAlignment;
  StagingBuffer& room = room_for(second + std::max<std::size_t>(1, out.bytes()));
  if (in.bytes() > 0) std::memcpy(room.pinned.data(), in.data, in.bytes());
  device_.copy(*stream_, base::CopyDirection::host_to_device, room.device.data(), room.pinned.data(), in.bytes());
  std::byte* const result = room.device.bytes_at(second);
  run({room.device.data(), in.count, in.dtype, device_.device()}, {result, out.count, out.dtype, device_.device()},
      {.after = stream_.get()})
      .wait_on(*stream_);
  device_.copy(*stream_, base::CopyDirection::device_to_host, room.pinned.bytes_at(second), result, out.bytes());
  std::unique_ptr<AsyncCollective> pending(new AsyncCollective);
  pending->room_ = &room;
  pending->out_ = out;
  pending->offset_ = second;
  pending->arrived_ = stream_->record();
  room.used = true;
  return pending;
}

/// An exchange without an observed end may still use its staging buffer, which therefore is not reused.
HostCollectives::AsyncCollective::~AsyncCollective() = default;

bool HostCollectives::AsyncCollective::done() {
  if (done_) return true;
  if (room_ == nullptr) return done_ = finished(work_);
  if (!arrived_.done()) return false;
  wait();
  return true;
}

void HostCollectives::AsyncCollective::wait() {
  if (room_ == nullptr) return work_.wait();
  arrived_.wait();
  finish();
}

void HostCollectives::AsyncCollective::finish() {
  if (out_.bytes() > 0) std::memcpy(out_.data, room_->pinned.bytes_at(offset_), out_.bytes());
  room_->used = false;  // another exchange may now use it
  done_ = true;
}

namespace {

bool all_equal(const std::vector<std::string>& texts) {
  return std::ranges::adjacent_find(texts, std::not_equal_to<>()) == texts.end();
}

}  // namespace

std::vector<std::string> texts_of_ranks(HostCollectives& world, const std::string& mine) {
  constexpr std::size_t kLength = 256;
  std::vector<std::uint8_t> text(kLength, 0);
  std::copy_n(mine.data(), std::min(mine.size(), kLength - 1), text.data());
  std::vector<std::string> texts;
  if (world.size() == 1) return {mine};
  for (const std::vector<std::uint8_t>& one : world.gather_all(text))
    texts.emplace_back(one.begin(), std::ranges::find(one, 0));
  return texts;
}

void require_alike(HostCollectives& world, const std::vector<SharedSetting>& settings, std::string_view owner) {
  std::string all;
  for (const SharedSetting& setting : settings) all += setting.value + '\n';
  // All ranks see the same texts, so nothing has to be aborted.
  const std::uint64_t sum = base::checksum(std::as_bytes(std::span(all)));
  if (all_equal(texts_of_ranks(world, std::to_string(sum)))) return;
  std::string differences;
  for (const SharedSetting& setting : settings) {
    const std::vector<std::string> texts = texts_of_ranks(world, setting.value);
    if (!all_equal(texts))
      differences +=
          (differences.empty() ? "" : ", and ") + setting.name + " differs between the ranks: it is " + by_value(texts);
  }
  throw base::Mismatch(
      std::string(owner) + ": " +
      (differences.empty() ? "a setting differs between the ranks after its first 255 characters" : differences) +
      "; choose the same on all ranks");
}

}  // namespace tessera::comm
