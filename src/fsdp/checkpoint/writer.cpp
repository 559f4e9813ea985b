// Saving: the collective part, around each rank's file.
#include <algorithm>
#include <array>
#include <filesystem>

#include "tessera/base/atomic_file.h"
#include "tessera/fsdp/checkpoint/format.h"
#include "tessera/fsdp/checkpoint/shard_file_writer.h"

namespace tessera::fsdp {

using checkpoint::ShardFileWriter;
namespace fs = std::filesystem;

namespace {

constexpr const char* kLatest = "latest";

/// Renames first: a partially removed directory then has no checkpoint's name.
void remove_step(const fs::path& path) {
  fs::path away = path;
  if (!path.string().ends_with(checkpoint::kPartial)) {
    away += std::string(".removed") + checkpoint::kPartial;
    fs::remove_all(away);
    fs::rename(path, away);
  }
  fs::remove_all(away);
}

/// Calls function(slice, data, whether `data` is in host memory) for everything that this rank writes, always in the
/// same order.
template <class Function>
void for_each_slice(Engine& engine, const Function& function) {
  engine.state().for_each_shard([&](const ShardRange& own) {
    function(
        checkpoint::TensorSlice{
            .tensor = own.parameter.name(), .what = own.state, .range = own.range, .dtype = own.dtype},
        own.data, own.offloaded);
  });
  for (const CollectivePlugin::State& state : engine.state().plugin_state())
    function(checkpoint::TensorSlice{.tensor = state.name,
                                     .what = checkpoint::kPluginState,
                                     .range = {0, static_cast<std::int64_t>(state.count)}},
             state.data, false);
  if (engine.mesh().rank() != 0) return;
  for (const auto& buffer : engine.state().buffers())
    if (buffer->persistent() && buffer->count() > 0)
      function(checkpoint::TensorSlice{.tensor = buffer->name(),
                                       .what = checkpoint::kBuffer,
                                       .range = {0, buffer->count()},
                                       .dtype = buffer->dtype()},
               buffer->data(), false);
}

std::vector<checkpoint::TensorSlice> slices_of(Engine& engine) {
  std::vector<checkpoint::TensorSlice> slices;
  for_each_slice(engine, [&](checkpoint::TensorSlice slice, const void*, bool) { slices.push_back(std::move(slice)); });
  return slices;
}

std::vector<CheckpointTensor> tensors_of(Engine& engine) {
  std::vector<CheckpointTensor> tensors;
  for (const auto& parameter : engine.state().parameters())
    tensors.push_back({parameter->name(), parameter->shape(),
                       parameter->requires_grad() ? engine.state().optimizer_slots() : 0,
                       engine.state().trained_since(*parameter)});
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return tensors;
}

std::vector<CheckpointBuffer> buffers_of(Engine& engine) {
  std::vector<CheckpointBuffer> buffers;
  for (const auto& buffer : engine.state().buffers())
    if (buffer->persistent()) buffers.push_back({buffer->name(), buffer->shape(), buffer->dtype()});
  std::sort(buffers.begin(), buffers.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return buffers;
}

/// Runs `work` and returns the reason of its failure, or "".
template <class Work>
std::string failure_of(Work&& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

/// A save in progress.
class CheckpointWriter::Save {
 public:
  Save(const CheckpointOptions& options, checkpoint::Index index)
      : options_(options),
        index_(std::move(index)),
        final_(fs::path(options.directory) / checkpoint::step_name(index_.step)),
        partial_(final_.string() + checkpoint::kPartial) {}

  std::uint64_t step() const { return index_.step; }
  ShardFileWriter& file() { return *file_; }
  bool begun() const { return file_ != nullptr; }

  /// Called on rank 0, before other ranks begin.
  void make_directory() {
    for (const auto& entry : fs::directory_iterator(options_.directory)) {  // left by earlier failures
      const std::string name = entry.path().filename().string();
      const bool begun = name.rfind("step-", 0) == 0 && name.ends_with(checkpoint::kPartial);
      if (begun || name.rfind(std::string(kLatest) + ".tmp-", 0) == 0) fs::remove_all(entry.path());
    }
    const checkpoint::StepList steps = checkpoint::find_steps(options_.directory);
    index_.sequence = steps.whole.empty() ? 1 : steps.whole.back().index.sequence + 1;
    fs::create_directory(partial_);
  }

  void begin(int rank, Engine& engine) {
    // A synchronous save needs only enough buffers to keep the disk busy; they stay in the caches.
    const std::size_t buffer = options_.asynchronous ? options_.buffer_bytes : 4 * ShardFileWriter::kChunk;
    file_ = std::make_unique<ShardFileWriter>(partial_.string(), rank, slices_of(engine), buffer);
  }

  void copy(Engine& engine) {
    const bool on_host = engine.model().runtime().device_runtime().host_accessible();
    engine.model().runtime().stream().synchronize();  // pending writes to the state are done
    for_each_slice(engine, [&](const checkpoint::TensorSlice& slice, const void* at, bool offloaded) {
      const auto* data = static_cast<const std::byte*>(at);
      std::size_t left = slice.bytes();
      // During a synchronous save the state does not change, so it is not copied.
      if (!options_.asynchronous && (on_host || offloaded)) return file_->append_lasting({data, left});
      while (left > 0) {
        const std::size_t bytes = std::min(left, ShardFileWriter::kChunk);
        const auto append = [&](const void* from) { file_->append(static_cast<const std::byte*>(from), bytes); };
        if (offloaded) {
          append(data);
        } else {
          engine.model().runtime().download(data, bytes, append);
        }
        data += bytes;
        left -= bytes;
      }
    });
    file_->end();
  }

  /// Called on rank 0 once every rank's file is on disk.
  void commit(std::vector<std::string> manifests, bool finite) {
    index_.finite = finite;
    index_.manifests = std::move(manifests);
    write_file_atomically((partial_ / checkpoint::kIndex).string(), to_text(index_));
    checkpoint::flush_directory(partial_.string());
    const fs::path old = final_.string() + checkpoint::kOld;
    const bool replaces = fs::exists(final_);
    if (replaces) {
      if (fs::exists(old)) remove_step(old);
      fs::rename(final_, old);
    }
    fs::rename(partial_, final_);
    checkpoint::flush_directory(options_.directory);
  }

  /// Called on rank 0 after commit(): what the checkpoint does not need.
  void tidy() const {
    const fs::path old = final_.string() + checkpoint::kOld;
    write_file_atomically((fs::path(options_.directory) / kLatest).string(), final_.filename().string() + "\n");
    if (fs::exists(old)) remove_step(old);
    remove_superseded();
  }

  void stop() { file_.reset(); }
  /// Called on rank 0 after a failure; the next save removes what cannot be removed now.
  void abandon() noexcept {
    std::error_code error;
    fs::remove_all(partial_, error);
  }

 private:
  void remove_superseded() const {
    if (options_.keep_last == 0) return;
    const checkpoint::StepList steps = checkpoint::find_steps(options_.directory);
    const checkpoint::FoundStep* finite = steps.newest_finite();
    for (std::size_t i = 0; i + static_cast<std::size_t>(options_.keep_last) < steps.whole.size(); ++i)
      if (&steps.whole[i] != finite) remove_step(steps.whole[i].path);
  }

  const CheckpointOptions& options_;
  checkpoint::Index index_;
  const fs::path final_, partial_;
  std::unique_ptr<ShardFileWriter> file_;
};

CheckpointWriter::CheckpointWriter(Engine& engine, comm::HostCollectives& control, CheckpointOptions options)
    : engine_(engine), control_(control), options_(std::move(options)) {
  if (options_.directory.empty()) throw InvalidUsage("checkpoint: no directory is given");
  if (options_.keep_last < 0)
    throw InvalidUsage("checkpoint: keep_last is " + std::to_string(options_.keep_last) +
                       ", needs 0 (keep all) or more");
}

CheckpointWriter::~CheckpointWriter() {
  if (save_ == nullptr) return;
  save_->stop();
  if (lock_ != nullptr) save_->abandon();
}

void CheckpointWriter::lock_directory(std::chrono::milliseconds patience) {
  if (lock_ == nullptr) lock_ = std::make_unique<checkpoint::DirectoryLock>(options_.directory, patience);
}

void CheckpointWriter::claim() {
  std::int32_t taken = 0;
  const auto lock = [&] {
    try {
      lock_directory(std::chrono::seconds(3));
    } catch (const InvalidUsage&) {
      taken = 1;
      throw;
    }
  };
  const std::string failure = first_failure(control_.rank() == 0 ? failure_of(lock) : "");
  if (failure.empty()) return;
  control_.all_reduce(&taken, 1, comm::ReduceOp::max(), "checkpoint");
  if (taken == 1) throw InvalidUsage(failure);
  throw SystemError(failure);
}

bool CheckpointWriter::saving() const { return save_ != nullptr; }

void CheckpointWriter::save(const Attributes& attributes) {
  finish();
  engine_.state().synchronize_buffers();  // rank 0's are stored
  save_ = std::make_unique<Save>(options_, checkpoint::Index{.step = engine_.steps(),
                                                             .sequence = 0,
                                                             .strategy = engine_.options().strategy.name,
                                                             .attributes = attributes,
                                                             .finite = true,
                                                             .apart = engine_.state().replicas_apart(),
                                                             .tensors = tensors_of(engine_),
                                                             .buffers = buffers_of(engine_),
                                                             .manifests = {}});
  const auto prepare = [&] {
    lock_directory({});
    save_->make_directory();
  };
  throw_first_failure(control_.rank() == 0 ? failure_of(prepare) : "");
  throw_first_failure(failure_of([&] { save_->begin(control_.rank(), engine_); }));
  throw_first_failure(failure_of([&] { save_->copy(engine_); }));
  if (!options_.asynchronous) finish();
}

bool CheckpointWriter::poll() { return finish_save(false); }
void CheckpointWriter::finish() { finish_save(true); }

bool CheckpointWriter::finish_save(bool wait) {
  if (save_ == nullptr) return true;
  if (wait) save_->file().await();
  const ShardFileWriter::State state = save_->file().state();
  // Minima over ranks: all have finished writing; none has failed; all values are finite.
  const bool written = state == ShardFileWriter::State::done;
  std::array<std::int32_t, 3> votes = {state == ShardFileWriter::State::writing ? 0 : 1,
                                       state == ShardFileWriter::State::failed ? 0 : 1,
                                       written && !save_->file().finite() ? 0 : 1};
  control_.all_reduce(votes.data(), votes.size(), comm::ReduceOp::min(), "checkpoint");
  if (votes[0] == 0 && votes[1] == 1) return false;
  throw_first_failure(save_->file().failure());

  constexpr std::size_t kHash = 32;
  std::vector<std::uint8_t> mine(save_->file().manifest_hash().begin(), save_->file().manifest_hash().end());
  mine.resize(kHash);
  std::vector<std::string> manifests;
  for (const auto& hash : control_.gather_all(mine)) manifests.emplace_back(hash.begin(), hash.end());
  throw_first_failure(control_.rank() == 0 ? failure_of([&] { save_->commit(manifests, votes[2] == 1); }) : "");
  throw_first_failure(control_.rank() == 0 ? failure_of([&] { save_->tidy(); }) : "",
                      "complete, but 'latest' or an older one could not be changed");
  save_.reset();
  return true;
}

/// The first nonempty failure by rank, on all ranks. Collective.
std::string CheckpointWriter::first_failure(const std::string& mine) {
  constexpr std::size_t kMax = 480;
  std::vector<std::uint8_t> text(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(std::min(mine.size(), kMax)));
  text.resize(kMax);
  const auto all = control_.gather_all(text);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank][0] == 0) continue;
    return "rank " + std::to_string(rank) + ": " +
           std::string(all[rank].begin(), std::find(all[rank].begin(), all[rank].end(), std::uint8_t{0}));
  }
  return "";
}

/// Throws on all ranks if `mine` is not empty on one; the checkpoint is then `outcome`. Collective.
void CheckpointWriter::throw_first_failure(const std::string& mine, const std::string& outcome) {
  const std::string failure = first_failure(mine);
  if (failure.empty()) return;
  const std::uint64_t step = save_->step();
  save_->stop();
  std::int32_t stopped = 1;
  control_.all_reduce(&stopped, 1, comm::ReduceOp::min(), "checkpoint");  // no rank writes there any more
  if (lock_ != nullptr) save_->abandon();
  save_.reset();
  throw SystemError("checkpoint of step " + std::to_string(step) + " is " + outcome + ": " + failure);
}

}  // namespace tessera::fsdp
