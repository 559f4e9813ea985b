#include "tools/cli/words.h"

#include <algorithm>
#include <array>
#include <string>

#include "tessera/base/error.h"

namespace tessera::tools {
namespace {

constexpr std::array kWords = {
    Word{"activation",
         "A tensor that forward leaves behind for backward. Its memory grows with the tokens of a rank, not with "
         "its parameters, and no sharding strategy divides it."},
    Word{"all-reduce", "Adds the values of all ranks, here mostly to average them; every rank gets the whole result."},
    Word{"backward", "Computes the gradients, from the loss and the last unit to the first."},
    Word{"bitwise equal",
         "Identical to the last bit: the same losses and the same final parameters, not merely close ones."},
    Word{"contention", "Forward and backward take longer because ranks compete for cores, caches or memory."},
    Word{"control", "Small messages of the run itself, such as the mean of the loss; no model state."},
    Word{"copies",
         "Time that the computing thread spends on issuing operations and on copying to and from flat buffers."},
    Word{"exposed", "Communication that computation waits for, so that it lengthens the step."},
    Word{"formula", "Bytes by closed formula from the sizes of the units, to compare with the counted ones."},
    Word{"forward", "Computes the loss, from the first unit to the last."},
    Word{"free", "To drop the other ranks' shards of a unit: to reshard it."},
    Word{"gather", "Every rank receives the other ranks' shards of a unit."},
    Word{"gathered", "A unit of which a rank holds all shards for a while, its own and those of the other ranks."},
    Word{"hidden", "Communication that takes place while the rank computes, so that it costs no time."},
    Word{"in flight", "A transfer that was called and whose result no computation has used yet."},
    Word{"kept after forward", "A unit that stays gathered between forward and backward, and is gathered only once."},
    Word{"late", "Waiting for a rank that calls an operation later than the others."},
    Word{"latency", "Time that a message takes whatever its length; many small messages pay it many times."},
    Word{"mesh", "The ranks as a grid of replicas x shards."},
    Word{"model state", "Parameters, gradients and optimizer state: what a rank keeps from step to step."},
    Word{"optimizer",
         "The update of the parameters, and the state that it keeps for each of them: two numbers for AdamW."},
    Word{"overlap", "How much communication is hidden: less of it makes the step longer."},
    Word{"padding", "Elements that make a unit divisible into equal shards; they are sent and kept like others."},
    Word{"prefetch", "To gather the next unit while this one computes."},
    Word{"queued", "Called, but earlier transfers still occupy the link."},
    Word{"rank", "One process of the job. All ranks run the same program on different data."},
    Word{"reduce-scatter", "Averages the gradients of a unit over the ranks; each rank gets its shard of the mean."},
    Word{"replicate", "To keep a whole copy on several ranks; the mesh axis along which copies lie."},
    Word{"reserved", "Bytes that memory pools hold beyond the live ones."},
    Word{"reshard", "To free the other ranks' shards of a gathered unit; the rank's own shard stays."},
    Word{"rest", "The part of a step that belongs to no other term."},
    Word{"root",
         "The unit of everything that no other unit has, such as embeddings; it stays gathered for the whole step."},
    Word{"shard", "A rank's equal part of a unit. Every rank has a shard of every unit."},
    Word{"step", "One update of the parameters: forward, backward and optimizer."},
    Word{"transport", "Waiting after the link is through: waking up, or peers without a core."},
    Word{"unit", "Modules that are gathered, computed and freed together. No rank owns a unit."},
    Word{"unsharded", "The same as gathered."},
    Word{"update", "The optimizer changes the parameters in the shards that a rank keeps."},
    Word{"volume", "Time that the bytes occupy the link: bytes over bandwidth."},
    Word{"wait", "Computation stands still until a transfer is done: exposed communication."},
    Word{"wire bytes", "Bytes that a rank sends, as counted by the communicator."},
};

}  // namespace

std::span<const Word> words() { return kWords; }

std::string_view meaning_of(std::string_view word) {
  const auto found = std::find_if(kWords.begin(), kWords.end(), [&](const Word& w) { return w.name == word; });
  if (found == kWords.end()) throw base::InvalidUsage("the glossary has no '" + std::string(word) + "'");
  return found->meaning;
}

}  // namespace tessera::tools
