"""Tensors of a CUDA device, without one: tests/fake_cuda takes its place in PyTorch and in the library. What this can't
show is whether CUDA itself, NCCL and PyTorch's own classes for them behave as the fake does."""

import datetime
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils import cpp_extension

import tessera
from ranks import run

HERE = pathlib.Path(__file__).parent
TRANSPORTS = ("shm", "tcp", "nccl")  # the last one is also a fake: its operations are in the order of streams


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """A copy of the package whose CUDA and NCCL modules are the fake, which is a library of PyTorch's operations, too."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    package = folder / "site" / "tessera"
    shutil.copytree(pathlib.Path(tessera.__file__).parent, package)
    modules = package / "lib" / "tessera-modules"
    ours = next((package / "lib").glob("libtessera-comm.so*"), None)
    if ours is None:
        pytest.skip("the package is linked to a build folder (TESSERA_BUILD) and carries no modules to replace")
    library = folder / "fake_cuda.so"
    (folder / "include").mkdir()
    (folder / "include" / "tessera").symlink_to(HERE.parent.parent / "src")
    torch_folders = cpp_extension.library_paths()
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *map(str, sorted((HERE / "fake_cuda").glob("*.cpp"))), "-o", str(library),
         f"-I{folder / 'include'}", *(f"-isystem{path}" for path in cpp_extension.include_paths()),
         *(f"-L{path}" for path in torch_folders), *(f"-Wl,-rpath,{path}" for path in torch_folders),
         "-ltorch_cpu", "-lc10", f"-L{package / 'lib'}", f"-Wl,-rpath,{package / 'lib'}", f"-l:{ours.name}"],
        check=True)
    (modules / "devices").mkdir(exist_ok=True)
    for module in (modules / "devices" / "cuda.so", modules / "nccl.so"):
        module.unlink(missing_ok=True)
        os.link(library, module)
    return library


def on_ranks(fake, function, ranks, *arguments, env=None):
    """As run(), with the copy of the package: processes get this one's path."""
    site = str(fake.parent / "site")
    sys.path.insert(0, site)
    try:
        return run(function, ranks, str(fake), *arguments, env=env)
    finally:
        sys.path.remove(site)


def load(fake):
    torch.ops.load_library(fake)
    torch.cuda.get_device_capability = lambda *_: (8, 0)  # PyTorch asks for it before a broadcast
    return torch.ops.fake_cuda


def late(cuda, value, count=5):
    """A tensor that has its value once the current stream gets there."""
    tensor = cuda.tensor(torch.full((count,), -1.0))
    cuda.fill(tensor, value)
    return tensor


def same(cuda, tensor, want, what):
    got = cuda.read(tensor)
    assert torch.equal(got, torch.as_tensor(want, dtype=got.dtype).expand_as(got)), f"{what}: {got} instead of {want}"


def operations(rank, ranks, fake):
    cuda = load(fake)
    total = sum(range(1, ranks + 1))
    other = dist.new_group(list(range(ranks)))
    for group in (None, other):
        x = late(cuda, rank + 1.0)
        dist.all_reduce(x, group=group)
        same(cuda, x, float(total), "all_reduce")
    out, x = cuda.tensor(torch.zeros(5 * ranks)), late(cuda, rank + 1.0)
    dist.all_gather_into_tensor(out, x)
    same(cuda, out, torch.arange(1.0, ranks + 1).repeat_interleave(5), "all_gather_into_tensor")
    parts = [cuda.tensor(torch.zeros(5)) for _ in range(ranks)]  # not one after another: by temporary memory
    before = cuda.recorded()
    dist.all_gather(parts, late(cuda, rank + 1.0))
    for r, part in enumerate(parts):
        same(cuda, part, r + 1.0, "all_gather")
    assert cuda.recorded() > before, "the temporary memory was not kept for the stream that reads it"
    part = cuda.tensor(torch.zeros(5))
    dist.reduce_scatter_tensor(part, late(cuda, rank + 1.0, 5 * ranks))
    same(cuda, part, float(total), "reduce_scatter_tensor")
    x = late(cuda, rank + 1.0)
    dist.broadcast(x, 1)
    same(cuda, x, 2.0, "broadcast")
    strided = cuda.tensor(torch.full((3, 4), -1.0).t())
    cuda.fill(strided, rank + 1.0)
    dist.all_reduce(strided)
    same(cuda, strided, float(total), "all_reduce of a transposed tensor")
    if rank == 0:
        dist.send(late(cuda, 7.0), 1)
    elif rank == 1:
        x = cuda.tensor(torch.zeros(5))
        dist.recv(x, 0)
        same(cuda, x, 7.0, "recv")
    host = torch.full((5,), rank + 1.0)
    dist.all_reduce(host)  # beside the device's
    assert torch.equal(host, torch.full((5,), float(total)))
    objects = [None] * ranks
    dist.all_gather_object(objects, rank)
    assert objects == list(range(ranks))
    dist.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operations(fake, transport):
    on_ranks(fake, operations, 2, env={"TESSERA_BACKEND": transport})


