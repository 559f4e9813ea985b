"""The library's own interface in Python: communicators over NumPy and PyTorch arrays, errors, and the tool's functions."""

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest

import tessera

TRANSPORTS = ("shm", "tcp", "ucx")
DTYPES = ("f32", "f64", "f16", "i8", "u8", "i16", "i32", "i64", "u32", "u64", "bool")


def _rank(body, rank, ranks, backend, run, results):
    try:
        with tessera.init(backend=backend, rank=rank, size=ranks, run_id=run, timeout=20) as world:
            results.put((rank, body(world)))
    except BaseException as error:  # noqa: BLE001  (the parent reports it)
        results.put((rank, error))


def run(body, ranks, backend):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    name = uuid.uuid4().hex
    processes = [context.Process(target=_rank, args=(body, r, ranks, backend, name, results)) for r in range(ranks)]
    for process in processes:
        process.start()
    try:
        got = dict(results.get(timeout=60) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for result in got.values():
        if isinstance(result, BaseException):
            raise result
    return [got[rank] for rank in range(ranks)]


def operations(world):
    rank, ranks = world.rank, world.size
    every = [np.arange(6.0) * (r + 1) for r in range(ranks)]
    x = every[rank].copy()
    world.all_reduce(x).wait()
    np.testing.assert_array_equal(x, sum(every))
    out = np.empty(6)
    world.all_reduce(every[rank], out, op="max").wait()
    np.testing.assert_array_equal(out, np.max(every, axis=0))
    world.all_reduce(every[rank], out, op="avg").wait()
    np.testing.assert_array_equal(out, sum(every) / ranks)
    world.all_reduce(every[rank], out, op="premul_sum", factor=2.0).wait()
    np.testing.assert_array_equal(out, 2 * sum(every))
    masks = np.array([1 << rank], dtype=np.int16)
    world.all_reduce(masks, op="bit_or").wait()
    assert masks[0] == (1 << ranks) - 1
    whole = np.empty((ranks, 6))
    world.all_gather(whole, every[rank]).wait()
    np.testing.assert_array_equal(whole, every)
    part = np.empty(6)
    world.reduce_scatter(part, np.concatenate([every[rank]] * ranks)).wait()
    np.testing.assert_array_equal(part, sum(every))
    x = every[rank].copy()
    world.broadcast(x, 1).wait()
    np.testing.assert_array_equal(x, every[1])
    world.reduce(every[rank], 0, out if rank == 0 else None).wait()
    if rank == 0:
        np.testing.assert_array_equal(out, sum(every))
    world.gather(every[rank], 1, whole if rank == 1 else None).wait()
    world.scatter(part, 1, whole if rank == 1 else None).wait()
    np.testing.assert_array_equal(part, every[rank])
    sent = np.arange(float(ranks)) + 10 * rank
    got = np.empty(ranks)
    world.all_to_all(got, sent).wait()
    np.testing.assert_array_equal(got, np.arange(ranks) * 10.0 + rank)
    lengths = [r + 1 for r in range(ranks)]
    joined = np.empty(sum(lengths))
    world.all_gather(joined, np.full(rank + 1, float(rank)), counts=lengths).wait()
    np.testing.assert_array_equal(joined, np.repeat(np.arange(float(ranks)), lengths))
    assert world.traffic()["all_gather"]["calls"] == 2 and world.capabilities["backend"] == world.backend
    halves = world.split(rank % 2, rank)
    x = np.array([rank])
    halves.all_reduce(x).wait()
    assert x[0] == sum(r for r in range(ranks) if r % 2 == rank % 2)
    assert world.split(-1) is None
    if rank < 2:  # the others don't know of it
        pair = world.create_group([1, 0], tag=3, timeout=20)
        assert (pair.rank, pair.size) == (1 - rank, 2)
        pair.all_reduce(ranks_of_pair := np.full(3, rank)).wait()
        assert (ranks_of_pair == 1).all()
    else:
        with pytest.raises(tessera.InvalidUsage, match="is not a member; only members call it"):
            world.create_group([0, 1])


def messages(world):
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    out = [np.full(n, float(tag)) for tag, n in ((3, 5), (4, 50_000))]
    works = [world.send(x, after, tag=tag) for x, tag in zip(out, (3, 4))]
    for tag, n in ((4, 50_000), (3, 5)):
        x = np.empty(n)
        world.recv(x, before, tag=tag).wait()
        assert (x == tag).all()
    for work in works:
        work.wait()
    x, y = np.full(9, float(world.rank)), np.empty(9)
    world.batch([(x, after, 0)], [(y, before, 0)]).wait()
    assert (y == before).all()
    if world.rank == 0:
        seen = set()
        for _ in range(world.size - 1):
            x = np.empty(2)
            work = world.recv(x)
            work.wait()
            assert (x == work.source).all()
            seen.add(work.source)
        assert len(seen) == world.size - 1
    else:
        world.send(np.full(2, float(world.rank)), 0).wait()


def memory(world):
    """What allocate() gives is the memory itself, for NumPy and PyTorch alike, and lives on without the communicator."""
    import torch

    for dtype in DTYPES:
        shared = world.allocate(8, dtype)
        x = np.from_dlpack(shared)
        x[:] = 1
        world.all_reduce(shared, op="max").wait()
        assert (x == 1).all() and x.itemsize == np.dtype(x.dtype).itemsize
    shared = world.allocate(8, "bf16")
    x = torch.from_dlpack(shared)
    assert x.dtype == torch.bfloat16
    x.fill_(world.rank + 1)
    world.all_reduce(x).wait()
    assert bool((x == world.size * (world.size + 1) / 2).all())
    flags = torch.tensor([world.rank == 0, False])
    world.all_reduce(flags).wait()
    assert flags.tolist() == [True, False]
    other = world.allocate(4)
    y = np.from_dlpack(other)
    del other
    world.close()
    y[:] = 3
    assert (y == 3).all() and (torch.from_dlpack(x) is not None)


def callbacks(world):
    import threading

    ended = threading.Semaphore(0)
    errors = []

    def callback(error):
        errors.append(error)
        ended.release()

    for count in (1, 300_000):
        world.all_reduce(np.ones(count)).on_done(callback)
        assert ended.acquire(timeout=20)
    send = world.send(np.ones(400_000), (world.rank + 1) % world.size)
    send.detach()  # its array has no other owner
    del send
    world.barrier().wait()
    x = np.zeros(400_000)
    world.recv(x, (world.rank - 1) % world.size).wait()
    assert (x == 1).all() and errors == [None, None]


class Frozen(bytes):
    """As JAX's arrays: its buffer is read-only, and its DLPack does not say so."""

    array = np.zeros(3)

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def errors(world):
    x = np.zeros((4, 6))
    with pytest.raises(TypeError):
        world.all_reduce(x[:, :2])  # not contiguous: a copy would lose the result
    with pytest.raises(TypeError):
        world.all_reduce([1.0, 2.0])
    fixed = np.zeros(3)
    fixed.setflags(write=False)
    with pytest.raises(TypeError):
        world.all_reduce(fixed)
    with pytest.raises(TypeError):
        world.all_reduce(Frozen(24))
    with pytest.raises(tessera.Unsupported, match="a type that operations don't have"):
        world.all_reduce(np.zeros(3, dtype=np.complex64))
    with pytest.raises(tessera.InvalidUsage, match="bit_or of f64 is not defined"):
        world.all_reduce(x, op="bit_or")
    with pytest.raises(ValueError, match="root is 9"):
        world.broadcast(x, 9)
    with pytest.raises(tessera.InvalidUsage, match="'SUM'"):
        world.all_reduce(x, op="SUM")
    world.barrier().wait()  # all of that has changed nothing
    if world.rank == 0:
        work = world.recv(x, 1)
        with pytest.raises(TimeoutError, match="still under way"):
            work.wait(timeout=0.2)
        begin = time.monotonic()
        with pytest.raises(tessera.Timeout, match="rank 1 has not posted"):
            world.recv(x, 1, tag=1, timeout=0.5).wait()
        assert time.monotonic() - begin < 10
        with pytest.raises(tessera.Timeout):
            work.wait()
    else:
        time.sleep(1.5)
    with pytest.raises(tessera.Error):
        for _ in range(100):
            world.barrier().wait()
            time.sleep(0.1)
    world.close()
    with pytest.raises(tessera.InvalidUsage, match="closed"):
        world.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("body", (operations, messages, memory, callbacks, errors))
def test_core(body, transport):
    run(body, 3, transport)


def array_conversions(world):
    """Lists of a batch convert nothing either, and a communicator outlives the Python objects that it was made from."""
    wide = np.zeros((4, 6))
    with pytest.raises(TypeError):
        world.batch([], [(wide[:, :2], (world.rank + 1) % world.size, 0)])
    pair = world.split(0, world.rank)
    x = np.ones(200_000)
    work = pair.all_reduce(x)
    world.close()
    pair.close()
    del pair, world
    work.wait()
    assert (x == 3).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_conversions_and_lifetimes(transport):
    run(array_conversions, 3, transport)


LEAVES = """
import numpy as np, sys, tessera
world = tessera.init()
world.barrier().wait()
kept = world.recv(np.zeros(1), (world.rank + 1) % world.size) if sys.argv[1] == "kept" else None
if sys.argv[1] == "callback":
    work = world.recv(np.zeros(1), (world.rank + 1) % world.size)
    work.on_done(lambda error: print(type(error).__name__, flush=True))
    work.detach()
"""


@pytest.mark.parametrize("what", ("nothing", "kept", "callback"))
def test_process_ends_without_closing(what):
    """Also with a receive that is never sent: the world's time-out is five minutes."""
    shared = {**os.environ, "TESSERA_RUN_ID": uuid.uuid4().hex, "TESSERA_WORLD_SIZE": "2", "TESSERA_BACKEND": "shm"}
    begin = time.monotonic()
    ranks = [
        subprocess.Popen([sys.executable, "-c", LEAVES, what], env={**shared, "TESSERA_RANK": str(r)}) for r in range(2)
    ]
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    assert time.monotonic() - begin < 30


def test_world_of_one():
    world = tessera.init(rank=0, size=1)
    x = np.ones(3)
    world.all_reduce(x).wait()
    assert (world.rank, world.size, list(x)) == (0, 1, [1, 1, 1])
    with pytest.raises(tessera.InvalidUsage, match="rank and size go together"):
        tessera.init(rank=0)


def _interrupt(*_):
    raise KeyboardInterrupt


def _waits(world):
    if world.rank == 0:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            world.recv(np.zeros(1), 1).wait()
        world.abort("interrupted")
    else:
        with pytest.raises(tessera.Error):
            world.recv(np.zeros(1), 0).wait()


def test_signal_interrupts_wait():
    run(_waits, 2, "shm")


def test_import_is_light():
    code = "import sys, tessera; assert 'tessera._core' not in sys.modules; tessera.init; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_stub_names_what_there_is():
    from tessera import _core

    stub = pathlib.Path(_core.__file__).with_name("_core.pyi")
    text = stub.read_text() if stub.exists() else pytest.skip("a development build has no stub")
    for name in dir(_core.Communicator):
        assert name.startswith("_") or f"def {name}(" in text, name


@pytest.mark.skipif("TESSERA_TOOL" not in os.environ, reason="TESSERA_TOOL does not name the tool")
def test_tool():
    rows = tessera.bench("all_reduce", ranks=2, max_bytes="1K", iterations=5)
    assert "all_reduce" in str(rows)
    runs = tessera.compare(model="gpt-nano", ranks=2, steps=1, strategies=["ddp", "fsdp"])["runs"]
    assert [one["strategy"] for one in runs] == ["ddp", "fsdp"]
    planned = tessera.plan(parameters="7.5e9", ranks=64, precision="bf16", strategies=["ddp"])["rows"]
    assert planned[0]["model_state_bytes"] == 120e9
    with pytest.raises(tessera.ToolError, match="nothing"):
        tessera.compare(model="nothing")


def test_missing_tool_says_what_to_do(monkeypatch):
    monkeypatch.setenv("TESSERA_TOOL", "/nowhere/tessera")
    with pytest.raises(tessera.ToolError, match="build it with scripts/setup"):
        tessera.plan(parameters="1e9")


EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_example_sum():
    shared = {**os.environ, "TESSERA_RUN_ID": uuid.uuid4().hex, "TESSERA_WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / "01_sum.py")], env={**shared, "TESSERA_RANK": str(r)}, stdout=subprocess.PIPE, text=True
        )
        for r in range(3)
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert said == ["3 ranks over shm: [6.0, 6.0, 6.0, 6.0]\n", "", ""] and not any(rank.returncode for rank in ranks)


@pytest.mark.skipif("TESSERA_TOOL" not in os.environ, reason="TESSERA_TOOL does not name the tool")
def test_example_memory():
    done = subprocess.run([sys.executable, str(EXAMPLES / "02_memory.py")], stdout=subprocess.PIPE, text=True, check=True)
    assert "zero1    31.4 GB per rank" in done.stdout and done.stdout.endswith("equal\n")


def test_no_library_is_searched_in_the_current_folder(tmp_path):
    """An empty or relative entry of RUNPATH is the folder in which a program runs; a wheel may be unpacked by anybody."""
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "install"))
    from search_paths import bad_entries

    count, bad = bad_entries(pathlib.Path(tessera.__file__).parent)
    assert count >= 1 and bad == []
    source, control = tmp_path / "nothing.c", tmp_path / "nothing.so"
    source.write_text("")
    subprocess.run(["cc", "-shared", "-o", control, source, "-Wl,-rpath,/usr/lib::lib"], check=True)
    assert [entry for _, entry in bad_entries(tmp_path)[1]] == ["", "lib"]
