#include "backends/ucx/link.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <initializer_list>
#include <optional>
#include <utility>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/thread.h"

namespace tessera::comm::ucx {
namespace {

using namespace std::chrono_literals;
// Two threads of one rank may sleep here, and one may consume the wake-up that was meant for both.
constexpr std::chrono::nanoseconds kMaxSleep = 10ms;
constexpr std::chrono::nanoseconds kNap = 50us;  // if nothing would wake the thread
constexpr unsigned kAmId = 0;                    // the id of our active message
constexpr int kSlotBits = 44;                    // a tag is the sender's rank and the slot
constexpr auto kPatience = 1s;                   // for a message in flight that is cancelled
constexpr auto kClosing = 5s;                    // for peers that close at the same time
constexpr int kStepsPerPoll = 16;                // of UCX's progress

std::string text_of(ucs_status_t status) { return ucs_status_string(status); }

void check(ucs_status_t status, const std::string& what) {
  if (status != UCS_OK) throw BackendError("ucx: " + what + ": " + text_of(status));
}

ucp_tag_t bulk_tag(int sender, std::uint64_t slot) {
  return static_cast<ucp_tag_t>(sender) << kSlotBits | (slot & ((std::uint64_t{1} << kSlotBits) - 1));
}

ucp_request_param_t host_memory(void* user_data) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.user_data = user_data;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  return param;
}

bool names_any(const std::string& transports, std::initializer_list<const char*> names) {
  return std::ranges::any_of(names, [&](const char* name) {
    return ("," + transports + ",").find("," + std::string(name) + ",") != std::string::npos;
  });
}

/// Reads UCX's settings. UCX excludes shared memory where peers may fail, unless it is configured otherwise, as here.
/// It has no authentication, and listens at all interfaces; ranks of one host need the loopback interface only.
ucp_config_t* read_config(bool one_host) {
  ucp_config_t* config = nullptr;
  check(ucp_config_read(nullptr, nullptr, &config), "reading UCX_* settings");
  const auto is_set = [](const char* name) { return read_foreign_env(name).has_value(); };
  if (may_share_memory() && !is_set("UCX_MM_ERROR_HANDLING") && !is_set("UCX_POSIX_ERROR_HANDLING") &&
      !is_set("UCX_SYSV_ERROR_HANDLING"))
    ucp_config_modify(config, "MM_ERROR_HANDLING", "y");
  const std::string transports = read_foreign_env("UCX_TLS").value_or("all");
  if (one_host && !is_set("UCX_NET_DEVICES") && (transports.starts_with("^") || names_any(transports, {"all", "tcp"})))
    ucp_config_modify(config, "NET_DEVICES", "lo");
  return config;
}

}  // namespace

UcpWaiter::UcpWaiter(ucp_worker_h worker, const int& unsent)
    : worker_(worker), unsent_(unsent), wake_fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!wake_fd_) throw system_error("ucx: eventfd");
  if (ucp_worker_get_efd(worker, &worker_fd_) != UCS_OK) worker_fd_ = -1;  // poll() skips negative ones
}

bool UcpWaiter::arm() noexcept {
  eventfd_t wakes = 0;
  ::eventfd_read(wake_fd_.get(), &wakes);
  nap_ = worker_ == nullptr || worker_fd_ < 0 || unsent_ > 0;
  if (nap_) return true;
  return ucp_worker_arm(worker_) != UCS_ERR_BUSY;  // busy: data has arrived
}

void UcpWaiter::sleep(std::chrono::nanoseconds at_most) noexcept {
  const auto time = std::clamp<std::chrono::nanoseconds>(at_most, 0ns, nap_ ? kNap : kMaxSleep);
  const timespec limit{0, static_cast<long>(time.count())};
  pollfd entries[] = {{worker_fd_, POLLIN, 0}, {wake_fd_.get(), POLLIN, 0}};
  ::ppoll(entries, 2, &limit, nullptr);
}

void UcpWaiter::wake() noexcept { ::eventfd_write(wake_fd_.get(), 1); }

bool may_share_memory() {
  const std::string transports = read_foreign_env("UCX_TLS").value_or("all");
  if (transports.starts_with("^")) return transports.find("sm") == std::string::npos;
  return names_any(transports, {"all", "sm", "shm", "mm", "posix", "sysv"});
}

UcxLink::UcxLink(Bootstrap& bootstrap, LinkEvents& events)
    : events_(events), rank_(bootstrap.rank()), peers_(static_cast<std::size_t>(bootstrap.size())) {
  const std::vector<std::string>& hosts = bootstrap.hosts();
  const bool one_host = std::ranges::count(hosts, hosts.front()) == bootstrap.size();
  ucp_config_t* const config = read_config(one_host);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.estimated_num_eps = static_cast<std::size_t>(bootstrap.size());
  params.name = "tessera";
  std::optional<base::SignalBlock> no_signals(std::in_place);  // in the threads that UCX starts
  const ucs_status_t made = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  check(made, "no usable transport (see UCX_TLS)");
  try {
    make_worker();
    no_signals.reset();  // what follows waits for other ranks
    connect(bootstrap);
  } catch (...) {
    destroy();
    throw;
  }
}

