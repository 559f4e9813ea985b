"""What the oracle's recording costs a step: blocks of steps with and without it, in turns, in the same processes.

    torchrun --nproc-per-node 2 python/bench/oracle_overhead.py [--rows 256] [--fsdp2] [--pairs 6]

3.2 million parameters in 12 layers, AdamW, over Gloo, one thread per rank. Prints medians of rank 0 in milliseconds, and
the ratio as the median of the pairs' with the smallest and the largest.
"""

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tessera.oracle

STEPS = 10


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512) for _ in range(12)]
    model = nn.Sequential(*layers)
    if options.fsdp2:
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randn(options.rows, 512)

    def step():
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def block(record):
        with tempfile.TemporaryDirectory() as folder:
            recorder = tessera.oracle.Recorder(folder) if record else None
            for _ in range(3):  # the first steps of a record take longer
                step()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            took = (time.perf_counter() - begin) / STEPS * 1e3
            if recorder is not None:
                recorder.close()
            return took

    block(False)
    pairs = [(block(False), block(True)) for _ in range(options.pairs)]
    if dist.get_rank() == 0:
        ratios = sorted(with_it / without for without, with_it in pairs)
        without, with_it = (statistics.median(column) for column in zip(*pairs))
        print(f"{without:.0f} ms without, {with_it:.0f} ms with recording: "
              f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    dist.destroy_process_group()


main()
