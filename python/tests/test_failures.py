"""What happens when a rank dies, hangs, is late or leaves: never a hang, and a rank is named."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ranks import Ranks, run

TRANSPORTS = ("shm", "tcp", "ucx")


def dies(rank, ranks, how):
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), how)
        time.sleep(30)
        return "woke up"
    begin = time.monotonic()
    try:
        for _ in range(100_000):
            dist.all_reduce(torch.ones(1000))
    except (dist.DistNetworkError, dist.DistBackendError) as error:
        return time.monotonic() - begin, str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_rank_is_named(transport):
    with Ranks(dies, 3, signal.SIGKILL, env={"TESSERA_BACKEND": transport}) as ranks:
        for _ in range(2):
            rank, error, result = ranks.next()
            assert error is None and rank != 1, error
            seconds, text = result
            assert seconds < 20 and "rank 1" in text, result


def stops(rank, ranks):
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    return dies(rank, ranks, signal.SIGSTOP)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stopped_rank_is_named(transport):
    with Ranks(stops, 3, env={"TESSERA_BACKEND": transport}) as ranks:
        for _ in range(2):
            rank, error, result = ranks.next()
            assert error is None and rank != 1, error
            seconds, text = result
            assert 1 < seconds < 30 and "rank 1" in text, result


def monitored(rank, **options):
    try:
        dist.monitored_barrier(**options)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "passed", ""


def late(rank, ranks):
    """Ranks 2 and 3 come late to the second of four."""
    second = timedelta(seconds=1)
    results = [monitored(rank, timeout=second)]
    if rank >= 2:
        time.sleep(4)
    results.append(monitored(rank, timeout=second, wait_all_ranks=True))
    results.append(monitored(rank, timeout=timedelta(seconds=20)))
    x = torch.ones(3)
    dist.all_reduce(x)
    return results, x[0].item()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_monitored_barrier_names_late_ranks_and_ends_nothing(transport):
    missing = "Ranks 2, 3 failed to pass monitoredBarrier in 1000 ms"
    for rank, ((first, second, third), total) in enumerate(run(late, 4, env={"TESSERA_BACKEND": transport})):
        assert first == third == ("passed", ""), (rank, first, third)
        assert second[0] == "DistBackendError" and missing in second[1], (rank, second)
        assert rank == 0 or f"Rank {rank} successfully reached monitoredBarrier" in second[1], second
        assert total == 4


def monitored_after_death(rank, ranks):
    """Rank 1 dies, or comes to no barrier."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    what = monitored(rank, timeout=timedelta(seconds=60))
    return time.monotonic() - begin, what


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_monitored_barrier_ends_when_a_rank_dies(transport):
    with Ranks(monitored_after_death, 3, env={"TESSERA_BACKEND": transport}) as ranks:
        for _ in range(2):
            rank, error, (seconds, (kind, text)) = ranks.next()
            assert error is None and kind == "DistNetworkError" and "rank 1" in text, (error, kind, text)
            assert seconds < 20, seconds


def silent_leader(rank, ranks):
    if rank == 0:
        time.sleep(5)
        return "absent", ""
    return monitored(rank, timeout=timedelta(milliseconds=500))


def test_monitored_barrier_without_rank_0():
    results = run(silent_leader, 2)
    assert "Rank 0 failed to pass monitoredBarrier in 2500 ms" in results[1][1], results


def waits(rank, ranks):
    """wait(timeout) ends, the operation goes on."""
    x = torch.ones(1000)
    if rank == 1:
        time.sleep(1)
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="has not ended within the 100 ms"):
            work.wait(timedelta(milliseconds=100))
    work.wait()
    return x[0].item()


def test_wait_with_timeout_leaves_operation():
    assert run(waits, 2) == [2, 2]


def aborts(rank, ranks, store):
    """An abort ends every rank's calls; then the same processes form a new world."""
    if rank == 0:
        time.sleep(0.5)
        dist.distributed_c10d._get_default_group().abort()
        text = "aborted"
    else:
        with pytest.raises((dist.DistBackendError, dist.DistNetworkError)) as caught:
            dist.all_reduce(torch.ones(10))
        text = str(caught.value)
    dist.destroy_process_group()
    dist.init_process_group("tessera", init_method=f"file://{store}", rank=rank, world_size=ranks)
    x = torch.ones(5)
    dist.all_reduce(x)
    return text, x[0].item()


def test_new_start_after_abort(tmp_path):
    results = run(aborts, 3, str(tmp_path / "again"))
    assert [total for _, total in results] == [3, 3, 3]
    for text, _ in results[1:]:
        assert "rank 0 aborted" in text, text


def groups(rank, ranks, count):
    """Many subgroups, each used."""
    every = [dist.new_group([0, 1 + i % (ranks - 1)]) for i in range(count)]
    for i, group in enumerate(every):
        if rank in (0, 1 + i % (ranks - 1)):
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            assert x[0] == 2
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_hundred_subgroups(transport):
    run(groups, 3, 200, env={"TESSERA_BACKEND": transport}, limit=300)


def in_threads(rank, ranks):
    """8 threads on 8 groups."""
    every = [dist.new_group(list(range(ranks))) for _ in range(8)]
    wrong = []

    def work(i):
        for step in range(200):
            x = torch.full((1 + 500 * i,), float(rank + step))
            dist.all_reduce(x, group=every[i])
            if x[0] != sum(r + step for r in range(ranks)):
                wrong.append((i, step))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_threads_use_groups_of_their_own(transport):
    assert run(in_threads, 3, env={"TESSERA_BACKEND": transport}) == [[], [], []]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.tensor([float(i)])


