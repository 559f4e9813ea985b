"""What a published row ran: the model, its division among the ranks, and the framework's kernels."""

import math
import re
from collections import namedtuple

from published_kernels import device_named
from published_rows import Problem

# The memory-bound kernels of a framework's block, loss and optimizer. Bytes are per token and element: of the hidden state
# (width), inside the feed-forward layer (hidden), of each logit (loss), and of each score of unfused attention (scores).
Style = namedtuple("Style", "name width_forward width_backward hidden_forward hidden_backward kernels_forward kernels_backward "
                            "loss_bytes scores_forward scores_backward")
MPT = Style("mpt", 22, 54, 4, 8, 12, 22, 32, 17, 19)
LLM_C = Style("llm.c", 16, 30, 4, 8, 8, 14, 8, 17, 19)
MEGATRON = Style("megatron", 26, 62, 4, 8, 16, 30, 48, 8, 9.5)
MIN_GPT = Style("mingpt", 30, 68, 4, 8, 20, 34, 32, 17, 19)
T5 = Style("t5", 60, 120, 8, 14, 24, 40, 32, 19, 23)
LLAMA = Style("llama", 124, 210, 10, 16, 42, 60, 34, 17, 19)
LLAMA_FUSED = Style("llama_fused", 36, 70, 6, 10, 16, 26, 10, 17, 19)
HUGGING_FACE_LOSS = 48  # its logits are converted once more
# Sources whose software recomputes blocks to their end: torch before 2.1, or re-entrant checkpoints.
RECOMPUTE_ALL = ("llmf-a100-40", "fsdp-paper", "aws-1t", "vtrain-single", "vtrain-multi", "oumi", "hf-granite")
# Bytes per second of a host's links, as known of the cloud.
KNOWN_LINKS = {"oumi-gcp": 12.5e9, "oumi-gcp-1gpu": 3e9, "oumi-polaris": 25e9, "yandex-a100": 100e9}


def style_of(row):
    family, framework = row.model.get("family") or "", row.text("framework").lower()
    if family.startswith("encoder"):
        return T5
    if family.startswith("llama"):
        return LLAMA_FUSED if "fused norm" in row.text("attention") else LLAMA
    if "llm.c" in framework:
        return LLM_C
    if "megatron" in framework:
        return MEGATRON
    return MIN_GPT if "minGPT" in (row.model.get("name") or "") else MPT


def nearest(value):
    """Halves away from 0."""
    return math.floor(value + 0.5)


