#include "backends/mpi/collectives.h"

#include <algorithm>
#include <utility>

#include "tessera/base/fp_environment.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/kernels/reduce.h"

namespace tessera::comm::mpi {
namespace {

using Kind = ReduceOp::Kind;

template <std::size_t Type, std::size_t Which>
void combine(void* in, void* both, int* count, MPI_Datatype* /*type*/) {
  const std::array<const void*, 2> sources = {in, both};
  reduce_tree({static_cast<Kind>(Which), 0}, kDTypes[Type], sources, {}, both, static_cast<std::size_t>(*count));
}

using Row = std::array<MPI_User_function*, kReduceKinds>;

template <std::size_t Type, std::size_t... Which>
constexpr Row row_of(std::index_sequence<Which...> /*kinds*/) {
  return {combine<Type, Which>...};
}

template <std::size_t... Type>
constexpr std::array<Row, sizeof...(Type)> table(std::index_sequence<Type...> /*types*/) {
  return {row_of<Type>(std::make_index_sequence<kReduceKinds>{})...};
}

constexpr auto kFunctions = table(std::make_index_sequence<kDTypes.size()>{});

// Sizes from which on MPI is faster, in bytes of the larger buffer.
#if defined(OPEN_MPI)
constexpr std::size_t kLongGather = std::size_t{1} << 20;
#else
constexpr std::size_t kLongGather = std::size_t{4} << 20;
#endif
constexpr std::size_t kLongCopy = std::size_t{64} << 10;

class MpiNativeCommunicator final : public NativeCommunicator {
 public:
  MpiNativeCommunicator(const MpiCollectives& owner, MPI_Comm what, bool own) : comm(what), owner_(owner), own_(own) {}
  ~MpiNativeCommunicator() override {
    if (own_ && comm != MPI_COMM_NULL && !owner_.closed()) MPI_Comm_free(&comm);
  }
  MpiNativeCommunicator(const MpiNativeCommunicator&) = delete;
  MpiNativeCommunicator& operator=(const MpiNativeCommunicator&) = delete;
  void abandon() noexcept override { own_ = false; }

  MPI_Comm comm;

 private:
  const MpiCollectives& owner_;
  bool own_;
};

MPI_Comm comm_of(const NativeRequest& collective) {
  return static_cast<const MpiNativeCommunicator*>(collective.group)->comm;
}

}  // namespace

MPI_Datatype mpi_type(DType dtype) noexcept {
  const std::array<MPI_Datatype, kDTypes.size()> types = {MPI_FLOAT,    MPI_DOUBLE,   MPI_UINT16_T, MPI_UINT16_T,
                                                          MPI_INT8_T,   MPI_UINT8_T,  MPI_INT32_T,  MPI_INT64_T,
                                                          MPI_UINT32_T, MPI_UINT64_T, MPI_INT16_T,  MPI_UINT8_T};
  return types[static_cast<std::size_t>(dtype)];
}

MPI_Op MpiReduceOps::of(Kind kind, DType dtype) noexcept {
  const bool is_native = dtype == DType::f32 || dtype == DType::f64 || dtype == DType::i32 || dtype == DType::i64;
  if (kind == Kind::sum && is_native) return MPI_SUM;
  const auto type = static_cast<std::size_t>(dtype);
  const auto which = static_cast<std::size_t>(kind);
  MPI_Op& own = own_[type][which];
  constexpr int kCommutes = 1;
  if (own == MPI_OP_NULL) MPI_Op_create(kFunctions[type][which], kCommutes, &own);
  return own;
}

void MpiReduceOps::free() noexcept {
  for (auto& row : own_)
    for (MPI_Op& op : row)
      if (op != MPI_OP_NULL) MPI_Op_free(&op);
}

/// Starts the calls of one collective: one, or as many as its counts need.
class MpiCollectives::Issue {
 public:
  Issue(MpiCollectives& all, NativeRequest& what)
      : all_(all),
        what_(what),
        comm_(comm_of(what)),
        type_(mpi_type(what.dtype)),
        size_(size_of(what.dtype)),
        ranks_(all.settings_.ranks->mpi_rank.size()),
        rank_(static_cast<std::size_t>(all.settings_.rank)),
        at_root_(what.root == all.settings_.rank) {}

  void run() {
    if (what_.kind == OpKind::barrier) return call(MPI_Ibarrier(comm_, next()));
    const bool has_parts = parts_of_in(what_.kind) || parts_of_out(what_.kind);
    const std::size_t most = std::max<std::size_t>(all_.settings_.max_chunk / (size_ * (has_parts ? ranks_ : 1)), 1);
    if (what_.kind == OpKind::reduce_scatter && what_.count > most) return scatter_in_chunks(most);
    for (std::size_t offset = 0; offset < what_.count; offset += most)
      chunk(offset * size_, std::min(most, what_.count - offset));
  }