def futures(rank, ranks, fake):
    cuda = load(fake)
    work = dist.all_reduce(late(cuda, rank + 1.0), async_op=True)
    value = work.get_future().then(lambda future: future.value()[0]).wait()
    same(cuda, value, 3.0, "the future's value")
    work = dist.all_reduce(late(cuda, rank + 1.0), async_op=True)
    until = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < until
    same(cuda, work.result()[0], 3.0, "a completed work's result")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_futures(fake, transport):
    on_ranks(fake, futures, 2, env={"TESSERA_BACKEND": transport})


def streams(rank, ranks, fake):
    """Rank 1 calls half a second later. Rank 0 waits for it on its stream only."""
    cuda = load(fake)
    dist.all_reduce(late(cuda, 1.0))  # connects
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    x = late(cuda, rank + 1.0)
    begin = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    assert work.get_future().done(), "the value is not ready to be waited for by streams"
    work.wait()
    waited = time.monotonic() - begin
    if rank == 0:
        assert waited < 0.3, f"wait() has blocked the host for {waited:.2f} s"
        assert not work.is_completed()
        assert cuda.pending() > 0, "the stream does not wait"
        # The control: a stream that nobody made wait sees the memory as it was.
        cuda.set_stream(cuda.new_stream())
        assert not torch.equal(cuda.read(x), torch.full((5,), 3.0)), "the test can't see a stream that does not wait"
        work.wait()
        same(cuda, x, 3.0, "on another stream that waits")
        cuda.set_stream(0)
    same(cuda, x, 3.0, "on the stream that waits")
    # wait() with a time limit is the host's.
    if rank == 1:
        time.sleep(0.5)
    work = dist.all_reduce(late(cuda, 1.0), async_op=True)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="has not ended within the 50 ms"):
            work.wait(datetime.timedelta(milliseconds=50))
    work.wait()


def test_streams_wait_in_place_of_the_host(fake):
    on_ranks(fake, streams, 2, env={"TESSERA_BACKEND": "nccl"})


def dropped(rank, ranks, fake):
    """Tensors live until the device is done with them, though the program has dropped them and their work."""
    cuda = load(fake)
    dist.all_reduce(late(cuda, 1.0))
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    other = cuda.tensor(torch.ones(5))

    def live():
        cuda.read(other)  # memory is freed in the order of the stream
        return cuda.live()

    before = live()
    work = dist.all_reduce(cuda.tensor(torch.ones(5)), async_op=True)
    del work
    during = live()
    dist.barrier()
    until = time.monotonic() + 20
    while live() != before:
        assert time.monotonic() < until, "the memory is never freed"
        time.sleep(0.01)
    return during - before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dropped_works_keep_their_tensors(fake, transport):
    assert on_ranks(fake, dropped, 2, env={"TESSERA_BACKEND": transport})[0] == 1


def mistakes(rank, ranks, fake):
    cuda = load(fake)
    x = cuda.tensor(torch.ones(5))
    with pytest.raises(ValueError, match="must be on one device, not on cuda:0 and cpu|not on cpu and cuda:0"):
        dist.all_gather_into_tensor(torch.zeros(5 * ranks), x)
    dist.all_reduce(x)
    with pytest.raises(ValueError, match="moves tensors of cuda:0, not of cuda:1; a group has one device"):
        dist.all_reduce(cuda.tensor(torch.ones(5), 1))
    dist.all_reduce(x)  # the group is as good as before
    same(cuda, x, float(ranks * ranks), "after the mistakes")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_mistakes(fake, transport):
    on_ranks(fake, mistakes, 2, env={"TESSERA_BACKEND": transport})


def bound(rank, ranks, fake, store):
    cuda = load(fake)
    dist.destroy_process_group()
    torch.accelerator.device_count = lambda: 1
    dist.init_process_group("tessera", init_method=f"file://{store}", rank=rank, world_size=ranks,
                            device_id=torch.device("cuda:0"))
    some = dist.new_group([0, 1])
    if rank < 2:
        x = late(cuda, rank + 1.0)
        dist.all_reduce(x, group=some)
        same(cuda, x, 3.0, "in a group")
    x = late(cuda, 1.0)
    dist.all_reduce(x)
    same(cuda, x, float(ranks), "with device_id")
    parts = dist.split_group(split_ranks=[[0, 1, 2]])
    x = late(cuda, 1.0)
    dist.all_reduce(x, group=parts)
    same(cuda, x, float(ranks), "in a split group")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_device_id(fake, transport, tmp_path):
    on_ranks(fake, bound, 3, str(tmp_path / "store"), env={"TESSERA_BACKEND": transport})


def without_module(rank, ranks, fake):
    cuda = load(fake)
    with pytest.raises(NotImplementedError, match="tensors of cuda:0 can't be used: device cuda: not part of this build"):
        dist.all_reduce(cuda.tensor(torch.ones(5)))
    x = torch.ones(5)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((5,), float(ranks)))


def test_a_package_without_the_module_says_so(fake):
    module = fake.parent / "site" / "tessera" / "lib" / "tessera-modules" / "devices" / "cuda.so"
    aside = module.with_suffix(".aside")
    module.rename(aside)
    try:
        on_ranks(fake, without_module, 2, env={"TESSERA_BACKEND": "shm"})
    finally:
        aside.rename(module)
