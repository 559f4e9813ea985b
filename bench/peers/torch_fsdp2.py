#!/usr/bin/env python3
"""A GPT under PyTorch's FSDP2 (or DDP), on CPUs: f32, AdamW, blocks as units. Needs PyTorch 2.6 or later.

    torch_fsdp2.py [--mode fsdp|ddp] [--model gpt|transformer] [--backend gloo] [--batch 8] [--positions 256] [--steps 12] [--ranks 2]

transformer is the model of bench_libtorch_step. Starts its ranks itself, one thread each. Prints a line of JSON: step_ms (median
without the first two steps), and for the largest rank peak_mb, its peak resident memory, and grown_mb, the same minus the memory from
before the model.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["fsdp", "ddp"], default="fsdp")
parser.add_argument("--model", choices=["gpt", "transformer"], default="gpt")
parser.add_argument("--backend", default="gloo", help="of torch.distributed")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--positions", type=int, default=256)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--ranks", type=int, default=2)
options = parser.parse_args()

if "RANK" not in os.environ:
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // options.ranks)
    place = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000),
             "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **place, "RANK": str(r)}, stdout=subprocess.PIPE, text=True,
                              preexec_fn=lambda r=r: os.sched_setaffinity(0, cores[share * r:share * (r + 1)] or cores)) for r in range(options.ranks)]
    rows = [json.loads(rank.communicate()[0].strip().splitlines()[-1]) for rank in ranks]
    print(json.dumps({key: max(row[key] for row in rows) for key in rows[0]}))
    sys.exit()

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch_gpt2 import Gpt2


class Block(nn.Module):
    """As in libtorch_step.cpp, with the same operations."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, positions, width = x.shape
        q, k, v = (part.view(batch, positions, self.heads, -1).transpose(1, 2) for part in self.inputs(self.norm_1(x)).chunk(3, -1))
        mixed = torch.softmax(q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5, -1) @ v
        x = x + self.outputs(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self, layers, width, heads, words):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, words)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.head(self.blocks(self.words(tokens))).flatten(0, 1), targets.flatten())


torch.set_num_threads(1)
dist.init_process_group(options.backend)


def resident_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


before = resident_mb()
torch.manual_seed(0)
if options.model == "transformer":
    model = Transformer(layers=6, width=384, heads=6, words=256)
else:
    model = Gpt2(layers=6, width=384, heads=6, vocabulary=256, context=options.positions)
if options.mode == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
data = torch.randint(0, 256, (options.batch, options.positions + 1))
tokens, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
times = []
for _ in range(options.steps):
    start = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    model(tokens, targets).backward()
    optimizer.step()
    times.append(time.perf_counter() - start)
print(json.dumps({"step_ms": statistics.median(times[2:]) * 1e3, "peak_mb": resident_mb(), "grown_mb": resident_mb() - before}))
dist.destroy_process_group()