def loads(rank, ranks):
    """DataLoader forks workers beside the communicator's threads."""
    total = torch.zeros(1)
    for batch in torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork"):
        x = batch.sum().reshape(1)
        dist.all_reduce(x)
        total += x
    return total.item()


def test_data_loader_forks():
    assert run(loads, 2) == [2 * sum(range(64))] * 2


def waits_in_callbacks(rank, ranks):
    """As PowerSGD's hook does: the callback of one operation's future waits for another operation."""
    for _ in range(50):
        if rank:
            time.sleep(0.002)  # rank 0's first operation then ends on the communicator's thread
        first = dist.all_reduce(torch.ones(1000), async_op=True).get_future()
        second = first.then(lambda _: dist.all_reduce(torch.ones(5), async_op=True).get_future().wait()[0])
        assert second.wait()[0] == ranks
    return "ended"


def trains_with_power_sgd(rank, ranks):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(6):
        model(torch.full((4, 64), float(rank + step))).square().mean().backward()
    return model.module[0].weight.grad.sum().item()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("body", (waits_in_callbacks, trains_with_power_sgd))
def test_callbacks_may_wait(body, transport):
    results = run(body, 3, env={"TESSERA_BACKEND": transport})
    assert results == results[:1] * 3


def trains_sparse(rank, ranks):
    torch.manual_seed(0)
    embedding = torch.nn.EmbeddingBag(50, 16, sparse=True)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(embedding, torch.nn.Linear(16, 4)))
    model(torch.arange(rank, rank + 8).reshape(2, 4)).square().mean().backward()
    return embedding.weight.grad.to_dense().tolist()


def test_sparse_gradients():
    one, other = run(trains_sparse, 2)
    assert one == other and sum(map(sum, one)) != 0


RESTARTED = """
import os, sys, torch, torch.distributed as dist
import tessera.torch
for _ in range(2):  # two worlds one after the other use one store, too
    dist.init_process_group("tessera")
    x = torch.ones(4)
    dist.all_reduce(x)
    if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(1)
    dist.destroy_process_group()
os.write(1, f"sum {x[0]:g}\\n".encode())
"""


@pytest.mark.parametrize("attempt", range(3))
def test_torchrun_restarts(tmp_path, attempt):
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2", "--nproc-per-node=3",
                           "--monitor-interval=0.1", str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.count("sum 3") == 3, done


SCRIPT = """
import os, sys, torch, torch.distributed as dist
{imports}
dist.init_process_group("{backend}")
x = torch.ones(4) * (dist.get_rank() + 1)
dist.all_reduce(x)
w = dist.all_reduce(torch.ones(100000), async_op=True)
backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
os.write(1, f"sum {{x[0]:g}} over {{type(backend).__module__}}\\n".encode())  # in one call: the ranks share the pipe
{end}
"""


def torchrun(tmp_path, ranks=2, imports="import tessera.torch", backend="tessera", end="", **env):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(imports=imports, backend=backend, end=end))
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(script)],
                          capture_output=True, text=True, timeout=120, env=dict(os.environ, **env))


@pytest.mark.parametrize("transport", TRANSPORTS + ("",))
@pytest.mark.parametrize("end", ("", "sys.exit(0)", "os._exit(0)", "dist.destroy_process_group()"))
def test_ends_without_destroying(tmp_path, transport, end):
    """A program may end in any way: with a work in flight, and without destroying its group."""
    done = torchrun(tmp_path, end=end, **({"TESSERA_BACKEND": transport} if transport else {}))
    assert done.returncode == 0 and done.stdout.count("sum 3 over tessera._c10d") == 2, done


FORKS = """
w.wait()
child = os.fork()
if child == 0:
    sys.exit(0)  # runs what was registered with atexit, and the destructors
os.waitpid(child, 0)
y = torch.ones(3)
dist.all_reduce(y)
os.write(1, f"then {y[0]:g}\\n".encode())
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forked_child_leaves_nothing(tmp_path, transport):
    done = torchrun(tmp_path, end=FORKS, TESSERA_BACKEND=transport)
    assert done.returncode == 0 and done.stdout.count("then 2") == 2, done


def test_replaces_gloo(tmp_path):
    done = torchrun(tmp_path, backend="gloo", TESSERA_TORCH_REPLACES_GLOO="1")
    assert done.stdout.count("sum 3 over tessera._c10d") == 2 and done.stderr.count("backend gloo is tessera") == 1, done
    done = torchrun(tmp_path, backend="gloo")
    assert done.stdout.count("sum 3 over torch.distributed.distributed_c10d") == 2, done


@pytest.mark.parametrize("built_for, text", (("1.13.1", "was built for PyTorch 1.13.1"), ("", "was built without PyTorch")))
def test_package_for_another_pytorch_is_one_clear_error(monkeypatch, built_for, text):
    from tessera import _built_for
    from tessera import torch as backend

    assert backend._extension().Backend  # the control: as it was built
    monkeypatch.setattr(_built_for, "TORCH", built_for)
    with pytest.raises(ImportError, match=f"tessera {text}, and this is PyTorch .*; install the package again"):
        backend._extension()


def test_bad_backend_is_one_clear_error(tmp_path):
    done = torchrun(tmp_path, TESSERA_BACKEND="carrier-pigeon")
    assert done.returncode != 0 and "ValueError: unknown backend 'carrier-pigeon'" in done.stderr, done.stderr[-3000:]