 private:
  MPI_Request* next() {
    all_.owners_.push_back(&what_);
    ++what_.pending;
    return &all_.requests_.emplace_back(MPI_REQUEST_NULL);
  }
  void call(int code) const { all_.settings_.good(code); }
  const std::byte* in(std::size_t offset) const { return what_.in == nullptr ? nullptr : what_.in + offset; }
  std::byte* out(std::size_t offset) const { return what_.out == nullptr ? nullptr : what_.out + offset; }
  MPI_Op operation() const { return all_.operations_.of(what_.reduce, what_.dtype); }

  /// Processes `count` elements from byte `offset` of every part, or of the whole.
  void chunk(std::size_t offset, std::size_t count) {
    const int n = static_cast<int>(count);
    const bool same = what_.in != nullptr && what_.in == what_.out;
    const void* const from = same ? MPI_IN_PLACE : in(offset);
    switch (what_.kind) {
      case OpKind::all_reduce:
        return call(MPI_Iallreduce(from, out(offset), n, type_, operation(), comm_, next()));
      case OpKind::reduce:
        return call(
            MPI_Ireduce(at_root_ ? from : in(offset), out(offset), n, type_, operation(), what_.root, comm_, next()));
      case OpKind::broadcast: {
        void* const data = at_root_ ? const_cast<std::byte*>(in(offset)) : out(offset);  // only read on the root
        return call(MPI_Ibcast(data, n, type_, what_.root, comm_, next()));
      }
      case OpKind::reduce_scatter:
        return call(MPI_Ireduce_scatter_block(in(offset), out(offset), n, type_, operation(), comm_, next()));
      default:
        break;
    }
    if (count == what_.count) return parts(offset, {n, n, type_});
    // One element of this type is a rank's chunk; the next one begins where the next part does.
    MPI_Datatype dense = MPI_DATATYPE_NULL;
    MPI_Datatype strided = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(n, type_, &dense);
    MPI_Type_create_resized(dense, 0, static_cast<MPI_Aint>(what_.count * size_), &strided);
    call(MPI_Type_commit(&strided));
    parts(offset, {n, 1, strided});
    MPI_Type_free(&dense);
    MPI_Type_free(&strided);  // takes effect when no operation uses it
  }

  struct Part {
    int alone = 0;    ///< elements of a chunk in the buffer that has one part
    int strided = 0;  ///< elements of `type` in the buffer that has them all
    MPI_Datatype type = MPI_DATATYPE_NULL;
  };
  void parts(std::size_t offset, const Part& part) {
    const std::size_t own = rank_ * what_.count * size_;
    const bool in_is_there = what_.out != nullptr && what_.in == what_.out + own;
    const bool out_is_there = what_.in != nullptr && what_.out == what_.in + own;
    switch (what_.kind) {
      case OpKind::all_gather:
        return call(MPI_Iallgather(in_is_there ? MPI_IN_PLACE : in(offset), part.alone, type_, out(offset),
                                   part.strided, part.type, comm_, next()));
      case OpKind::gather:
        return call(MPI_Igather(at_root_ && in_is_there ? MPI_IN_PLACE : in(offset), part.alone, type_, out(offset),
                                part.strided, part.type, what_.root, comm_, next()));
      case OpKind::scatter:
        return call(MPI_Iscatter(in(offset), part.strided, part.type,
                                 at_root_ && out_is_there ? MPI_IN_PLACE : out(offset), part.alone, type_, what_.root,
                                 comm_, next()));
      default:
        return call(
            MPI_Ialltoall(in(offset), part.strided, part.type, out(offset), part.strided, part.type, comm_, next()));
    }
  }

  /// MPI reduces whole parts only, so the chunk of each rank's part is reduced to that rank.
  void scatter_in_chunks(std::size_t most) {
    const std::size_t bytes = what_.count * size_;
    for (std::size_t owner = 0; owner < ranks_; ++owner)
      for (std::size_t offset = 0; offset < what_.count; offset += most)
        call(MPI_Ireduce(in(owner * bytes + offset * size_), owner == rank_ ? out(offset * size_) : nullptr,
                         static_cast<int>(std::min(most, what_.count - offset)), type_, operation(),
                         static_cast<int>(owner), comm_, next()));
  }

