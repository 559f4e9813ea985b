#include "tools/train/batch_options.h"

#include "tools/cli/validators.h"

namespace tessera::tools {

constexpr std::uint64_t kMax = 1ULL << 40;

void add_data_options(CLI::App& command, BatchOptions& o) {
  add_option(command, "--data", o.data,
             "text or token files to train on (default: the corpus of scripts/setup); training never reads their last "
             "tenth, which is left for --eval",
             list_of("FILE[,FILE]"));
  add_option(command, "--data-format", o.data_format,
             "format of --data: bytes of text, or headerless token ids of 16 or 32 bits",
             one_of({"bytes", "u16", "u32"}));
}

void add_batch_options(CLI::App& command, BatchOptions& o) {
  add_option(command, "--global-batch", o.global_batch,
             "sequences per optimizer step over all ranks and microbatches (default: 12, or the next number that "
             "they divide)",
             whole_number(1, kMax))
      ->each([&o](const std::string&) { o.batch_given = true; });
  add_option(command, "--seq-len", o.seq_len, "tokens per sequence (default: the model's context, at most 256)",
             whole_number(1, kMax));
}

void add_accumulation_options(CLI::App& command, BatchOptions& o) {
  add_option(command, "--accumulate", o.accumulate, "microbatches per optimizer step (gradient accumulation)",
             whole_number(1, kMax));
  add_option(command, "--reduce-when", o.reduce_when,
             "when --accumulate reduces gradients: every: in each microbatch (default); last: in the last one; "
             "scatter: reduce-scatter in each, all-reduce over replicas in the last",
             one_of({"every", "last", "scatter"}));
}

}  // namespace tessera::tools
