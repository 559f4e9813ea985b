#include "backends/shm/runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>

#include "backends/shm/shm_group.h"
#include "tessera/base/error.h"
#include "tessera/comm/kernels/reduce.h"
#include "tessera/comm/schedule.h"
#include "tessera/comm/transport/cma.h"

namespace tessera::comm::shm {
namespace {

Capabilities make_capabilities() {
  Capabilities all;
  all.backend = "shm";
  all.dtypes.assign(kDTypes.begin(), kDTypes.end());
  all.message_tags = all.any_source = true;
  all.memory = {MemoryKind::host};
  all.shares_memory = true;
  all.splits_share_memory = true;
  for (std::size_t i = 0; i < kOpKinds; ++i) {
    const auto kind = static_cast<OpKind>(i);
    all.algorithms.push_back(std::string(name_of(kind)) + "=direct");
    if (kind == OpKind::all_reduce) all.algorithms.emplace_back("all_reduce=symmetric");
  }
  return all;
}

/// Throws InvalidUsage; for an algorithm of the other backends it says so.
AlgorithmTable make_table(const std::string& text, const std::vector<std::string>& own) {
  try {
    return {text, own};
  } catch (const InvalidUsage&) {
    std::vector<std::string> all = known_algorithms(false);
    all.insert(all.end(), own.begin(), own.end());
    [[maybe_unused]] const AlgorithmTable exists(text, all);
    throw InvalidUsage("TESSERA_ALGO: '" + text +
                       "' names an algorithm that exchanges messages; shm reads the other ranks' memory and has only "
                       "direct and all_reduce=symmetric: use these or another backend, such as tcp");
  }
}

/// Size of one core's last-level cache; the C library reports the sum over all cores, and a wrong value in virtual
/// machines.
std::size_t last_level_cache() {
  for (const char* level : {"3", "2"}) {
    std::ifstream file(std::string("/sys/devices/system/cpu/cpu0/cache/index") + level + "/size");
    std::size_t kib = 0;
    char unit = 0;
    if (file >> kib >> unit && unit == 'K' && kib > 0) return kib << 10;
  }
  return std::size_t{32} << 20;
}

constexpr int kStagingColor = kColors / 2;

std::size_t board_bytes(int ranks) { return sizeof(RankRecord) * static_cast<std::size_t>(ranks); }

/// The cores that each rank may run on; ranks that are threads of one process share them.
std::vector<cpu_set_t> cores_of(Bootstrap& ranks) {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  if (::sched_getaffinity(0, sizeof mine, &mine) != 0)  // more cores than a set holds
    std::fill_n(reinterpret_cast<char*>(&mine), sizeof mine, '\xFF');
  std::vector<cpu_set_t> all{mine};
  if (ranks.in_process()) return all;
  for (const std::string& blob : ranks.all_gather({reinterpret_cast<const char*>(&mine), sizeof mine}))
    if (blob.size() == sizeof mine) std::memcpy(&all.emplace_back(), blob.data(), sizeof mine);
  return all;
}

std::shared_ptr<Mapping> plain_board(int ranks) {
  const std::size_t bytes = board_bytes(ranks);
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw system_error("shm: can't map the control block");
  return std::make_shared<Mapping>(data, bytes);
}

}  // namespace

ShmRuntime::ShmRuntime(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options)
    : rank_(bootstrap->rank()),
      options_(options),
      capabilities_(make_capabilities()),
      algorithms_(make_table(options.algorithms, capabilities_.algorithms)),
      cache_bytes_(last_level_cache()),
      bootstrap_(std::move(bootstrap)) {
  if (static_cast<std::size_t>(bootstrap_->size()) > kMaxRanks)
    throw Unsupported("shm: a world has at most " + std::to_string(kMaxRanks) + " ranks, not " +
                      std::to_string(bootstrap_->size()));
  require_one_host(*bootstrap_, "shm", "; use backend auto");
}

std::shared_ptr<ShmRuntime> ShmRuntime::make(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options) {
  std::shared_ptr<ShmRuntime> host(new ShmRuntime(std::move(bootstrap), options));
  host->connect();
  return host;
}

bool ShmRuntime::enough_cores(std::span<const cpu_set_t> cores, int ranks) {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const cpu_set_t& one : cores) CPU_OR(&all, &all, &one);
  return CPU_COUNT(&all) >= ranks;
}