class Workload:
    """A row with everything filled in that it doesn't state; docs/plan_published.md has the assumptions."""

    def __init__(self, row):
        if row.model is None:
            raise Problem(f"{row.id}: its model is not known")
        machine = row.machine or {}
        self.device = device_named(machine.get("gpu") or row.text("gpu") or "A100-80GB")
        self.ranks, self.ranks_per_host = int(row.number("n_gpus", 8)), int(machine.get("gpus_per_node") or 8)
        self.seq_len = int(row.number("seq", 2048))
        self.set_batch(row)
        self.style = style_of(row)
        self.set_model(row)
        self.set_strategy(row)
        self.prefetches = row.text("prefetch").lower() != "none"
        self.overlaps = not row.text("overlap").lower().startswith("none")
        self.set_recomputation(row)
        self.set_attention(row)
        self.set_links(row, machine)
        self.set_overheads(row)

    def set_batch(self, row):
        batch, accum = row.number("global_batch", 0), row.number("accum", 0)
        micro = row.number("micro_batch", batch / self.ranks / max(1, accum) if batch > 0 else 1)
        self.sequences = max(1, nearest(micro))  # of a microbatch
        if self.sequences * self.seq_len > 1e10:
            raise Problem(f"{self.sequences} sequences of {self.seq_len} tokens; a microbatch has at most 1e+10 tokens")
        self.microbatches = int(accum if accum > 0 else max(1, round(batch / self.ranks / micro)))
        self.tokens = self.sequences * self.seq_len

    def set_model(self, row):
        model, encoder = row.model, self.style is T5
        llama = (model.get("family") or "").startswith("llama")
        self.layers, self.width, self.heads = int(model["layers"]), int(model["hidden"]), int(model["heads"])
        self.kv_heads = int(model.get("kv_heads") or self.heads)
        self.head_dim = 128 if encoder else self.width // self.heads
        narrow = 256 * math.ceil(8 * self.width / 3 / 256)
        self.feed_forward = self.hidden = int(model.get("ffn") or (narrow if llama else 4 * self.width))
        vocabulary = int(model["vocab"])
        self.vocabulary = vocabulary if vocabulary % 64 == 0 else -(-vocabulary // 128) * 128
        self.tied = model.get("tied") is True
        width, hidden, query, key = self.width, self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.block_parameters = 2 * width * query + 2 * width * key + (3 if llama else 2) * width * hidden + (2 if llama else 13) * width
        if encoder:  # half of the blocks of an encoder-decoder attend twice
            self.block_parameters = 6 * width * query + 2 * width * hidden
        self.root_parameters = self.vocabulary * width * (1 if self.tied else 2) + width + (0 if llama else self.seq_len * width)
        narrow_heads = width != query or self.kv_heads != self.heads
        self.gpt2, self.engine_share = not (llama or encoder or narrow_heads), 1
        self.adapted = not (self.gpt2 or llama)
        if self.adapted:  # the engine's other family has three matrices where these models have two of the same size in all
            self.hidden = max(1, hidden * 2 // 3)

    def set_strategy(self, row):
        text, self.strategy, self.shards = row.text("strategy").lower(), "ddp", 1
        if self.ranks == 1:
            return
        if "hsdp" in text:
            size = re.search(r"node of (\d{1,6})", text)
            self.shards = min(self.ranks, max(1, int(size[1]) if size else self.ranks_per_host))
            self.strategy = "fsdp" if self.ranks % self.shards else "hsdp"
            if self.strategy == "fsdp":
                self.shards = self.ranks
            return
        self.shards = self.ranks
        if any(name in text for name in ("shard-grad-op", "zero-2", "zero2")):
            self.strategy = "shard_grad_op"
        elif any(name in text for name in ("fsdp", "zero-3", "full shard")):
            self.strategy = "fsdp"
        else:
            self.shards, self.strategy = 1, "zero1" if "zero-1" in text or "zero1" in text else "ddp"

    @property
    def sharded(self):
        return self.shards > 1

    def set_recomputation(self, row):
        text = row.text("act_ckpt").lower()
        self.early_stop = row.source not in RECOMPUTE_ALL  # ends before what no backward needs
        self.recomputed, self.recomputation = [False] * self.layers if self.layers <= 65536 else [], "full"
        count = re.search(r"full on (\d{1,6})", text)
        if count:
            self.recomputed = [i < int(count[1]) for i in range(len(self.recomputed))]
        elif "per op" in text:
            self.recomputed, self.recomputation = [True] * len(self.recomputed), "selective"
        elif "every second" in text or "fraction" in text:
            self.recomputed = [i % 2 == 0 for i in range(len(self.recomputed))]
        elif text.startswith("full"):
            self.recomputed = [True] * len(self.recomputed)
        if not any(self.recomputed):
            self.recomputation = "none"

    def set_attention(self, row):
        text = row.text("attention").lower()
        stores_scores = self.style in (MEGATRON, MIN_GPT, T5) or "eager" in text
        self.attention = ("triton" if "triton" in text else "flash1" if "flash 1" in text or "flash1" in text
                          else "flash2" if "flash" in text or "sdpa" in text or not stores_scores else "unfused")

    def set_links(self, row, machine):
        """Bytes per second of a host's links: as stated, as known, or one card of the time for each GPU."""
        stated = machine.get("inter_Gbps_per_node")
        self.host_rate_stated = stated is not None
        if self.host_rate_stated:
            self.host_rate = stated * 1e9 / 8
        else:
            self.host_rate = KNOWN_LINKS.get(row.cluster, (50e9 if self.device.hopper else 25e9) * self.ranks_per_host)

    def set_overheads(self, row):
        framework, optimizer, reduce = (row.text(key).lower() for key in ("framework", "optimizer", "reduce_dtype"))
        second, fused = "fsdp2" in framework, "fused" in optimizer
        self.reduces_f32 = "fp32" in reduce or "float32" in reduce if reduce else second
        self.gather_copy = 4 if second else 0  # bytes for each parameter of a unit
        self.reduce_copy = (6 if self.reduces_f32 else 4) if second else (10 if self.reduces_f32 else 4)
        self.unit_host_s, self.recomputed_host_s = 3e-4 if second else 2e-4, 2e-4
        hugging_face = "hf " in framework or "accelerate" in framework
        self.loss_bytes = HUGGING_FACE_LOSS if hugging_face and self.style is LLAMA else self.style.loss_bytes
        clipping = 12
        self.optimizer_bytes = clipping + (30 if fused or self.style is LLM_C else 34 if self.style is MEGATRON else 80)
        self.optimizer_launches = 20 if fused else 60 + 15 * (self.layers if self.sharded else 4)
        self.step_overhead_s = 2e-3 if self.style is LLM_C else 5e-3 if self.style is MEGATRON else 20e-3
        self.launch_prior_s = 28e-6 if self.style is MEGATRON else 12e-6

    def counted_flops(self):
        """Of a step as the published figures count them: without the causal half, with recomputation."""
        block = 2 * self.tokens * self.block_parameters + 4 * self.tokens * self.seq_len * self.heads * self.head_dim
        again = sum(self.recomputed) if self.recomputation == "full" else 0
        head = 6 * self.tokens * self.vocabulary * self.width
        return ((3 * self.layers + again) * block + head) * self.microbatches

    def config(self):
        """The engine's model, as a config.json of Hugging Face."""
        if self.gpt2:
            return {"model_type": "gpt2", "n_layer": self.layers, "n_embd": self.width, "n_head": self.heads, "n_inner": self.hidden,
                    "n_positions": self.seq_len, "vocab_size": self.vocabulary, "tie_word_embeddings": self.tied,
                    "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        return {"model_type": "llama", "num_hidden_layers": self.layers, "hidden_size": self.width, "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "intermediate_size": self.hidden,
                "max_position_embeddings": self.seq_len, "vocab_size": self.vocabulary, "tie_word_embeddings": self.tied}
