// Checkpoints: each rank writes its own ranges; any world size, strategy and wrapping can read them.
//
// A checkpoint is a directory `step-N` in a directory that all ranks share:
//
//   rank-R.safetensors   the ranges that rank R wrote, 1/n of everything: parameters (f32 master weights where they
//                        exist) and optimizer state; and the state of the rank's collective plug-ins. Rank 0's file
//                        also holds the persistent buffers
//   rank-R.json          manifest: the offsets of the ranges, and an XXH3 of every 64 KiB block of that file
//   index.json           the tensors, the writing ranks, the program's attributes, and a hash of each rank's manifest
//
// A save writes to `step-N.partial` and renames it to `step-N` once everything is on disk. A directory without that
// suffix is therefore complete after any crash. Of several checkpoints the one that was finished last is used.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/host_collectives.h"
#include "tessera/fsdp/engine.h"

namespace tessera::fsdp {

namespace checkpoint {
class DirectoryLock;
}

/// Attributes that the program saves beside the engine's state: seed, data position, the model's configuration...
using Attributes = std::map<std::string, std::string>;

/// Options of a CheckpointWriter.
struct CheckpointOptions {
  std::string directory;  ///< created if it does not exist; on a file system that all ranks share
  /// Number of checkpoints to keep: older ones are removed when a new one is complete; 0: keep all. The newest
  /// checkpoint whose values are all finite is always kept, so that a diverging training run does not replace the
  /// checkpoint that it can resume from.
  int keep_last = 0;
  /// true: save() returns once the state has been copied, and a thread writes it. false: save() returns once it is
  /// written.
  bool asynchronous = true;
  /// Upper bound on the copies of the state that wait for the disk; save() waits where it would be exceeded.
  std::size_t buffer_bytes = std::size_t{256} << 20;
};

/// Saves an engine's state. One per rank, used by the thread that trains; every function is collective.
///
/// A save that fails (for example on a full disk) throws SystemError on every rank, with the first cause and its rank.
/// It affects only itself: earlier checkpoints stay, and training may continue.
class TESSERA_API CheckpointWriter {
 public:
  /// `engine` and `control` outlive the writer. `control` spans the engine's ranks, with the same numbers.
  CheckpointWriter(Engine& engine, comm::HostCollectives& control, CheckpointOptions options);
  ~CheckpointWriter();  ///< discards a save that is not finished

  /// Locks the directory for this run until the writer is destroyed; otherwise the first save() does. Throws
  /// InvalidUsage on every rank if another run holds the lock for 3 seconds: two runs that save and remove in one
  /// directory would destroy each other's checkpoints. Throws SystemError where the lock cannot be acquired.
  void claim();
  /// Saves the state after engine.steps() steps. First finishes a save that is still being written.
  void save(const Attributes& attributes);
  /// Whether a save is being written; the same on every rank.
  bool saving() const;
  /// Called between two steps: commits the checkpoint by renaming it if every rank has written its file. Returns true
  /// if this call committed it, or if no save is in progress. Does not wait for the disk.
  bool poll();
  /// The same as poll(), but waits.
  void finish();

 private:
  class Save;
  bool finish_save(bool wait);
  std::string first_failure(const std::string& mine);
  void throw_first_failure(const std::string& mine, const std::string& outcome = "not written");
  void lock_directory(std::chrono::milliseconds patience);

  Engine& engine_;
  comm::HostCollectives& control_;
  const CheckpointOptions options_;
  std::unique_ptr<checkpoint::DirectoryLock> lock_;  // lock that rank 0 holds
  std::unique_ptr<Save> save_;
};

/// One tensor of a checkpoint.
struct CheckpointTensor {
  std::string name;                 ///< name of the parameter
  Shape shape;                      ///< shape of the whole parameter
  int states = 0;                   ///< optimizer states per element; 0: the parameter was frozen
  std::uint64_t trained_since = 0;  ///< step after which its training began
};

/// A persistent buffer of a module, with rank 0's values.
struct CheckpointBuffer {
  std::string name;          ///< canonical: "bn.running_mean"
  Shape shape;               ///< shape of the whole buffer; every rank has all of it
  DType dtype = DType::f32;  ///< dtype in which the values are stored
};

/// An open checkpoint for reading. Every block that is read is verified by its hash. Not thread-safe: one object per
/// thread.
class TESSERA_API Checkpoint {
 public:
  /// `directory`: the directory of one step, or one that contains several. Throws InvalidUsage that says what is
  /// missing or damaged.
  explicit Checkpoint(const std::string& directory);
  ~Checkpoint();

