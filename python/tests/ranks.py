"""Runs a function in several processes, which are the ranks of a torch.distributed world."""

import multiprocessing
import os
import queue
import tempfile
import time
import traceback


def _rank(function, rank, ranks, store, environment, results, arguments):
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    import tessera.torch  # noqa: F401  (also without the package's entry point)

    torch.set_num_threads(1)
    try:
        dist.init_process_group("tessera", init_method=f"file://{store}", rank=rank, world_size=ranks)
        result = function(rank, ranks, *arguments)
        results.put((rank, None, result))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  (the parent reports it)
        results.put((rank, traceback.format_exc(), None))
        raise SystemExit(1)


class Ranks:
    """Starts them; `results()` waits for all. Those that are left are killed at the end of the with statement."""

    def __init__(self, function, ranks, *arguments, env=None, limit=120):
        self.deadline = time.monotonic() + limit
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self.queue = context.Queue()
        self.processes = [
            context.Process(
                target=_rank,
                args=(function, r, ranks, os.path.join(self.folder.name, "store"), dict(env or {}), self.queue, arguments),
            )
            for r in range(ranks)
        ]

    def __enter__(self):
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def next(self):
        """(rank, error or None, result) of the next rank that reports."""
        try:
            return self.queue.get(timeout=max(0.1, self.deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError("the ranks did not end in time") from None

    def results(self):
        """What the function returned on each rank."""
        got = {}
        for _ in self.processes:
            rank, error, result = self.next()
            assert error is None, f"rank {rank}: {error}"
            got[rank] = result
        for process in self.processes:
            process.join(max(0.1, self.deadline - time.monotonic()))
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
        return [got[r] for r in range(len(self.processes))]


def run(function, ranks, *arguments, env=None, limit=120):
    with Ranks(function, ranks, *arguments, env=env, limit=limit) as started:
        return started.results()
