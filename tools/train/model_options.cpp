#include "tools/train/model_options.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/nn/lora.h"
#include "tools/cli/validators.h"

namespace tessera::tools {

using base::InvalidUsage;

void add_model_options(CLI::App& command, ModelOptions& o) {
  add_option(command, "--model", o.model,
             "model preset (tessera info --models), or Hugging Face config.json (gpt2, llama, mistral, qwen2) or "
             "its folder, or your own as FILE.so:NAME,OPTION=VALUE",
             "NAME|FILE")
      ->each([&o](const std::string&) { o.model_given = true; });
  add_option(command, "--lora", o.lora,
             "train LoRA adapters of this rank and freeze the weights of the model; see --init",
             {"RANK", whole_number(1, static_cast<std::uint64_t>(nn::kMaxLoraRank))});
  add_option(command, "--lora-alpha", o.lora_alpha, "scale adapters by alpha / rank (default: 8)",
             finite_number(std::numeric_limits<double>::min()));
  add_option(command, "--lora-targets", o.lora_targets,
             "linear layers with adapters, by the end of their names (default: c_attn, or q_proj and v_proj)",
             list_of());
  add_option(command, "--quantize", o.quantize,
             "keep the frozen linear weights in 4 bits (QLoRA), at rest and unsharded; needs --lora", one_of({"nf4"}));
}

void add_init_options(CLI::App& command, ModelOptions& o) {
  add_option(command, "--init", o.init, "start from the model and weights of a Hugging Face directory", "DIR");
  add_option(command, "--init-adapter", o.init_adapter, "start from the adapters of a PEFT directory; needs --init",
             "DIR");
}

void add_precision_options(CLI::App& command, ModelOptions& o) {
  add_option(command, "--precision", o.precision,
             "dtype of parameters, activations and gradients; bf16 and f16 have f32 master weights; fp8: bf16, with "
             "the products of linear layers in 8-bit floating point",
             one_of({"f32", "bf16", "f16", "fp8"}));
  add_option(command, "--fp8-scaling", o.fp8_scaling,
             "scales of --precision fp8: from each tensor itself (current, default), from the steps before "
             "(delayed), or 1 (none, which shows what a scale is for)",
             one_of({"current", "delayed", "none"}));
  add_option(command, "--f32-modules", o.f32_modules,
             "modules that stay in f32 with --precision bf16, f16 or fp8, by path or type:CLASS (type:RMSNorm,lm_head)",
             list_of("LIST"));
  add_option(command, "--reduce-dtype", o.reduce_dtype,
             "dtype in which gradients are reduced and kept: f32, or as --precision (default; fp8: bf16)",
             one_of({"f32", "bf16", "f16"}));
}

void add_recompute_options(CLI::App& command, ModelOptions& o) {
  command.add_flag("--checkpoint-activations", o.checkpoint_activations,
                   "recompute activations of blocks in backward: less memory, a third more work, bitwise equal");
  add_option(command, "--recompute", o.recompute,
             "outputs that backward computes again instead of keeping them, bitwise equal on the host: activation "
             "(GELU, SwiGLU), norm, or both",
             list_of("LIST", one_of({"activation", "norm"})));
}

fsdp::Precision precision_of(const ModelOptions& o) {
  const std::string compute = o.precision == "fp8" ? "bf16" : o.precision;
  std::optional<base::DType> reduce;
  if (!o.reduce_dtype.empty()) reduce = base::parse_dtype(o.reduce_dtype);
  if (reduce && *reduce != base::DType::f32 && o.reduce_dtype != compute)
    throw InvalidUsage("--reduce-dtype " + o.reduce_dtype + " with --precision " + o.precision +
                       ": gradients are reduced in the type of --precision or in f32");
  return fsdp::make_precision(base::parse_dtype(compute), reduce);
}

std::optional<nn::Fp8Scaling> fp8_of(const ModelOptions& o) {
  if (o.precision == "fp8") {
    if (o.fp8_scaling == "none") return nn::Fp8Scaling::none;
    return o.fp8_scaling == "delayed" ? nn::Fp8Scaling::delayed : nn::Fp8Scaling::current;
  }
  if (!o.fp8_scaling.empty())
    throw InvalidUsage("--fp8-scaling needs --precision fp8; with " + o.precision + " nothing is scaled");
  return std::nullopt;
}

nn::RecomputedOutputs recomputed_of(const ModelOptions& o) {
  const auto has = [&](std::string_view name) { return std::ranges::find(o.recompute, name) != o.recompute.end(); };
  return {.activations = has("activation"), .norms = has("norm")};
}

}  // namespace tessera::tools
