#!/usr/bin/env python3
"""GPT-2 (124M) in PyTorch as one would train it on one GPU: bf16, torch.compile, scaled_dot_product_attention, fused AdamW.

    torch_gpt2.py [--batch 16] [--positions 1024] [--steps 30]

Once with f32 parameters under autocast, as PyTorch recommends, and once with parameters and AdamW's state in bf16, which moves the
fewest bytes (and trains worse). Prints a line of JSON: tokens_per_second of the faster, and both.
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, positions, width = x.shape
        q, k, v = (part.view(batch, positions, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, positions, width)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, layers=12, width=768, heads=12, vocabulary=50257, context=1024):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))


def measure(options, parameters):
    """The median step in seconds, and the last loss."""
    torch.manual_seed(0)
    model = Gpt2().cuda().to(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    compiled = torch.compile(model)
    times = []
    for _ in range(options.steps):
        tokens = torch.randint(0, 256, (options.batch, options.positions + 1), device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=parameters == torch.float32):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[options.steps // 3:]), loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    variants = {}
    for name, parameters in (("autocast", torch.float32), ("bf16", torch.bfloat16)):
        step, loss = measure(options, parameters)
        variants[name] = {"tokens_per_second": options.batch * options.positions / step, "step_ms": step * 1e3, "loss": loss}
        torch.compiler.reset()
    fastest = max(variants, key=lambda name: variants[name]["tokens_per_second"])
    print(json.dumps({"tokens_per_second": variants[fastest]["tokens_per_second"], "fastest": fastest, "variants": variants,
                      "torch": torch.__version__}))


if __name__ == "__main__":
    main()
