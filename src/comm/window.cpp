#include "tessera/comm/window.h"

#include <array>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"

namespace tessera::comm {

namespace {

constexpr int kMessageTag = 1, kPutTag = 2, kGetTag = 3;  // each message of one tag arrives in its sender's order
constexpr std::size_t kInline = 40;                       // a smaller put travels in its message
constexpr auto kNoLimit = std::chrono::milliseconds::max();
constexpr auto kSpin = std::chrono::microseconds(100);  // a signal often comes at once

ConstView bytes_of(const ConstView& view) { return {view.data, view.bytes(), DType::u8, view.device}; }
View bytes_of(const View& view) { return {view.data, view.bytes(), DType::u8, view.device}; }

void require_host(std::string_view call, base::Device device) {
  if (device.type != base::DeviceType::cpu)
    throw InvalidUsage(std::string(call) + ": memory of a device; give host memory");
}

}  // namespace

/// What a rank tells another one; small puts have their data with them.
struct Window::Message {
  enum class Kind : std::uint64_t { put, get, signal, close };
  Kind kind = Kind::signal;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::array<std::byte, kInline> data = {};

  ConstView view() const { return {this, sizeof *this, DType::u8, {}}; }
};

/// What comes from one rank.
struct Window::Peer {
  struct Arrival {
    bool is_signal = false;
    bool done = false;  ///< of a put
  };
  Message message;
  Work receive;  ///< of `message`
  bool receiving = false;
  std::list<Arrival> arrivals;  ///< puts on their way, and the signals behind them
  std::uint64_t signals = 0;
  bool closed = false;
};

Window::Window(Communicator& world, View memory) : memory_(bytes_of(memory)) {
  if (!supported(world))
    throw Unsupported("window: the messages of backend " + std::string(world.backend()) +
                      " have no tags, which windows need");
  require_host("window", memory.device);
  channel_ = world.split(0, world.rank());
  sizes_.resize(static_cast<std::size_t>(size()));
  const std::uint64_t mine = memory_.bytes();
  std::vector<std::uint64_t> all(sizes_.size());
  channel_->all_gather(view_of(&mine, 1), view_of(all.data(), all.size()), {.label = "window"}).wait();
  std::copy(all.begin(), all.end(), sizes_.begin());
  for (int peer = 0; peer < size(); ++peer) peers_.push_back(std::make_unique<Peer>());
  const std::lock_guard lock(mutex_);
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) serve(peer);
}

Window::~Window() {
  std::string reason = "a rank left a window without closing it";
  if (open_ && !tried_to_close_ && std::uncaught_exceptions() == exceptions_) {
    try {
      close();
    } catch (const std::exception& error) {
      reason = error.what();
    }
  }
  if (open_ || failure_) channel_->abort(reason);  // which logs the first failure
  std::vector<Work> receives;  // which end with the failure; callbacks that still come find nothing to do
  {
    const std::lock_guard lock(mutex_);
    for (const auto& peer : peers_) {
      peer->closed = true;
      receives.push_back(std::move(peer->receive));
    }
  }
  receives.clear();
  channel_.reset();
}

