"""backends: buffers kept for peers, traffic, and failures of peers."""

from table import mistake

SHM = (r"^comm\.Over/Failure", r"^comm\.(Communicator|Unchecked|Progress|Traffic|Deadlines|Over/Communicator|Algorithms)", r"^comm_processes$", r"^conformance\.")
STORES = r"^shm\.ShmStoreChoice"
TCP = (r"^tcp\.",)
MPI = (r"^mpi\.",)
UCX = (r"^ucx\.",)
NCCL = (r"^nccl\.",)
WINDOWS = (r"^nccl\.NcclWindows",)
DEVICES = (r"^nccl\.NcclDevices",)
DECORATORS = (r"^comm_decorators\.",)

MISTAKES = [
    mistake("stores-never-stream", "backends/shm/store_choice.cpp", "  times.streams = median(times.last[0]) >", "  times.streams = false && median(times.last[0]) >", STORES, "ranks without a common cache wait for each line"),
    mistake("stores-other-kind-not-tried", "backends/shm/store_choice.cpp", "  return (++times.blocks % kTriedOneOf == 0) != times.streams;", "  return times.streams;", STORES, "cores that move are not noticed"),
    mistake("stores-of-all-sizes-as-one", "backends/shm/store_choice.cpp", "static_cast<std::size_t>(std::bit_width(operation_bytes))", "std::size_t{operation_bytes > 0}", STORES, "large operations decide for small ones"),
    mistake("bound-ranks-share-a-core", "backends/shm/runtime.cpp", "  for (const cpu_set_t& one : cores) CPU_OR(&all, &all, &one);", "  CPU_OR(&all, &all, &cores.front());", r"^shm\.ShmRuntime", "ranks that a launcher binds count as oversubscribed"),
    # shm
    mistake("shm-window-reused-after-failure", "backends/shm/arena.cpp", "  if (quarantined_) return;\n", "", r"^comm\.FailedWindows", "a late peer reads another tensor"),
    mistake("shm-failure-not-quarantined", "backends/shm/shm_group.cpp", "  runtime_->arena().quarantine();\n", "", r"^comm\.FailedWindows", "a late peer reads another tensor"),
    mistake("shm-message-tiles-freed-early", "backends/shm/shm_group.cpp", "  messages_.retire(retired);\n", "", r"^comm\.EarlyExit", "a message changes before it is received if its sender closes the communicator"),
    mistake("shm-idle-kept", "backends/shm/arena.cpp", "  if (idle_ <= live_peak_ / kIdlePart + kIdleBytes) return;", "  if (idle_ <= live_peak_ + kIdlePart * kIdleBytes) return;", r"^comm\.Communicator", "idle windows are never released"),
    mistake("shm-trims-live-pages", "backends/shm/arena.cpp", "    const std::size_t first = round_up(it->first, page);", "    const std::size_t first = it->first / page * page;", (*SHM, r"^base\."), "pages in use are discarded"),
    mistake("shm-mismatch-not-compared", "backends/shm/announcements.cpp", "same &= members_.of(k).slot(op.sequence).fingerprint == op.fingerprint;", "same &= members_.of(k).slot(op.sequence).fingerprint == op.fingerprint || !members_.runtime().options().check;",
            r"^comm\.Unchecked", "ranks with different calls read beyond their windows"),
    mistake("shm-read-after-failure", "backends/shm/shm_group.cpp", "  if (adopt_peer_failure()) return true;\n  complete(", "  complete(", r"^comm\.FailureInRead", "data read from an aborted peer counts as valid, and a call after its abort succeeds"),
    mistake("shm-tag-ignored", "backends/shm/point_to_point.cpp", "      if (op->call.tag == tag) {", "      if (tag >= 0) {", SHM, "a receive takes a message of another tag"),
    mistake("shm-early-kept", "backends/shm/point_to_point.cpp", "    if (early_ > 0) moved |= deliver_early(k);\n", "", SHM, "a message that came early is never delivered"),
    mistake("shm-counts-itself", "backends/shm/member_blocks.h", "  if (!op.internal && reader != rank_) sent_.add(", "  if (reader != rank_) sent_.add(", SHM, "traffic includes the messages of a split"),
    mistake("shm-timeout-names-all", "backends/shm/shm_group.cpp", "queued ? op.sequence - 1 : op.sequence,", "queued ? op.sequence : op.sequence + 1,", SHM, "a timeout also names ranks that are waiting"),
    mistake("shm-pings-not-answered", "backends/shm/peer_monitor.cpp", "    members_.runtime().engine().reply_to_pings();  // the others may be asking at the same moment\n", "", (*SHM, r"^tools\.failure$"), "two ranks that time out together report each other as silent"),
    mistake("shm-ends-below-a-poll", "backends/shm/runtime.cpp", "  if (engine_ != nullptr) engine_->remove(*this);  // its thread polls this object, which reads `engine_`\n", "", r"^shm\.", "a world is polled after its engine is gone"),
    mistake("shm-last-words-lost", "backends/shm/runtime.cpp", "  words.copy(own.first_failure_cause.data(),\n             own.first_failure_cause.size() - 1);  // the rest is zero from the beginning\n", "", SHM, "a rank that has left does not report the failure after which it left"),
    mistake("shm-slots-freed-early", "backends/shm/runtime.cpp", "->done.value.load() == one.members;", "->done.value.load() != 0;",
            SHM, "a communicator's ports are reused while a peer reads them"),
    mistake("shm-tile-overwritten", "backends/shm/tiled_collective.cpp", "op.staged >= slowest_reader(op, false) + kTiles)) return false;", "op.staged >= slowest_reader(op, false) + 2 * kTiles)) return false;", SHM, "a tile is written while it is read"),
    mistake("shm-slot-taken-early", "backends/shm/announcements.cpp", "    if (k != members_.rank() && last(k) + 1 < op.sequence) return false;\n", "", (r"^comm\.Communicator", *SHM), "a root that runs ahead overwrites a payload that a rank has not read"),
    mistake("shm-copy-in-one-place", "backends/shm/collective_buffers.cpp", "  Buffer& copy = copy_of(op);", "  Buffer& copy = copies_[0];", (r"^comm\.Communicator", *SHM), "peers read a buffer without a copy, or one of another operation"),
    mistake("shm-readers-not-awaited", "backends/shm/operation.h", "(layout.sends_input() && !copied_in) ||", "(layout.sends_input() && !copied_in && false) ||", (r"^comm\.Communicator", r"^comm_processes$", *SHM), "a call returns while peers still read its input"),
    mistake("shm-results-not-awaited", "backends/shm/operation.h", "(layout.second_half() && !copied_out);", "(layout.second_half() && !copied_out && false);", (r"^comm\.Communicator", r"^comm_processes$", *SHM), "a call returns while peers still read its output"),
    mistake("shm-reader-says-nothing", "backends/shm/tiled_collective.cpp", "    op.any_awaits |= (slot.hints & kAwaitsReaders) != 0;\n", "", (r"^comm\.Communicator", *SHM), "a rank that waits for its readers waits forever"),
    mistake("shm-copy-counted-twice", "backends/shm/tiled_collective.cpp", "    if (!owner.copied_out) members_.count_read(", "    members_.count_read(", (r"^comm\.Traffic", *SHM), "traffic counts the results of an all_reduce twice"),
    mistake("shm-copy-not-counted", "backends/shm/collective_buffers.cpp", "    if (op.copied_in) members_.count_sent(", "    if (false) members_.count_sent(", (r"^comm\.Traffic", *SHM), "traffic lacks copied bytes"),
    mistake("shm-rounds-of-a-copy-ignored", "backends/shm/tiled_collective.cpp", "std::min({op.rounds_for(whole.count), there, taken", "std::min({op.rounds_for(whole.count), taken", (r"^comm\.Communicator", r"^comm_processes$", *SHM), "a reader overtakes the rank that writes the copy"),
    mistake("shm-mismatch-without-the-others", "backends/shm/announcements.cpp", "    op.everyone = true;  // waits for all ranks, to report what each calls\n", "", (r"^comm\.", *SHM), "a rank that waits for few ranks never reports a mismatch"),
    mistake("shm-deadline-never-set", "src/comm/core/polled_group.cpp", "  op.start_deadline();\n  engine_.wake", "  engine_.wake", (r"^comm\.", *SHM), "an operation waits forever"),
    mistake("shm-large-symmetric", "backends/shm/shm_group.cpp", "  if (named == kSymmetric && bytes > kEagerBytes)", "  if (named == kSymmetric && bytes > 1000 * kEagerBytes)", (*SHM, r"^comm\.Algorithms"), "TESSERA_ALGO=symmetric is ignored for large sizes"),

    # tcp
    mistake("tcp-credit-not-told", "backends/tcp/send_queue.cpp", "  credit_queued_ = true;\n  queue_control(FrameKind::credit, {});", "  credit_queued_ = true;", TCP, "a stream in one direction stops"),
    mistake("tcp-credit-for-unsent", "backends/tcp/send_queue.cpp", "  if (cost > eager_sent_) return false;\n", "", TCP, "a peer may claim credit that it did not receive"),
    mistake("tcp-cancelled-credit-kept", "backends/tcp/send_queue.cpp", "      eager_sent_ -= eager_cost(outbound.bytes);\n", "", TCP, "canceled messages use up credit"),
    mistake("tcp-cancelled-memory-sent", "backends/tcp/send_queue.cpp", "  outbound.data = outbound.own.get();\n  outbound.first = first;", "  outbound.first = 0 * first;", TCP, "memory that its owner has reused is sent"),
    mistake("tcp-flood-unbounded", "backends/tcp/receive_queue.cpp", "  if (held_ + eager_cost(frame.total) > kCredit) return", "  if (held_ > 1000 * kCredit) return", TCP, "a flood of messages from a peer uses all memory"),
    mistake("tcp-frame-number-not-in-code", "backends/tcp/frame_seal.h", "void next_frame() noexcept { ++number_; }", "void next_frame() noexcept { number_ += 0; }", TCP, "a frame that is repeated or moved on the way has a right code"),
    mistake("tcp-payload-code-ignored", "backends/tcp/frame_decoder.cpp", "  if (seal_.payloads() && !verified_ && !same(seal_.payload_code(), frame_.payload_code))", "  if (seal_.payloads() && !verified_ && same(seal_.payload_code(), {}))", TCP, "a large payload that is changed on the way is accepted"),
    mistake("tcp-held-not-given-back", "backends/tcp/receive_queue.cpp", "    held_ -= eager_cost(total);\n", "", TCP, "after some megabytes small messages are rejected"),
    mistake("tcp-given-up-kept", "backends/tcp/receive_queue.cpp", "  inbound.cancelled = discarded_.has(tag);\n", "", TCP, "messages of failed communicators stay in memory"),
    mistake("tcp-cancelled-receive-written", "backends/tcp/receive_queue.cpp", "  inbound.message = nullptr;\n  inbound.cancelled = true;  //", "  inbound.cancelled = true;  //", TCP, "memory that its owner has reused is written"),
    mistake("tcp-room-not-watched", "backends/tcp/peer_connection.cpp", "      watch_room(stream, true);\n", "", TCP, "a full connection continues only after the next 100 ms"),
    mistake("tcp-sent-not-counted", "backends/tcp/send_queue.cpp", "      source->message->sent->fetch_add(payload, std::memory_order_relaxed);", "      source->message->sent->fetch_add(0 * payload, std::memory_order_relaxed);", (*TCP, r"^conformance\.", r"^comm\."), "traffic counts nothing"),
    mistake("tcp-eof-is-orderly", "backends/tcp/peer_connection.cpp", "  if (!stream.reader.close_received()) return drop(why);", "  if (!stream.reader.close_received() && why.empty()) return drop(why);", TCP, "a rank whose connection ends is not detected as lost"),
    mistake("tcp-closes-too-early", "backends/tcp/transport.cpp", "  while (!failed && !failed_ && !may_go() && Clock::now() < until) {", "  while (false && !failed && !may_go() && Clock::now() < until) {", TCP, "the last messages of an exiting rank are lost"),
    mistake("tcp-loss-told-twice", "backends/tcp/transport.cpp", "    reported_[r] = true;\n", "", TCP, "every poll reports a lost peer again"),

    # ucx and mpi
    mistake("ucx-cancelled-as-done", "backends/ucx/link.cpp", "cancelled_as_ == UCS_ERR_CANCELED ? CancelResult::not_started : CancelResult::completed", "CancelResult::completed", UCX, "a message for a canceled receive finds no receive"),
    mistake("ucx-peer-error-swallowed", "backends/ucx/link.cpp", "  peer.link->events_.peer_lost(peer.rank, \"ucx: \" + text_of(status));", "  static_cast<void>(peer), static_cast<void>(status);", UCX, "a broken connection is reported only at the deadline"),
    mistake("mpi-pieces-misplaced", "backends/mpi/collectives.cpp", "      chunk(offset * size_, std::min(most, what_.count - offset));", "      chunk(offset, std::min(most, what_.count - offset));", MPI, "collectives above MPI's counts place data wrongly"),
    mistake("mpi-long-parts-misplaced", "backends/mpi/link.cpp", "  std::byte* const data = message.data + bulk.moved;", "  std::byte* const data = message.data;", MPI, "messages above MPI's counts overwrite their beginning"),
    mistake("mpi-given-up-collective-runs-on", "backends/mpi/collectives.cpp", "std::ranges::find(owners_, &collective) != owners_.end()) settings_.abandoned();", "owners_.empty()) settings_.abandoned();", MPI, "MPI writes memory that its owner has reused"),
    mistake("mpi-communicator-leaks", "backends/mpi/collectives.cpp", "    if (own_ && comm != MPI_COMM_NULL && !owner_.closed()) MPI_Comm_free(&comm);", "    if (own_ && comm == MPI_COMM_NULL) MPI_Comm_free(&comm);", MPI, "a program that splits often exhausts MPI's communicators"),
    mistake("mpi-error-ends-the-process", "backends/mpi/collectives.cpp", "    MPI_Comm_set_errhandler(static_cast<const MpiNativeCommunicator&>(*copy).comm, MPI_ERRORS_RETURN);", "    static_cast<void>(copy);", MPI, "an MPI error in a sub-communicator ends the process"),

    # nccl, with the tests' replacement of the vendor's library
    mistake("nccl-bytes-not-counted", "backends/nccl/nccl_group.cpp", "  count(call);\n  return work;", "  return work;", NCCL, "traffic counts nothing"),
    mistake("nccl-not-after-its-stream", "backends/nccl/operation_stream.cpp", "  if (comes_after_) before_.make_stream_wait(stream_.get());\n", "", NCCL, "data that a stream has not yet written is sent"),
    mistake("nccl-remote-error-at-once", "backends/nccl/nccl_comm.cpp", "      if (Clock::now() < *shared_->suspect_since + kVerdictTime) return Health::suspect;\n", "", NCCL, "a dead rank is reported in the vendor's words, not by its number"),
    mistake("nccl-wrong-member-named", "backends/nccl/stream_group.cpp", "  fail({FailureKind::peer_lost, what + rank_name(member) + \" died\"}, true);", "  fail({FailureKind::peer_lost, what + rank_name(rank()) + \" died\"}, true);", (*NCCL, r"^comm_processes$", r"^comm\."), "a rank reports itself as dead"),
    mistake("nccl-one-thread-for-all", "backends/nccl/call_threads.cpp", "return !worker->busy; });", "return worker != nullptr; });", NCCL, "ranks that use two communicators in two orders wait for each other"),
    mistake("nccl-thread-for-each-call", "backends/nccl/call_threads.cpp", "return !worker->busy; });", "return worker == nullptr; });", NCCL, "each call starts a thread"),
    mistake("nccl-call-keeps-what-it-used", "backends/nccl/call_threads.cpp", "    call->what_ = nullptr;  // before the caller goes on: it may hold what the caller then destroys\n", "", NCCL, "a call's handle keeps a communicator"),
    mistake("nccl-abort-beside-calls", "backends/nccl/nccl_comm.cpp", "constexpr auto kCallTime = 100ms;", "constexpr auto kCallTime = 0ms;", NCCL, "a communicator is freed while a call uses it"),
    mistake("nccl-not-revoked", "backends/nccl/nccl_comm.cpp", "      api.ncclCommRevoke(shared->handle(), 0);\n", "", NCCL, "a communicator is freed while a call uses it"),
    mistake("nccl-blocking-without-revoke", "backends/nccl/nccl_comm.cpp", "  config.blocking = api.ncclCommRevoke != nullptr ? 1 : 0;", "  config.blocking = api.ncclCommRevoke != nullptr ? 1 : 1;", NCCL, "with an older library a call that waits for a dead rank never returns"),
    mistake("nccl-freed-beside-a-call", "backends/nccl/nccl_comm.cpp", "    shared->leaked = shared->calling && shared->ready;", "    shared->leaked = shared->calling && shared->ready && false;", NCCL, "a communicator is freed while a call uses it"),
    mistake("nccl-duplicates-share-nothing", "backends/nccl/nccl_comm.cpp", "  config.splitShare = 1;", "  config.splitShare = 0;", NCCL, "each communicator has connections, buffers and threads of its own"),
    mistake("nccl-family-lives-on", "backends/nccl/stream_group.cpp", "return group != &first; });", "return group == nullptr; });", NCCL, "an aborted family completes operations with wrong results"),
    mistake("nccl-aborts-before-all-have-failed", "backends/nccl/stream_group.cpp", "  for (std::size_t i = 0; i < all.size(); ++i) fails[i] = all[i]->mark_failed(failure, ended[i]);\n  for (std::size_t i = 0; i < all.size(); ++i)\n    if (fails[i]) all[i]->comm_.abort();\n", "  for (std::size_t i = 0; i < all.size(); ++i) {\n    fails[i] = all[i]->mark_failed(failure, ended[i]);\n    if (fails[i]) all[i]->comm_.abort();\n    std::this_thread::sleep_for(400ms);\n  }\n", NCCL, "an aborted family completes operations with wrong results"),
    mistake("nccl-non-blocking-not-awaited", "backends/nccl/nccl_comm.cpp", "    if (state != ncclInProgress) return;\n", "    return;\n", NCCL, "with NCCL_COMM_BLOCKING=0 a communicator is used before it exists"),
    mistake("nccl-closing-not-heard", "backends/nccl/stream_group.cpp", "  closed_[static_cast<std::size_t>(member)] = called;", "  static_cast<void>(called);", NCCL, "a rank that waits for a closed rank waits until the deadline"),
    mistake("nccl-registration-left", "backends/nccl/registered_memory.cpp", "    for (const auto& [group, handle] : blocks_[data].handles) group->deregister_memory(handle);\n", "", NCCL, "memory is freed while it is registered with the vendor's library"),
    mistake("nccl-later-groups-unregistered", "backends/nccl/registered_memory.cpp", "  for (auto& [data, block] : blocks_) enter(group, data, block);\n}\n\nvoid RegisteredMemory::remove", "}\n\nvoid RegisteredMemory::remove", NCCL, "later splits are slower"),
    mistake("nccl-window-left", "backends/nccl/registered_memory.cpp", "    for (const auto& [group, window] : blocks_[data].windows) group->deregister_window(window.handle);\n", "", WINDOWS, "memory is freed while it is a symmetric window"),
    mistake("nccl-window-outlives-its-group", "backends/nccl/registered_memory.cpp", "    if (const auto window = block.windows.extract(&group)) group.deregister_window(window.mapped().handle);\n", "", WINDOWS, "a window is deregistered from a communicator that is gone"),
    mistake("nccl-window-sizes-not-compared", "backends/nccl/symmetric_allocator.cpp", "  compare_sizes(votes);\n", "", WINDOWS, "ranks that need different sizes make the vendor's library hang"),
    mistake("nccl-released-windows-not-compared", "backends/nccl/symmetric_allocator.cpp", "  compare_windows(votes);\n", "", WINDOWS, "reductions add wrong memory after the ranks have released different windows"),
    mistake("nccl-window-of-some-ranks", "backends/nccl/symmetric_allocator.cpp", "    if (has_windows_ && !vote.problem.empty()) use_no_windows(vote.problem);", "    if (has_windows_ && !mine.problem.empty()) use_no_windows(vote.problem);", WINDOWS, "some ranks use a window that others lack"),
    mistake("nccl-lone-failure-waits", "backends/nccl/symmetric_allocator.cpp", "problem.empty() ? until : std::min(until, Clock::now() + kOthersFailWithin)", "until", WINDOWS, "a rank without a window waits until the deadline for those inside the vendor's library"),
    mistake("nccl-places-not-compared", "backends/nccl/nccl_group.cpp", " + describe_places(call);", ";", WINDOWS, "checked mode misses ranks that gather to different places"),
    mistake("nccl-copy-engines-for-all", "backends/nccl/nccl_group.cpp", "  if (options.for_gathers && runtime_->copy_engines())", "  if ((options.for_gathers || true) && runtime_->copy_engines())", WINDOWS, "communicators that reduce have the policy for gathers"),
    mistake("decorator-memory-not-symmetric", "src/comm/core/decorator.h", "    return inner_->allocate_symmetric(bytes, kind, use);", "    return inner_->allocate(bytes, kind, use);", (*WINDOWS, *DECORATORS), "communicators around another one lose symmetric windows"),
    mistake("decorator-waits-on-host", "src/comm/core/decorator.h", "{ forward_after(*inner_, stream); }", "{ Communicator::do_after(stream); }", DECORATORS, "the host waits for a stream that a device could wait for"),
    mistake("nccl-restores-device-never-chosen", "backends/nccl/cuda_objects.cpp", "  if (before_ >= 0 && has_context(api_, before_)) ", "  if (before_ >= 0 && (has_context(api_, before_) || true)) ", DEVICES, "each rank has a context on GPU 0"),
    mistake("nccl-restores-no-device", "backends/nccl/cuda_objects.cpp", "  if (before_ >= 0 && has_context(api_, before_)) ", "  if (before_ >= 0 && !has_context(api_, before_)) ", DEVICES, "the program's thread has another device after a call"),
    mistake("nccl-calls-on-device-0", "backends/nccl/runtime.cpp", "      calls_([&api, index = device_.index] { check_cuda(api, api.cudaSetDevice(index), \"cudaSetDevice\"); }),\n", "", DEVICES, "the vendor's library is called on GPU 0"),
    mistake("nccl-events-queried-on-device-0", "backends/nccl/stream_group.cpp", "  if (!in_flight_.empty()) guard.emplace(api_, runtime_->device(), std::nothrow);\n", "", DEVICES, "a thread that waits creates a context on GPU 0"),
    mistake("nccl-ends-on-device-0", "backends/nccl/nccl_group.cpp", "    const DeviceGuard guard(api, device, std::nothrow);\n    delete group;", "    delete group;", DEVICES, "a thread that closes a communicator creates a context on GPU 0"),
    mistake("nccl-memory-freed-on-device-0", "backends/nccl/registered_memory.cpp", "  const DeviceGuard guard(api_, device_, std::nothrow);\n", "", DEVICES, "a thread that frees memory creates a context on GPU 0"),
    mistake("nccl-copy-engines-by-default", "backends/nccl/backend.cpp", "  return wanted && parse_integer(*wanted, kCopyEngines.name, 0, 1) == 1;", "  return !wanted || parse_integer(*wanted, kCopyEngines.name, 0, 1) == 1;", WINDOWS, "a dead rank makes a gather last for ever, and with it the next free"),
    mistake("nccl-memory-freed-beside-a-gather", "backends/nccl/registered_memory.cpp", "  if (abandoned_->any()) return;\n", "", r"^nccl\.NcclAbandonedStreams", "a rank hangs in a free after a failure"),
    mistake("nccl-stream-freed-beside-a-gather", "backends/nccl/stream_group.cpp", "  if (runtime_->abandoned().any()) runtime_->abandoned().keep(std::move(stream_));\n", "", r"^nccl\.NcclAbandonedStreams", "a rank hangs in a free after a failure"),
    mistake("nccl-after-the-wrong-default-stream", "backends/nccl/backend.cpp", "      const DeviceGuard guard(group_->runtime().api(), device->device().index);\n", "", r"^nccl\.NcclStreams", "an operation fails, or does not wait, for data on a program's default stream"),
    mistake("nccl-wrong-default-stream-waits", "backends/nccl/operation.cpp", "  const DeviceGuard guard(nccl_.runtime().api(), device->device().index);  // as in NcclCommunicator::do_after()\n", "", r"^nccl\.NcclStreams", "a program's default stream uses data before it has come"),
    mistake("nccl-average-over-ranks", "backends/nccl/reduce_op.cpp", "  if (op.kind == Kind::avg && op.scalar != target.size) {", "  if (op.kind == Kind::avg && op.scalar == 1) {", NCCL, "averages over another number are wrong"),
    mistake("nccl-wrong-device", "backends/nccl/nccl_group.cpp", "    if (view.count != 0 && view.device.index != runtime_->device())", "    if (view.count != 0 && view.device.index < 0)", NCCL, "memory of another device is accepted"),
]
