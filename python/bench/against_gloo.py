"""Times torch.distributed over Gloo and over tessera in turns, in the same processes.

    torchrun --nproc-per-node 2 python/bench/against_gloo.py [--rounds 15] [--step [--without-gloo]]

Columns are medians in microseconds of rank 0: Gloo, tessera, and tessera with tensors in the process group's memory
(allocate_tensor), with the ratio to Gloo. --step times an FSDP2 step of a model of 3.2 million parameters instead, in
milliseconds, on one thread per rank: over each, over a backend that moves nothing, with as many bytes copied and added
inside each rank, and without FSDP2.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

SIZES = (1 << 10, 1 << 20, 1 << 26)


def timed(call, repeat, group):
    """In microseconds. The ranks leave this group's barrier at nearly the same time, other than Gloo's."""
    dist.barrier(group=group)
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
                    taken.append(timed(call, repeat, tessera))
            gloo, plain, own = (statistics.median(taken[2:]) for taken in times)
            if dist.get_rank() == 0:
                print(f"{name:16}{size:>10}{gloo:>11.1f}{plain:>11.1f}{gloo / plain:>7.1f}{own:>14.1f}{gloo / own:>7.1f}")
    memory_speed(tessera, tensor(SIZES[-1] // 4, True))
    futures(tessera, rounds)


def memory_speed(group, x):
    """What the largest all_reduce moves in a second, and what copies inside the ranks move, all ranks at once."""
    ranks, one, other = dist.get_world_size(), torch.zeros(x.numel()), torch.zeros(x.numel())
    copied, reduced = (statistics.median(timed(call, 2, group) for _ in range(9))
                       for call in (lambda: other.copy_(one), lambda: dist.all_reduce(x, group=group)))
    # A rank reads its slice of all inputs and writes the sum; then it reads and writes the other slices.
    moved = x.nbytes * ((ranks + 1) / ranks + 2 * (ranks - 1) / ranks)
    if dist.get_rank() == 0:
        print(f"64 MiB in each rank at once: a copy moves {2 * x.nbytes / copied / 1e3:.1f} GB/s, an all_reduce in the "
              f"group's memory {moved / reduced / 1e3:.1f} GB/s")


def futures(group, rounds):
    """Both kinds of calls in turns, so that what disturbs the machine meets both."""
    x = torch.zeros(256)
    calls = (lambda: dist.all_reduce(x, group=group, async_op=True).wait(),
             lambda: dist.all_reduce(x, group=group, async_op=True).get_future().wait())
    medians = [[], []]
    for _ in range(rounds):
        taken = [[], []]
        for _ in range(2000):
            for call, times in zip(calls, taken):
                begin = time.perf_counter()
                call()
                times.append((time.perf_counter() - begin) * 1e6)
        for times, of_round in zip(taken, medians):
            of_round.append(statistics.median(times))
    if dist.get_rank() == 0:
        more = sorted(future - wait for wait, future in zip(*medians))
        print(f"all_reduce of 1 KiB: wait() {statistics.median(medians[0]):.1f} us, get_future().wait() "
              f"{statistics.median(more):.1f} us more ({more[0]:.1f} to {more[-1]:.1f})")


class Copies:
    """Instead of communication: copies from, and adds, memory of this rank, as much as would come from the others."""

    def __init__(self):
        self.other = torch.zeros(1 << 22)

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False):
        parts = torch.chunk(input_tensor if op is not None else output_tensor, dist.get_world_size())
        own = dist.get_rank()
        others = [part for rank, part in enumerate(parts) if rank != own]
        if op is None:
            for part in others:
                part.copy_(self.other[: part.numel()])
            return
        torch.add(parts[own], self.other[: output_tensor.numel()], out=output_tensor)
        for part in others[1:]:
            output_tensor += self.other[: part.numel()]


def step_of(group, own_memory=False, copies=False):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)))
    if group is not None:
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for block in model:
            if own_memory:
                block.set_allocate_memory_from_process_group_for_comm(True)
            if copies:
                block.set_custom_all_gather(Copies())
                block.set_custom_reduce_scatter(Copies())
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
    fake = dist.new_group(backend="fake")
    every["no communication"] = step_of(fake)
    every["copies in each rank"] = step_of(fake, copies=True)
    every["no FSDP2"] = step_of(None)
    times = {name: [] for name in every}
    for _ in range(rounds + 2):
        for name, step in every.items():
            times[name].append(timed(step, 1, groups["tessera"]) / 1e3)
    if dist.get_rank() == 0:
        without = times["no communication"][2:]
        for name, of_name in times.items():
            more = sorted(t / w - 1 for t, w in zip(of_name[2:], without))
            low, middle, high = statistics.quantiles(more, n=4)
            print(f"FSDP2 step, {name:20} {statistics.median(of_name[2:]):6.1f} ms, {middle:+.1%} "
                  f"(quartiles {low:+.1%} to {high:+.1%})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--without-gloo", action="store_true", help="with --step: as in a program that uses tessera alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.without_gloo and not options.step:
        parser.error("--without-gloo needs --step")
    dist.init_process_group("tessera" if options.without_gloo else "gloo")
    groups = {"tessera": dist.group.WORLD}
    if not options.without_gloo:
        groups = {"gloo": dist.group.WORLD, "tessera": dist.new_group(backend="tessera")}
    if options.step:
        steps(groups, options.rounds)
    else:
        reductions(groups, groups["tessera"], options.rounds)
    dist.destroy_process_group()


main()