void ShmRuntime::connect() {
  Bootstrap& others = *bootstrap_;
  const int ranks = others.size();
  const bool processes = !others.in_process();
  windows_.own = Arena::make_windows(processes, rank_, ranks);
  staging_.own = Arena::make_staging(processes, kStagingColor + rank_, ranks);
  processes ? exchange_segments() : exchange_objects();
  if (processes) uses_cma_ = std::ranges::count(cma_processes(others), 0) == 1;  // this rank itself
  board(rank_).pid.store(::getpid());
  has_own_cores_ = enough_cores(cores_of(others), ranks);
  engine_ = std::make_unique<ProgressEngine>(
      board(rank_).bell,
      ProgressOptions{.thread = options_.progress_thread && ranks > 1, .oversubscribed = !has_own_cores_});
  engine_->add(*this);
}

bool ShmRuntime::poll(bool with_health_check) noexcept {
  bool moved = false;
  ActiveGroups& active = engine_->active_groups();
  active.update();
  for (ShmGroup* group = active.first<ShmGroup>(); group != nullptr; group = ActiveGroups::after(*group))
    moved |= group->poll(with_health_check);
  return moved;
}

void ShmRuntime::exchange_objects() {
  Bootstrap& others = *bootstrap_;
  for (Arenas* arenas : {&windows_, &staging_})
    for (const auto& object : others.all_gather_objects(arenas->own->mapping()))
      arenas->mapped.push_back(std::static_pointer_cast<Mapping>(object));
  const std::shared_ptr<Mapping> board = rank_ == 0 ? plain_board(others.size()) : nullptr;
  board_ = std::static_pointer_cast<Mapping>(others.all_gather_objects(board).front());
}

/// All use the board of rank 0.
void ShmRuntime::exchange_segments() {
  std::vector<int> own = {windows_.own->descriptor(), staging_.own->descriptor()};
  UniqueFd board;
  if (rank_ == 0) board = make_segment("tessera-board", board_bytes(bootstrap_->size()));
  if (board) own.push_back(board.get());
  bootstrap_->all_gather_fds(own, [&](int r, std::span<UniqueFd> theirs) {
    if (theirs.size() != (r == 0 ? 3 : 2)) throw SystemError("shm: another rank shares other segments than this one");
    windows_.mapped.push_back(r == rank_ ? windows_.own->mapping() : map_segment(theirs[0].get(), false, r));
    staging_.mapped.push_back(r == rank_ ? staging_.own->mapping()
                                         : map_segment(theirs[1].get(), true, kStagingColor + r));
    if (r == 0) board_ = map_segment(theirs[2].get(), true);
  });
}

void ShmRuntime::watch() {
  channel_ = bootstrap_->open_channel("shm", {.lost =
                                                  [this](int lost) {
                                                    if (board(lost).left.load() != 0) return;
                                                    board(lost).lost.store(1);
                                                    for (int r = 0; r < size(); ++r) ring(board(r).bell);
                                                  },
                                              .message = {}});
}

ShmRuntime::~ShmRuntime() {
  channel_.reset();                                // its thread uses the board
  if (engine_ != nullptr) engine_->remove(*this);  // its thread polls this object, which reads `engine_`
  engine_.reset();
}

void ShmRuntime::leave() noexcept {
  RankRecord& own = board(rank_);
  const std::string words = options_.first_failure_cause();
  words.copy(own.first_failure_cause.data(),
             own.first_failure_cause.size() - 1);  // the rest is zero from the beginning
  own.left.store(1);
  for (int r = 0; r < size(); ++r) ring(board(r).bell);
}

void ShmRuntime::retire(RetiredBlock retired) {
  const std::lock_guard lock(retired_mutex_);
  retired_.push_back(std::move(retired));
  std::erase_if(retired_, [](const RetiredBlock& one) {
    return reinterpret_cast<const ControlHeader*>(one.head.data())->done.value.load() == one.members;
  });
}

}  // namespace tessera::comm::shm