void Window::check(std::string_view call, int peer, std::size_t offset, std::size_t bytes) const {
  const std::string name(call);
  if (!open_) throw InvalidUsage(name + ": the window is closed");
  {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  if (peer < 0 || peer >= size())
    throw InvalidUsage(name + ": rank " + std::to_string(peer) + " is not one of " + std::to_string(size()));
  const std::size_t there = this->bytes(peer);
  if (offset > there || bytes > there - offset)
    throw InvalidUsage(name + ": " + std::to_string(bytes) + " bytes at " + std::to_string(offset) + " of rank " +
                       std::to_string(peer) + "'s part of the window, which has " + std::to_string(there));
}

Work Window::send(const Message& message, int peer, const P2POp* beside, const OpOptions& options) {
  const std::lock_guard lock(mutex_);
  if (unused_.empty()) unused_.push_back(&sent_.emplace_back());
  Message* const kept = unused_.back();
  unused_.pop_back();
  *kept = message;
  const P2POp parts[2] = {P2POp::send(kept->view(), peer, kMessageTag), beside != nullptr ? *beside : P2POp{}};
  Work work = channel_->batch({parts, beside != nullptr ? 2U : 1U}, options);
  work.on_done([this, kept](const std::exception_ptr&) {
    const std::lock_guard callback_lock(mutex_);
    unused_.push_back(kept);
  });
  return work;
}

Work Window::put(ConstView data, int peer, std::size_t offset, OpOptions options) {
  check("put", peer, offset, data.bytes());
  require_host("put", data.device);
  if (data.bytes() == 0) return {};
  if (peer == rank()) {
    std::memmove(at(offset), data.data, data.bytes());
    return {};
  }
  Message message{.kind = Message::Kind::put, .offset = offset, .bytes = data.bytes()};
  const P2POp rest = P2POp::send(bytes_of(data), peer, kPutTag);
  const bool small = data.bytes() <= kInline;
  if (small) std::memcpy(message.data.data(), data.data, data.bytes());
  return send(message, peer, small ? nullptr : &rest, options);
}

Work Window::get(View data, int peer, std::size_t offset, OpOptions options) {
  check("get", peer, offset, data.bytes());
  require_host("get", data.device);
  if (data.bytes() == 0) return {};
  if (peer == rank()) {
    std::memmove(data.data, at(offset), data.bytes());
    return {};
  }
  const P2POp reply = P2POp::recv(bytes_of(data), peer, kGetTag);
  return send({.kind = Message::Kind::get, .offset = offset, .bytes = data.bytes()}, peer, &reply, options);
}

Work Window::signal(int peer, OpOptions options) {
  check("signal", peer, 0, 0);
  if (peer != rank()) return send({.kind = Message::Kind::signal}, peer, nullptr, options);
  const std::lock_guard lock(mutex_);
  ++peer_of(peer).signals;
  return {};
}

std::uint64_t Window::signals(int peer) const {
  const std::lock_guard lock(mutex_);
  return peer_of(peer).signals;
}

void Window::wait_signal(int peer, std::uint64_t count, OpOptions options) {
  check("wait_signal", peer, 0, 0);
  const std::chrono::milliseconds patience = options.timeout.value_or(channel_->timeout());
  const auto deadline = base::deadline_after(patience), spin_end = std::chrono::steady_clock::now() + kSpin;
  Peer& from = peer_of(peer);
  std::unique_lock lock(mutex_);
  const auto come = [&] { return failure_ != nullptr || from.signals >= count; };
  while (!come() && peer != rank() && std::chrono::steady_clock::now() < spin_end) serve(peer);
  if (!changed_.wait_until(lock, deadline, come))
    throw Timeout("wait_signal: " + std::to_string(from.signals) + " of " + std::to_string(count) +
                  " signals of rank " + std::to_string(peer) + " have come within " + base::format_duration(patience) +
                  (options.label.empty() ? "" : " (" + std::string(options.label) + ")"));
  if (from.signals < count) std::rethrow_exception(failure_);
  from.signals -= count;
}

void Window::close() {
  check("close", rank(), 0, 0);
  tried_to_close_ = true;
  std::vector<Work> works;
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) works.push_back(send({.kind = Message::Kind::close}, peer, nullptr, {.label = "close"}));
  for (Work& work : works) work.wait();
  std::unique_lock lock(mutex_);
  std::string late;
  const auto closed = [&] {
    late.clear();
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank() && !(peer_of(peer).closed && peer_of(peer).arrivals.empty()))
        late += (late.empty() ? "" : ", ") + std::to_string(peer);
    return failure_ != nullptr || late.empty();
  };
  if (!changed_.wait_until(lock, base::deadline_after(channel_->timeout()), closed))
    throw Timeout("window: rank " + late + " has not closed it within " + base::format_duration(channel_->timeout()));
  if (failure_) std::rethrow_exception(failure_);
  open_ = false;
}

/// Takes the messages of a rank that have come, and receives the next one.
void Window::serve(int rank) noexcept {
  Peer& from = peer_of(rank);
  try {
    for (;;) {
      if (from.closed) return;
      if (from.receiving) {
        if (!from.receive.done()) return;
        from.receiving = false;
        from.receive.wait();  // throws its error
        take_message(rank);
      }
      if (from.closed || failure_) return;
      const View next{&from.message, sizeof from.message, DType::u8, {}};
      from.receive = channel_->recv(next, rank, {.timeout = kNoLimit, .label = "window", .tag = kMessageTag});
      from.receiving = true;
      if (from.receive.done()) continue;
      from.receive.on_done([this, rank](const std::exception_ptr&) {
        const std::lock_guard lock(mutex_);
        serve(rank);
      });
      return;
    }
  } catch (...) {
    fail(std::current_exception());
  }
}

void Window::take_message(int rank) {
  Peer& from = peer_of(rank);
  const Message message = from.message;
  const std::size_t mine = memory_.bytes();
  if (message.offset > mine || message.bytes > mine - message.offset)
    throw base::Mismatch("window: rank " + std::to_string(rank) + " accesses " + std::to_string(message.bytes) +
                         " bytes at " + std::to_string(message.offset) + " of " + std::to_string(mine));
  const View part{at(message.offset), message.bytes, DType::u8, {}};
  switch (message.kind) {
    case Message::Kind::put: {
      if (message.bytes <= kInline) {
        std::memcpy(part.data, message.data.data(), message.bytes);
        return;
      }
      Peer::Arrival& arrival = from.arrivals.emplace_back();
      Work work = channel_->recv(part, rank, {.label = "put", .tag = kPutTag});
      work.on_done([this, &from, &arrival](const std::exception_ptr& error) {
        const std::lock_guard lock(mutex_);
        if (error) return fail(error);
        arrival.done = true;
        finish_arrivals(from);
      });
      work.detach();
      return;
    }
    case Message::Kind::get:
      channel_->send(part, rank, {.label = "get", .tag = kGetTag}).detach();
      return;
    case Message::Kind::signal:
      from.arrivals.push_back({.is_signal = true});
      finish_arrivals(from);
      return;
    case Message::Kind::close:
      from.closed = true;
      changed_.notify_all();
  }
}

/// Signals count once all that was put before them has arrived.
void Window::finish_arrivals(Peer& from) noexcept {
  while (!from.arrivals.empty() && (from.arrivals.front().is_signal || from.arrivals.front().done)) {
    if (from.arrivals.front().is_signal) ++from.signals;
    from.arrivals.pop_front();
  }
  changed_.notify_all();
}

void Window::fail(std::exception_ptr error) noexcept {
  if (!failure_) failure_ = std::move(error);
  channel_->abort("an operation of a window failed");  // no effect if the channel's own failure is the cause
  changed_.notify_all();
}

}  // namespace tessera::comm