void UcxLink::make_worker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // several threads, one at a time, under the engine's lock
  const ucs_status_t made = ucp_worker_create(context_, &params, &worker_);
  const bool full = made == UCS_ERR_NO_RESOURCE || made == UCS_ERR_NO_MEMORY;
  check(made, full && may_share_memory() ? "creating a worker (if /dev/shm is full, make room, or use UCX_TLS=tcp,self)"
                                         : "creating a worker");
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kAmId;
  handler.cb = on_am;
  handler.arg = this;
  check(ucp_worker_set_am_recv_handler(worker_, &handler), "setting the handler");
  waiter_ = std::make_unique<UcpWaiter>(worker_, unsent_);
}

void UcxLink::connect(Bootstrap& bootstrap) {
  ucp_address_t* address = nullptr;
  std::size_t length = 0;
  check(ucp_worker_get_address(worker_, &address, &length), "getting the worker's address");
  const std::string own(reinterpret_cast<const char*>(address), length);
  ucp_worker_release_address(worker_, address);
  const std::vector<std::string> all = bootstrap.all_gather(own);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    UcpPeer& peer = peers_[rank];
    peer.link = this;
    peer.rank = static_cast<int>(rank);
    ucp_ep_params_t params{};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(all[rank].data());
    // Without this mode, UCX ends the process if a peer that it reads from has died, and no peer can be abandoned.
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = on_peer_error;
    params.err_handler.arg = &peer;
    check(ucp_ep_create(worker_, &params, &peer.endpoint),
          "no connection to rank " + std::to_string(rank) + " (see UCX_TLS)");
  }
}

/// The endpoint remains, and rejects all operations, until it is closed.
void UcxLink::on_peer_error(void* arg, ucp_ep_h, ucs_status_t status) {
  const UcpPeer& peer = *static_cast<UcpPeer*>(arg);
  peer.link->events_.peer_lost(peer.rank, "ucx: " + text_of(status));
}

void UcxLink::destroy() noexcept {
  if (waiter_) waiter_->stop();
  if (worker_ != nullptr) ucp_worker_destroy(std::exchange(worker_, nullptr));
  if (context_ != nullptr) ucp_cleanup(std::exchange(context_, nullptr));
}

UcxLink::AmBuffer* UcxLink::acquire_am() {
  if (free_ams_ == nullptr) {
    ams_.push_back(std::make_unique_for_overwrite<AmBuffer>());
    ams_.back()->link = this;
    ams_.back()->next = nullptr;
    free_ams_ = ams_.back().get();
  }
  return std::exchange(free_ams_, free_ams_->next);
}

void UcxLink::send_am(int peer, const AmHeader& header, std::span<const std::byte> payload) noexcept {
  const ucp_ep_h endpoint = peers_[static_cast<std::size_t>(peer)].endpoint;
  if (endpoint == nullptr) return;    // abandoned
  AmBuffer* const am = acquire_am();  // UCX may read it until the callback
  am->header = header;
  if (!payload.empty()) std::memcpy(am->payload, payload.data(), payload.size());
  ucp_request_param_t param = host_memory(am);
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = on_am_sent;
  ++pending_ams_;
  ++unsent_;
  const ucs_status_ptr_t request =
      ucp_am_send_nbx(endpoint, kAmId, &am->header, sizeof(AmHeader), am->payload, payload.size(), &param);
  if (!UCS_PTR_IS_ERR(request) && request != nullptr) return;
  am->next = std::exchange(free_ams_, am);
  --pending_ams_;
  --unsent_;
  if (request != nullptr) events_.peer_lost(peer, "ucx: " + text_of(UCS_PTR_STATUS(request)));
}

void UcxLink::on_am_sent(void* request, ucs_status_t status, void* user_data) {
  AmBuffer* const am = static_cast<AmBuffer*>(user_data);
  UcxLink& self = *am->link;
  am->next = std::exchange(self.free_ams_, am);
  --self.pending_ams_;
  --self.unsent_;
  ucp_request_free(request);
  (void)status;  // on_peer_error() reports it
}

ucs_status_t UcxLink::on_am(void* self, const void* header, std::size_t header_length, void* data, std::size_t length,
                            const ucp_am_recv_param_t*) {
  AmHeader own;  // the received header may be unaligned
  if (header_length != sizeof(own)) return UCS_OK;
  std::memcpy(&own, header, sizeof(own));
  static_cast<UcxLink*>(self)->events_.on_am(own, {static_cast<const std::byte*>(data), length});
  return UCS_OK;
}

UcxLink::BulkTransfer& UcxLink::acquire_bulk(Message& message, bool receives) {
  if (free_bulks_ == nullptr) {
    bulks_.push_back(std::make_unique<BulkTransfer>());
    free_bulks_ = bulks_.back().get();
  }
  BulkTransfer* const bulk = std::exchange(free_bulks_, free_bulks_->next);
  *bulk = {.link = this, .message = &message, .receives = receives};
  unsent_ += receives ? 0 : 1;
  message.handle = bulk;
  return *bulk;
}

