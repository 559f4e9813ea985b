#include "tools/plan/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <map>
#include <regex>

#include "tessera/base/error.h"

namespace tessera::tools {
namespace {

constexpr FrameworkStyle kMpt{"mpt", 22, 54, 4, 8, 12, 22, 32, 17, 19};
constexpr FrameworkStyle kLlmC{"llm.c", 16, 30, 4, 8, 8, 14, 8, 17, 19};
constexpr FrameworkStyle kMegatron{"megatron", 26, 62, 4, 8, 16, 30, 48, 8, 9.5};
constexpr FrameworkStyle kMinGpt{"mingpt", 30, 68, 4, 8, 20, 34, 32, 17, 19};
constexpr FrameworkStyle kT5{"t5", 60, 120, 8, 14, 24, 40, 32, 19, 23};
constexpr FrameworkStyle kLlama{"llama", 124, 210, 10, 16, 42, 60, 34, 17, 19};
constexpr FrameworkStyle kLlamaFused{"llama_fused", 36, 70, 6, 10, 16, 26, 10, 17, 19};
constexpr double kHuggingFaceLoss = 48;  // its logits are converted once more

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

std::int64_t integer(const nlohmann::json& object, const char* key, std::int64_t otherwise) {
  return object.contains(key) && !object.at(key).is_null() ? object.at(key).get<std::int64_t>() : otherwise;
}

std::string text_of(const nlohmann::json& object, const char* key) {
  return object.is_object() && object.contains(key) && object.at(key).is_string() ? object.at(key).get<std::string>()
                                                                                  : "";
}

const FrameworkStyle& style_of(const PublishedRow& row) {
  const std::string family = text_of(row.model, "family"), framework = lower(row.text("framework"));
  if (family.starts_with("encoder")) return kT5;
  if (family.starts_with("llama")) return contains(row.text("attention"), "fused norm") ? kLlamaFused : kLlama;
  if (contains(framework, "llm.c")) return kLlmC;
  if (contains(framework, "megatron")) return kMegatron;
  return contains(text_of(row.model, "name"), "minGPT") ? kMinGpt : kMpt;
}

void set_model(Workload& w, const PublishedRow& row) {
  const nlohmann::json& m = row.model;
  const bool llama = text_of(m, "family").starts_with("llama");
  const bool encoder = w.style == &kT5;
  nn::ModelConfig& c = w.model;
  c.name = row.id;
  c.layers = integer(m, "layers", 1);
  c.width = integer(m, "hidden", 1);
  c.heads = integer(m, "heads", 1);
  c.kv_heads = integer(m, "kv_heads", c.heads);
  c.head_dim = encoder ? 128 : c.width / c.heads;
  const auto narrow = static_cast<std::int64_t>(256 * std::ceil(8.0 * static_cast<double>(c.width) / 3 / 256));
  c.hidden = integer(m, "ffn", llama ? narrow : 4 * c.width);
  const std::int64_t vocabulary = integer(m, "vocab", 1);
  c.vocabulary = vocabulary % 64 == 0 ? vocabulary : (vocabulary + 127) / 128 * 128;
  c.context = w.seq_len;
  c.tied = m.contains("tied") && m.at("tied").is_boolean() && m.at("tied").get<bool>();
  w.feed_forward = static_cast<double>(c.hidden);
  const auto width = static_cast<double>(c.width), hidden = static_cast<double>(c.hidden),
             query = static_cast<double>(c.heads * c.head_dim), key = static_cast<double>(c.kv_heads * c.head_dim);
  w.block_parameters =
      2 * width * query + 2 * width * key + (llama ? 3 : 2) * width * hidden + (llama ? 2 : 13) * width;
  // Half of the blocks of an encoder-decoder attend twice.
  if (encoder) w.block_parameters = 6 * width * query + 2 * width * hidden;
  w.root_parameters = static_cast<double>(c.vocabulary) * width * (c.tied ? 1 : 2) + width +
                      (llama ? 0 : static_cast<double>(w.seq_len) * width);
  const bool narrow_heads = c.width != c.heads * c.head_dim || c.kv_heads != c.heads;
  c.family = llama || encoder || narrow_heads ? nn::ModelConfig::Family::llama : nn::ModelConfig::Family::gpt2;
  if (c.family == nn::ModelConfig::Family::gpt2) return;
  c.activation = nn::kernels::Activation::silu;
  if (llama) return;
  // The engine's other family has three matrices where these models have two of the same size in all.
  c.hidden = std::max<std::int64_t>(1, c.hidden * 2 / 3);
  const double total = w.root_parameters + static_cast<double>(c.layers) * w.block_parameters;
  w.engine_share = total / static_cast<double>(nn::parameter_count(c));
}

void set_strategy(Workload& w, const PublishedRow& row) {
  const std::string text = lower(row.text("strategy"));
  w.strategy = "ddp";
  w.shards = 1;
  if (w.ranks == 1) return;
  if (contains(text, "hsdp")) {
    std::smatch size;
    const bool stated = std::regex_search(text, size, std::regex("node of (\\d{1,6})"));
    w.shards = std::min(w.ranks, std::max(1, stated ? std::stoi(size[1]) : w.ranks_per_host));
    w.strategy = w.ranks % w.shards == 0 ? "hsdp" : "fsdp";
    if (w.strategy == "fsdp") w.shards = w.ranks;
    return;
  }
  w.shards = w.ranks;
  if (contains(text, "shard-grad-op") || contains(text, "zero-2") || contains(text, "zero2")) {
    w.strategy = "shard_grad_op";
  } else if (contains(text, "fsdp") || contains(text, "zero-3") || contains(text, "full shard")) {
    w.strategy = "fsdp";
  } else {
    w.shards = 1;
    if (contains(text, "zero-1") || contains(text, "zero1")) w.strategy = "zero1";
  }
}

/// Sources whose software recomputes blocks to their end: torch before 2.1, or re-entrant checkpoints.
bool stops_early(const std::string& source) {
  static constexpr std::array kOlder = {"llmf-a100-40", "fsdp-paper", "aws-1t",    "vtrain-single",
                                        "vtrain-multi", "oumi",       "hf-granite"};
  return std::find(kOlder.begin(), kOlder.end(), source) == kOlder.end();
}

void set_recomputation(Workload& w, const PublishedRow& row) {
  const std::string text = lower(row.text("act_ckpt"));
  const auto layers = static_cast<std::size_t>(w.model.layers);
  w.early_stop = stops_early(row.source);
  w.recomputed.assign(layers, false);
  w.recomputation = Recomputation::full;
  std::smatch count;
  if (std::regex_search(text, count, std::regex("full on (\\d{1,6})"))) {
    const auto blocks = std::min<std::size_t>(layers, std::stoul(count[1]));
    std::fill_n(w.recomputed.begin(), blocks, true);
  } else if (contains(text, "per op")) {
    w.recomputed.assign(layers, true);
    w.recomputation = Recomputation::selective;
  } else if (contains(text, "every second") || contains(text, "fraction")) {
    for (std::size_t i = 0; i < layers; i += 2) w.recomputed[i] = true;
  } else if (text.starts_with("full")) {
    w.recomputed.assign(layers, true);
  }
  if (std::find(w.recomputed.begin(), w.recomputed.end(), true) == w.recomputed.end())
    w.recomputation = Recomputation::none;
}

AttentionKernel attention_of(const Workload& w, const PublishedRow& row) {
  const std::string text = lower(row.text("attention"));
  if (contains(text, "triton")) return AttentionKernel::triton;
  if (contains(text, "flash 1") || contains(text, "flash1")) return AttentionKernel::flash1;
  if (contains(text, "flash") || contains(text, "sdpa")) return AttentionKernel::flash2;
  const bool stores_scores = w.style == &kMegatron || w.style == &kMinGpt || w.style == &kT5;
  return stores_scores || contains(text, "eager") ? AttentionKernel::unfused : AttentionKernel::flash2;
}

/// Bytes per second of a host's links: as stated, as known of the cloud, or one card of the time for each GPU.
void set_links(Workload& w, const PublishedRow& row) {
  static const std::map<std::string, double> kKnown = {
      {"oumi-gcp", 12.5e9}, {"oumi-gcp-1gpu", 3e9}, {"oumi-polaris", 25e9}, {"yandex-a100", 100e9}};
  constexpr double kBitsPerByte = 8, kGiga = 1e9;
  if (row.machine.is_object() && row.machine.contains("inter_Gbps_per_node") &&
      row.machine.at("inter_Gbps_per_node").is_number()) {
    w.host_rate = row.machine.at("inter_Gbps_per_node").get<double>() * kGiga / kBitsPerByte;
    w.host_rate_stated = true;
    return;
  }
  const auto known = kKnown.find(row.cluster);
  w.host_rate = known != kKnown.end() ? known->second : (w.device->hopper ? 50e9 : 25e9) * w.ranks_per_host;
}

void set_overheads(Workload& w, const PublishedRow& row) {
  const std::string framework = lower(row.text("framework")), optimizer = lower(row.text("optimizer"));
  const bool second = contains(framework, "fsdp2");
  const std::string reduce = lower(row.text("reduce_dtype"));
  w.reduces_f32 = reduce.empty() ? second : contains(reduce, "fp32") || contains(reduce, "float32");
  w.gather_copy = second ? 4 : 0;
  w.reduce_copy = second ? (w.reduces_f32 ? 6 : 4) : (w.reduces_f32 ? 10 : 4);
  w.unit_host_s = second ? 3e-4 : 2e-4;
  const bool hugging_face = contains(framework, "hf ") || contains(framework, "accelerate");
  w.loss_bytes = hugging_face && w.style == &kLlama ? kHuggingFaceLoss : w.style->loss_bytes;
  constexpr double kClipping = 12;
  const bool fused = contains(optimizer, "fused");
  w.optimizer_bytes = kClipping + (fused || w.style == &kLlmC ? 30 : w.style == &kMegatron ? 34 : 80);
  w.optimizer_launches = fused ? 20 : 60 + 15 * static_cast<int>(w.sharded() ? w.model.layers : 4);
  w.step_overhead_s = w.style == &kLlmC ? 2e-3 : w.style == &kMegatron ? 5e-3 : 20e-3;
  w.launch_prior_s = w.style == &kMegatron ? 28e-6 : 12e-6;
}

}  // namespace

Workload workload_of(const PublishedRow& row) {
  if (!row.model.is_object()) throw base::InvalidUsage(row.id + ": its model is not known");
  Workload w;
  const std::string gpu = text_of(row.machine, "gpu");
  const std::string own = row.text("gpu");
  w.device = &device_profile(!gpu.empty() ? gpu : !own.empty() ? own : "A100-80GB");
  w.ranks = static_cast<int>(row.number("n_gpus").value_or(8));
  w.ranks_per_host = row.machine.is_object() ? static_cast<int>(integer(row.machine, "gpus_per_node", 8)) : 8;
  w.seq_len = static_cast<std::int64_t>(row.number("seq").value_or(2048));
  const double global = row.number("global_batch").value_or(0);
  const double accum = row.number("accum").value_or(0);
  const double own_share = global / w.ranks / std::max(1.0, accum);
  const double micro = row.number("micro_batch").value_or(global > 0 ? own_share : 1);
  w.sequences = std::max<std::int64_t>(1, std::llround(micro));
  constexpr double kMostTokens = 1e10;
  if (static_cast<double>(w.sequences) * static_cast<double>(w.seq_len) > kMostTokens)
    throw base::InvalidUsage(fmt::format("{} sequences of {} tokens; a microbatch has at most {:g} tokens", w.sequences,
                                         w.seq_len, kMostTokens));
  w.microbatches = static_cast<int>(accum > 0 ? accum : std::max(1.0, std::nearbyint(global / w.ranks / micro)));
  w.style = &style_of(row);
  set_model(w, row);
  set_strategy(w, row);
  w.prefetches = lower(row.text("prefetch")) != "none";
  w.overlaps = !lower(row.text("overlap")).starts_with("none");
  set_recomputation(w, row);
  w.attention = attention_of(w, row);
  set_links(w, row);
  set_overheads(w, row);
  return w;
}

double counted_flops(const Workload& w) {
  const auto tokens = static_cast<double>(w.tokens());
  const double scores = 4 * tokens * static_cast<double>(w.seq_len * w.model.heads * w.model.head_dim);
  const double block = 2 * tokens * w.block_parameters + scores;
  const auto again = w.recomputation == Recomputation::full
                         ? static_cast<double>(std::count(w.recomputed.begin(), w.recomputed.end(), true))
                         : 0;
  const double head = 6 * tokens * static_cast<double>(w.model.vocabulary * w.model.width);
  return ((3 * static_cast<double>(w.model.layers) + again) * block + head) * w.microbatches;
}

}  // namespace tessera::tools
