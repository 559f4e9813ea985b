#include "tools/train/batch_options.h"

#include "tools/cli/validators.h"

namespace tessera::tools {

constexpr std::uint64_t kMax = 1ULL << 40;

void add_data_options(CLI::App& command, BatchOptions& o) {
  command
      .add_option(
          "--data", o.data,
          "text or token files to train on (default: the corpus of scripts/setup); training never reads their last "
          "tenth, which is left for --eval")
      ->type_name("FILE[,FILE]")
      ->delimiter(',');
  command
      .add_option("--data-format", o.data_format,
                  "format of --data: bytes of text, or headerless token ids of 16 or 32 bits")
      ->check(CLI::IsMember({"bytes", "u16", "u32"}))
      ->capture_default_str();
}

void add_batch_options(CLI::App& command, BatchOptions& o) {
  command
      .add_option("--global-batch", o.global_batch,
                  "sequences per optimizer step over all ranks and microbatches (default: 12, or the next number that "
                  "they divide)")
      ->transform(whole_number(1, kMax))
      ->each([&o](const std::string&) { o.batch_given = true; });
  command.add_option("--seq-len", o.seq_len, "tokens per sequence (default: the model's context, at most 256)")
      ->transform(whole_number(1, kMax));
}

void add_accumulation_options(CLI::App& command, BatchOptions& o) {
  command.add_option("--accumulate", o.accumulate, "microbatches per optimizer step (gradient accumulation)")
      ->transform(whole_number(1, kMax))
      ->capture_default_str();
  command
      .add_option("--reduce-when", o.reduce_when,
                  "when --accumulate reduces gradients: every: in each microbatch (default); last: in the last one; "
                  "scatter: reduce-scatter in each, all-reduce over replicas in the last")
      ->check(CLI::IsMember({"every", "last", "scatter"}));
}

}  // namespace tessera::tools