void UcxLink::send_bulk(Message& message, std::uint64_t slot) noexcept {
  const ucp_ep_h endpoint = peers_[static_cast<std::size_t>(message.peer)].endpoint;
  if (endpoint == nullptr) return events_.bulk_failed(message, "ucx: the connection was closed");
  BulkTransfer& bulk = acquire_bulk(message, false);
  ucp_request_param_t param = host_memory(&bulk);
  param.cb.send = on_bulk_sent;
  started(bulk, ucp_tag_send_nbx(endpoint, message.data, message.bytes, bulk_tag(rank_, slot), &param));
}

void UcxLink::receive_bulk(Message& message, std::uint64_t slot) noexcept {
  BulkTransfer& bulk = acquire_bulk(message, true);
  ucp_request_param_t param = host_memory(&bulk);
  param.cb.recv = on_bulk_received;
  started(bulk,
          ucp_tag_recv_nbx(worker_, message.data, message.bytes, bulk_tag(message.peer, slot), ~ucp_tag_t{0}, &param));
}

/// UCX has accepted the operation or already completed it.
void UcxLink::started(BulkTransfer& bulk, ucs_status_ptr_t request) noexcept {
  if (request != nullptr && !UCS_PTR_IS_ERR(request)) {
    bulk.request = request;
  } else {
    bulk_ended(bulk, request == nullptr ? UCS_OK : UCS_PTR_STATUS(request));
  }
}

void UcxLink::on_bulk_sent(void* request, ucs_status_t status, void* user_data) {
  ucp_request_free(request);
  BulkTransfer& bulk = *static_cast<BulkTransfer*>(user_data);
  bulk.link->bulk_ended(bulk, status);
}

void UcxLink::on_bulk_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t*, void* user_data) {
  on_bulk_sent(request, status, user_data);
}

void UcxLink::bulk_ended(BulkTransfer& bulk, ucs_status_t status) noexcept {
  Message& message = *bulk.message;
  bulk.next = std::exchange(free_bulks_, &bulk);
  unsent_ -= bulk.receives ? 0 : 1;
  message.handle = nullptr;
  if (&message == cancelling_) {
    cancelled_as_ = status;
  } else if (status == UCS_OK) {
    events_.bulk_done(message);
  } else {
    events_.bulk_failed(message, "ucx: " + text_of(status));
  }
}

template <class Done>
bool UcxLink::progress_until(Clock::time_point until, Done done) noexcept {
  while (!done()) {
    if (ucp_worker_progress(worker_) != 0) continue;
    if (Clock::now() >= until) return false;
    ::sched_yield();
  }
  return true;
}

/// A receive without a message is cancelled. Any other message moves between two ranks that both poll, so it completes
/// soon; if it doesn't, the peer is abandoned with all that is in flight.
Link::CancelResult UcxLink::cancel_bulk(Message& message) noexcept {
  cancelling_ = &message;
  cancelled_as_ = UCS_OK;
  const auto ended = [&] { return message.handle == nullptr; };
  if (static_cast<BulkTransfer*>(message.handle)->receives)
    ucp_request_cancel(worker_, static_cast<BulkTransfer*>(message.handle)->request);
  bool good = progress_until(Clock::now() + kPatience, ended);
  if (!good) {
    close_endpoints({&peers_[static_cast<std::size_t>(message.peer)], 1}, UCP_EP_CLOSE_FLAG_FORCE);
    good = progress_until(Clock::now() + kPatience, ended);
    events_.peer_lost(message.peer, "ucx: it did not finish a message that was under way");
    cancelled_as_ = UCS_OK;
  }
  cancelling_ = nullptr;
  if (!good) return CancelResult::unsafe;
  return cancelled_as_ == UCS_ERR_CANCELED ? CancelResult::not_started : CancelResult::completed;
}

bool UcxLink::poll(bool) noexcept {
  bool moved = false;
  for (int step = 0; step < kStepsPerPoll && ucp_worker_progress(worker_) != 0; ++step) moved = true;
  return moved;
}

void UcxLink::close_endpoints(std::span<UcpPeer> peers, unsigned flags) noexcept {
  std::vector<ucs_status_ptr_t> closing;
  for (UcpPeer& peer : peers) {
    if (peer.endpoint == nullptr) continue;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = flags;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(std::exchange(peer.endpoint, nullptr), &param);
    if (request != nullptr && !UCS_PTR_IS_ERR(request)) closing.push_back(request);
  }
  const auto until = Clock::now() + (flags == 0 ? kClosing : kPatience);
  for (const ucs_status_ptr_t request : closing) {
    progress_until(until, [&] { return ucp_request_check_status(request) != UCS_INPROGRESS; });
    ucp_request_free(request);
  }
}

void UcxLink::close(CloseMode how) noexcept {
  if (worker_ == nullptr) return;
  if (how == CloseMode::abortive) {
    close_endpoints(peers_, UCP_EP_CLOSE_FLAG_FORCE);
  } else {
    close_endpoints(peers_, 0);  // flushes what is under way
  }
  destroy();
}

}  // namespace tessera::comm::ucx
