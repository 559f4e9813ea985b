#!/usr/bin/env python3
"""Times the operations that Gloo has, through PyTorch on the CPU; prints a line of JSON per point, as mpi_collectives.c does.

    gloo_collectives.py RANKS [MIN_BYTES MAX_BYTES FACTOR]         ranks are processes of this host, over loopback
"""
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CALLS, WARM_UP, SECONDS = 200, 3, 1.0


def measure(call):
    mine, spent, i = [], 0.0, -WARM_UP
    while i < CALLS and (i < 5 or spent < SECONDS):
        dist.barrier()
        start = time.perf_counter()
        call()
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if i >= 0:
            mine.append(float(slowest))
            spent += mine[-1]
        i += 1
    return statistics.median(mine) * 1e6


def work(rank, ranks, least, most, factor):
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    size = least
    while size <= most:
        part = size // 4 // ranks
        whole, mine = torch.ones(part * ranks), torch.ones(part)
        parts = list(torch.empty(part * ranks).chunk(ranks))
        for op, call in (("all_reduce", lambda: dist.all_reduce(whole)), ("all_gather", lambda: dist.all_gather(parts, mine))):
            value = measure(call)
            if rank == 0:
                print(json.dumps({"op": op, "bytes": part * ranks * 4, "time_us": value}), flush=True)
        size *= factor
    dist.destroy_process_group()


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    count, smallest, largest, step = given if len(given) == 4 else (given[0], 1024, 64 << 20, 4)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29581", GLOO_SOCKET_IFNAME="lo")
    mp.spawn(work, args=(count, smallest, largest, step), nprocs=count)
