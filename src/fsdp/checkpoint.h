// Checkpoints: every rank writes its own ranges, any world size, strategy and wrapping reads them.
//
// A checkpoint is a folder `step-N` of a folder that all ranks see:
//
//   rank-R.safetensors   the ranges that rank R wrote: parameters (f32 masters where there are such) and the state
//                        of the optimizer, an n-th of all of it; and what the rank's collective plug-ins carry over.
//                        Rank 0's has its persistent buffers, too
//   rank-R.json          which ranges lie where, and an XXH3 of every 64 KiB block of that file
//   index.json           what is saved, by whom, the program's own attributes, and a hash of each rank's list
//
// It takes shape under the name `step-N.partial` and gets its own by a rename, when everything is on the disk: whatever
// dies meanwhile, a folder without that ending is whole. Of several the one that was finished last is taken.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/host_collectives.h"
#include "tessera/fsdp/engine.h"

namespace tessera::fsdp {

namespace checkpoint {
class DirectoryLock;
}

/// What the program saves beside the engine's state: seed, data position, the model's configuration...
using Attributes = std::map<std::string, std::string>;

struct CheckpointOptions {
  std::string folder;  ///< made where it doesn't exist; on a file system that all ranks share
  /// Older ones are removed when a new one is whole; 0: all stay. The newest whose values are all finite stays in any
  /// case, so that a training that diverges doesn't replace what it can be resumed from.
  int keep_last = 0;
  /// save() returns when the state has been copied, and a thread writes; else when it has been written.
  bool asynchronous = true;
  /// The most that copies of the state take while they wait for the disk; save() waits where it is more.
  std::size_t buffer_bytes = std::size_t{256} << 20;
};

/// Saves an engine's state. One per rank, used by the thread that trains; every function is collective.
///
/// A save that fails (a full disk, say) takes nothing with it but itself: it throws SystemError on every rank, with the
/// first cause and its rank, earlier checkpoints stay, and training may go on.
class TESSERA_API CheckpointWriter {
 public:
  /// All outlive it. `control`: of the engine's ranks, by the same numbers.
  CheckpointWriter(Engine& engine, comm::HostCollectives& control, CheckpointOptions options);
  ~CheckpointWriter();  ///< a save that nobody finished is given up
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Takes the folder for this run until the writer is gone, as the first save does otherwise. Throws InvalidUsage, on
  /// every rank, where another run has it and keeps it for 3 seconds: two that save and remove there would destroy each
  /// other's. SystemError where it can't be taken.
  void claim();
  /// Of the state after engine.steps() steps. One that is still being written is finished first.
  void save(const Attributes& attributes);
  /// Whether a save is being written; the same on every rank.
  bool saving() const;
  /// Between two steps: gives the checkpoint its name where every rank has written its part. True where that was now,
  /// or nothing is being written. Does not wait for a disk.
  bool poll();
  /// The same, but waits.
  void finish();

 private:
  class Save;
  bool settle(bool wait);
  std::string first_failure(const std::string& mine);
  void throw_first_failure(const std::string& mine);
  void lock_folder(std::chrono::milliseconds patience);

  Engine& engine_;
  comm::HostCollectives& control_;
  const CheckpointOptions options_;
  std::unique_ptr<checkpoint::DirectoryLock> lock_;  // on rank 0
  std::unique_ptr<Save> save_;
};

/// One tensor of a checkpoint.
struct CheckpointTensor {
  std::string name;  ///< of the parameter
  nn::Shape shape;
  int states = 0;                   ///< of the optimizer's values for each element; 0: the parameter was frozen
  std::uint64_t trained_since = 0;  ///< the step after which it began to be trained
};

/// A persistent buffer of a module, as rank 0 had it.
struct CheckpointBuffer {
  std::string name;
  nn::Shape shape;
  DType dtype = DType::f32;
};

/// An open checkpoint. Ranges that are read are checked block by block; each thread needs one of its own.
class TESSERA_API Checkpoint {
 public:
  /// `folder`: that of one step, or one that has several. Throws InvalidUsage that says what is missing or damaged.
  explicit Checkpoint(const std::string& folder);
  ~Checkpoint();
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  const std::string& folder() const;  ///< of the step
  std::uint64_t step() const;
  int ranks() const;  ///< that wrote it
  const std::string& strategy() const;
  bool finite() const;  ///< no value and no state of the optimizer is NaN or infinite
  std::optional<bool> replicas_apart() const;  ///< Engine::replicas_apart() of the run that saved, where it is known
  const Attributes& attributes() const;
  const std::vector<CheckpointTensor>& tensors() const;  ///< in byte order of their names
  const std::vector<CheckpointBuffer>& buffers() const;  ///< likewise

  static constexpr int kValue = -1;
  /// Elements `range` of a parameter (kValue) or of one of the optimizer's states of it, as f32. Throws InvalidUsage
  /// that names file and tensor where a block's hash differs.
  void read(const std::string& tensor, int what, nn::ElementRange range, float* out);
  /// All of a buffer, as it is. Throws InvalidUsage as read().
  void read_buffer(const std::string& name, void* out);
  /// What the collective plug-ins of a rank that wrote it carried over, as Engine::carried() names it.
  struct PluginStateEntry {
    std::string name;
    std::size_t count = 0;
    auto operator<=>(const PluginStateEntry&) const = default;  // NOLINT(modernize-use-nullptr): it means the 0 inside
  };
  std::vector<PluginStateEntry> plugin_state(int rank) const;  ///< in byte order of the names
  /// One of those. Throws InvalidUsage as read().
  void read_plugin_state(int rank, const std::string& name, float* out);
  /// Bytes of data read so far, whole blocks.
  std::uint64_t bytes_read() const;
  /// Reads everything and compares every hash; one line for each file and block that differs.
  std::vector<std::string> verify();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct RestoreOptions {
  bool optimizer = true;  ///< false: parameters only, the optimizer as at the beginning
  bool strict = true;     ///< false: what only one of model and checkpoint has stays as it is
};

/// What a restore that isn't strict left out, parameters and buffers by name, and what one can't bring back.
struct RestoreReport {
  std::vector<std::string> missing;     ///< in the checkpoint
  std::vector<std::string> unexpected;  ///< there, but not in the model
  /// One line where what collective plug-ins carried over was of another world, strategy or plug-in: they begin anew.
  std::string dropped;
};

/// Sets the engine's parameters, persistent buffers (of every rank, whoever speaks later), optimizer and steps(). Every
/// rank reads the ranges that it needs. Collective. Throws
/// InvalidUsage that names what is missing, unexpected, of another shape or of another optimizer; the engine is then as
/// it was. A block that turns out to be damaged is InvalidUsage too, but leaves the engine half restored.
TESSERA_API RestoreReport restore(Engine& engine, Checkpoint& checkpoint, RestoreOptions options = {});

/// The folder of the newest whole checkpoint in `folder`, or "" where there is none. Throws InvalidUsage where one is
/// damaged: it might be the newest.
TESSERA_API std::string latest_checkpoint(const std::string& folder);
/// The same of those whose values are all finite.
TESSERA_API std::string latest_finite_checkpoint(const std::string& folder);

}  // namespace tessera::fsdp