  MpiCollectives& all_;
  NativeRequest& what_;
  const MPI_Comm comm_;
  const MPI_Datatype type_;
  const std::size_t size_;
  const std::size_t ranks_;
  const std::size_t rank_;
  const bool at_root_;
};

/// Null unless MPI's ranks are in the order of the world: the non-blocking copy of a communicator keeps the order.
std::unique_ptr<NativeCommunicator> MpiCollectives::whole_world() {
  const std::vector<int>& mpi_rank = settings_.ranks->mpi_rank;
  if (closed_ || mpi_rank.empty()) return nullptr;
  for (std::size_t i = 0; i < mpi_rank.size(); ++i)
    if (mpi_rank[i] != static_cast<int>(i)) return nullptr;
  return std::make_unique<MpiNativeCommunicator>(*this, settings_.ranks->comm, false);
}

/// Measured with 2 ranks on one host: long data movement is faster in MPI; reductions are not, because the schedules
/// reduce directly from the arriving data.
bool MpiCollectives::prefers(const CollectiveSpec& spec) const noexcept {
  const std::size_t bytes = spec.count * size_of(spec.dtype);
  switch (spec.kind) {
    case OpKind::all_gather:
      return bytes >= kLongGather;
    case OpKind::broadcast:
    case OpKind::all_to_all:
      return bytes >= kLongCopy;
    default:
      return false;
  }
}

void MpiCollectives::start(NativeRequest& collective) noexcept {
  const base::FpEnvironment environment;
  collective.pending = 0;
  if (closed_) return;
  if (collective.copy != nullptr) return start_copy(collective);
  Issue(*this, collective).run();
}

/// Uses the only non-blocking way to create a communicator.
void MpiCollectives::start_copy(NativeRequest& collective) noexcept {
  auto made = std::make_unique<MpiNativeCommunicator>(*this, MPI_COMM_NULL, true);
  Copy copy{.owner = &collective};
  const ErrorsReturned here;
  copy.code = MPI_Comm_idup(comm_of(collective), &made->comm, &copy.request);
  *collective.copy = std::move(made);
  copies_.push_back(copy);
}

bool MpiCollectives::poll_copies() noexcept {
  if (copies_.empty()) return false;
  const ErrorsReturned here;
  bool moved = false;
  for (std::size_t i = 0; i < copies_.size();) {
    Copy& copy = copies_[i];
    int done = 0;
    if (copy.code == MPI_SUCCESS) copy.code = MPI_Test(&copy.request, &done, MPI_STATUS_IGNORE);
    if (copy.code == MPI_SUCCESS && done == 0) {
      ++i;
      continue;
    }
    const Copy ended = std::exchange(copy, copies_.back());
    copies_.pop_back();
    copy_ended(*ended.owner, ended.code);
    moved = true;
  }
  return moved;
}

/// If MPI has no communicator number left, the copy ends with an error, and the handle that MPI stored is invalid.
void MpiCollectives::copy_ended(NativeRequest& collective, int code) noexcept {
  std::unique_ptr<NativeCommunicator>& copy = *collective.copy;
  if (code == MPI_SUCCESS) {
    MPI_Comm_set_errhandler(static_cast<const MpiNativeCommunicator&>(*copy).comm, MPI_ERRORS_RETURN);
  } else {
    copy->abandon();
    copy.reset();
    if (!kSurvivesExhaustion) return settings_.failed(no_more_communicators(code));
  }
  collective.owner->native_done(collective);
}

void MpiCollectives::cancel(NativeRequest& collective) noexcept {
  if (closed_) return;
  const bool copying = std::ranges::any_of(copies_, [&](const Copy& c) { return c.owner == &collective; });
  // MPI still refers to the handle of the communicator that it creates.
  if (copying) [[maybe_unused]]
    const NativeCommunicator* leaked = collective.copy->release();
  if (copying || std::ranges::find(owners_, &collective) != owners_.end()) settings_.abandoned();
}

void MpiCollectives::request_done(std::size_t at) noexcept {
  NativeRequest& collective = *owners_[at];
  requests_[at] = requests_.back();
  requests_.pop_back();
  owners_[at] = owners_.back();
  owners_.pop_back();
  if (--collective.pending != 0) return;
  collective.owner->native_done(collective);
}

bool MpiCollectives::poll() noexcept {
  const bool moved = poll_copies();
  return poll_requests() || moved;
}

bool MpiCollectives::poll_requests() noexcept {
  if (requests_.empty()) return false;
  if (requests_.size() == 1) {
    int done = 0;
    if (!settings_.good(MPI_Test(requests_.data(), &done, MPI_STATUS_IGNORE)) || done == 0) return false;
    request_done(0);
    return true;
  }
  int ended = 0;
  done_.resize(requests_.size());
  if (!settings_.good(MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &ended, done_.data(),
                                   MPI_STATUSES_IGNORE)) ||
      ended <= 0)
    return false;
  std::sort(done_.begin(), done_.begin() + ended, std::greater<>());  // removing one moves only later ones
  for (int i = 0; i < ended; ++i) request_done(static_cast<std::size_t>(done_[static_cast<std::size_t>(i)]));
  return true;
}

void MpiCollectives::close(bool leave) noexcept {
  if (std::exchange(closed_, true)) return;
  requests_.clear();
  owners_.clear();
  copies_.clear();
  if (!leave) operations_.free();
}

}  // namespace tessera::comm::mpi
