"""Times torch.distributed over Gloo and over tessera in turns, in the same processes.

    torchrun --nproc-per-node 2 python/bench/against_gloo.py [--rounds 15] [--step]

Columns are medians in microseconds of rank 0: Gloo, tessera, and tessera with tensors in the process group's memory
(allocate_tensor), with the ratio to Gloo. --step times an FSDP2 step of a model of 3.2 million parameters instead, in
milliseconds, on one thread per rank: over each, over a backend that moves nothing, and without FSDP2.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

SIZES = (1 << 10, 1 << 20, 1 << 26)


def timed(call, repeat):
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - begin) / repeat * 1e6


def reductions(groups, tessera, rounds):
    ranks = dist.get_world_size()
    backend = tessera._get_backend(torch.device("cpu"))

    def tensor(count, own):
        if own:
            return backend.allocate_tensor(count, dtype=torch.float32, device=torch.device("cpu")).fill_(0)
        return torch.zeros(count)

    if dist.get_rank() == 0:
        print(f"{'operation':16}{'bytes':>10}{'gloo':>11}{'tessera':>11}{'ratio':>7}{'group memory':>14}{'ratio':>7}")
    for name in ("all_reduce", "reduce_scatter"):
        for size in SIZES:
            count = size // 4
            calls = []
            for group, own in ((groups["gloo"], False), (tessera, False), (tessera, True)):
                x, part = tensor(count, own), tensor(count // ranks, own)
                if name == "all_reduce":
                    calls.append(lambda x=x, group=group: dist.all_reduce(x, group=group))
                else:
                    calls.append(lambda x=x, part=part, group=group: dist.reduce_scatter_tensor(part, x, group=group))
            repeat = min(1024, max(2, (32 << 20) // size))  # several calls: ranks leave a barrier at different times
            times = [[] for _ in calls]
            for _ in range(rounds + 2):
                for call, taken in zip(calls, times):
                    taken.append(timed(call, repeat))
            gloo, plain, own = (statistics.median(taken[2:]) for taken in times)
            if dist.get_rank() == 0:
                print(f"{name:16}{size:>10}{gloo:>11.1f}{plain:>11.1f}{gloo / plain:>7.1f}{own:>14.1f}{gloo / own:>7.1f}")
    x = torch.zeros(256)
    waits, futures = [], []
    for _ in range(rounds + 2):
        waits.append(timed(lambda: dist.all_reduce(x, group=tessera, async_op=True).wait(), 1000))
        futures.append(timed(lambda: dist.all_reduce(x, group=tessera, async_op=True).get_future().wait(), 1000))
    if dist.get_rank() == 0:
        print(f"all_reduce of 1 KiB: wait() {statistics.median(waits[2:]):.1f} us, get_future().wait() "
              f"{statistics.median(futures[2:]):.1f} us")


def step_of(group, own_memory=False):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)))
    if group is not None:
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if own_memory and hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
                module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(256, 256)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(groups, rounds):
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (a backend that moves nothing)

    torch.set_flush_denormal(True)  # what the fake backend leaves in the tensors
    every = {name: step_of(group) for name, group in groups.items()}
    every["group memory"] = step_of(groups["tessera"], own_memory=True)
    every["no communication"] = step_of(dist.new_group(backend="fake"))
    every["no FSDP2"] = step_of(None)
    times = {name: [] for name in every}
    for _ in range(rounds + 2):
        for name, step in every.items():
            times[name].append(timed(step, 1) / 1e3)
    if dist.get_rank() == 0:
        print("FSDP2 step, ms: " + ", ".join(f"{name} {statistics.median(t[2:]):.1f}" for name, t in times.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--step", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "tessera": dist.new_group(backend="tessera")}
    if options.step:
        steps(groups, options.rounds)
    else:
        reductions(groups, groups["tessera"], options.rounds)
    dist.destroy_process_group()


main()
