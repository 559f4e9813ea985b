"""What groups cost that their members make without the others: the time to make one, and a sum beside many idle ones.

    torchrun --nproc-per-node 2 python/bench/groups.py [--groups 300] [--rounds 15]

Prints medians of rank 0, and the ratio of a 1 KiB all_reduce with the idle groups to one without them: the median of
the rounds' ratios, with the smallest and the largest. TESSERA_BACKEND chooses the transport.
"""

import argparse
import os
import statistics
import time

import numpy as np

import tessera

CALLS = 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    world = tessera.init()
    x = np.zeros(256, dtype=np.float32)

    def latency():
        world.barrier().wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            world.all_reduce(x).wait()
        return (time.perf_counter() - begin) / CALLS * 1e6

    latency()
    made, alone, beside = [], [], []
    for _ in range(options.rounds):
        alone.append(latency())
        world.barrier().wait()
        begin = time.perf_counter()
        groups = [world.create_group(list(range(world.size))) for _ in range(options.groups)]
        made.append((time.perf_counter() - begin) / options.groups * 1e6)
        threads, files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
        beside.append(latency())
        for group in groups:
            group.close()
    if world.rank == 0:
        ratios = sorted(b / a for a, b in zip(alone, beside))
        print(f"{world.backend}: {statistics.median(made):.0f} us to make a group of {world.size}; "
              f"{threads} threads and {files} descriptors with {options.groups} of them")
        print(f"all_reduce of 1 KiB: {statistics.median(alone):.2f} us without, {statistics.median(beside):.2f} us with idle "
              f"groups: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    world.close()


main()