  const std::string& directory() const;        ///< directory of the step
  std::uint64_t step() const;                  ///< Engine::steps() when it was saved
  int ranks() const;                           ///< number of ranks that wrote it
  const std::string& strategy() const;         ///< Strategy::name of the run that saved; any strategy can read it
  bool finite() const;                         ///< no value and no optimizer state is NaN or infinite
  std::optional<bool> replicas_apart() const;  ///< ShardedState::replicas_apart() of the run that saved, where known
  const Attributes& attributes() const;        ///< attributes passed to CheckpointWriter::save()
  const std::vector<CheckpointTensor>& tensors() const;  ///< tensors in byte order of the names
  const std::vector<CheckpointBuffer>& buffers() const;  ///< likewise

  static constexpr int kValue = -1;  ///< `what` of read(): the parameter's values rather than an optimizer state
  /// Reads elements `range` of a parameter (kValue) or of one of its optimizer states, as f32. Throws InvalidUsage that
  /// names file and tensor where a block's hash differs.
  void read(const std::string& tensor, int what, ElementRange range, float* out);
  /// Reads a whole buffer in its own dtype. Throws InvalidUsage as read() does, and if `out` has another length.
  void read_buffer(const std::string& name, std::span<std::byte> out);
  /// State of the collective plug-ins of a rank that wrote the checkpoint, named as by ShardedState::plugin_state().
  struct PluginStateEntry {
    std::string name;       ///< CollectivePlugin::State::name
    std::size_t count = 0;  ///< f32 values
    /// Orders by name, then count.
    auto operator<=>(const PluginStateEntry&) const = default;  // NOLINT(modernize-use-nullptr): it means the 0 inside
  };
  std::vector<PluginStateEntry> plugin_state(int rank) const;  ///< entries in byte order of the names
  /// Reads one entry. Throws InvalidUsage as read() does.
  void read_plugin_state(int rank, const std::string& name, float* out);
  /// Bytes of data read so far, in whole blocks.
  std::uint64_t bytes_read() const;
  /// Reads everything and checks every hash; returns one line per file and block that differs.
  std::vector<std::string> verify();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// What restore() sets, and how strictly.
struct RestoreOptions {
  bool optimizer = true;  ///< false: parameters only; the optimizer is reset
  bool strict = true;     ///< false: tensors that only the model or only the checkpoint has are left unchanged
  /// Buffers for which that holds in any case, by name: state that a run can begin without.
  std::function<bool(std::string_view)> optional_buffers = {};
};

/// What a non-strict restore left out, parameters and buffers by name, and the state that it cannot restore.
struct RestoreReport {
  std::vector<std::string> missing;     ///< names that the checkpoint lacks
  std::vector<std::string> unexpected;  ///< names in the checkpoint that the model lacks
  /// One line where the saved plug-in state was from another world, strategy or plug-in: the plug-ins start with
  /// cleared state.
  std::string dropped;
};

/// Compares the names and shapes of a checkpoint's tensors and buffers with those of the model, as restore() does
/// first. Reads no data, and the model needs no memory. Throws InvalidUsage that names what differs.
/// `options.optimizer` has no effect.
TESSERA_API RestoreReport compare(const Module& model, const Checkpoint& checkpoint,
                                  const RestoreOptions& options = {});

/// Sets the engine's parameters, persistent buffers (on every rank, whatever BufferSync says), optimizer and steps().
/// Each rank reads only the ranges that it needs. Collective. Throws InvalidUsage that names tensors that are missing,
/// unexpected, or of another shape or another optimizer; the engine is then unchanged. A block that turns out to be
/// damaged is InvalidUsage too, but leaves the engine partly restored.
TESSERA_API RestoreReport restore(Engine& engine, Checkpoint& checkpoint, RestoreOptions options = {});

/// The directory of the newest complete checkpoint in `directory`, or "" if there is none. Throws InvalidUsage if any
/// is damaged: it might be the newest.
TESSERA_API std::string latest_checkpoint(const std::string& directory);
/// The same as latest_checkpoint(), among those whose values are all finite.
TESSERA_API std::string latest_finite_checkpoint(const std::string& directory);

}  // namespace tessera::fsdp
