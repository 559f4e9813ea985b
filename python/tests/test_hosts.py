"""Programs under torchrun on two hosts, which are network namespaces, and under Slurm. Needs root, iproute2 and Slurm."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

LAUNCHERS = pathlib.Path(__file__).parents[2] / "tests" / "launchers"
sys.path.append(str(LAUNCHERS))
has_tool = "TESSERA_TOOL" in os.environ
os.environ.setdefault("TESSERA_TOOL", "")  # which the modules below name, but these tests don't run

import jobs  # noqa: E402
import networks  # noqa: E402
import slurm  # noqa: E402

if not has_tool:
    del os.environ["TESSERA_TOOL"]

RANKS = 4

TRAINING = """
import datetime, hashlib, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import tessera.torch
torch.set_num_threads(1)
dist.init_process_group("tessera", timeout=datetime.timedelta(seconds=20))
rank, ranks = dist.get_rank(), dist.get_world_size()
hosts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
x = torch.full((3,), float(rank))
dist.all_reduce(x, group=hosts[rank // 2])
assert x[0] == (1 if rank < 2 else 5), x

def trained(shard):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)))
    if shard == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
    if shard == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = model
    if shard == "ddp":
        whole = nn.parallel.DistributedDataParallel(model)
    else:
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        whole(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    hash = hashlib.sha256()
    for parameter in model.parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        hash.update(full.detach().numpy().tobytes())
    return hash.hexdigest()

hashes = {trained(shard) for shard in ("ddp", "fsdp", "hsdp")}
backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
if rank == 0:
    print("bits", *sorted(hashes), "over", backend.transport, flush=True)
dist.destroy_process_group()
"""

ENDLESS = """
import datetime, os, sys
import torch, torch.distributed as dist
import tessera.torch
dist.init_process_group("tessera", timeout=datetime.timedelta(seconds=4))
x = torch.ones(1000)
for step in range(10**9):
    dist.all_reduce(x.fill_(1))
    if step == 100:
        open(os.path.join(os.path.dirname(__file__), f"under-way-{dist.get_rank()}"), "w").close()
"""


def bits_of(out):
    """The hashes and the transport that rank 0 printed."""
    line = next(line for line in out.splitlines() if line.startswith("bits "))
    hashes, _, transport = line.removeprefix("bits ").partition(" over ")
    return hashes.split(), transport


def alone(script, transport):
    """On this host."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=jobs.environment(TESSERA_BACKEND=transport))
    assert done.returncode == 0, done
    return bits_of(done.stdout)


@pytest.fixture(scope="module")
def pair():
    made = networks.Pair("1gbit")
    yield made
    made.remove()


def start(pair, script, port, transport):
    """torchrun on each host, with two ranks."""
    env = jobs.environment(OMP_NUM_THREADS=1, **({"TESSERA_BACKEND": transport} if transport else {}))
    return [
        jobs.start(
            host.command([
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}", "--nproc-per-node=2",
                f"--master-addr={pair.ADDRESSES[0]}", f"--master-port={port}", str(script),
            ]),
            env,
        )
        for number, host in enumerate(pair.hosts)
    ]


@pytest.mark.parametrize("transport", ("", "tcp", "shm+tcp", "ucx"))
def test_two_hosts_train_to_the_bits_of_one(pair, tmp_path, transport):
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    with jobs.Job(start(pair, script, 29611, transport)) as job:
        ended = job.finish(120)
    assert ended.code == 0, ended
    hashes, used = bits_of(ended.out)
    assert len(hashes) == 1, "DDP, FSDP2 and HSDP differ"
    assert hashes == alone(script, "shm")[0]
    assert used in {"": ("tcp", "ucx"), "shm+tcp": ("tcp",)}.get(transport, (transport,))


@pytest.mark.parametrize("transport", ("tcp", "shm+tcp"))
def test_cut_cable_is_an_error_on_every_rank(pair, tmp_path, transport):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    with jobs.Job(start(pair, script, 29612, transport)) as job:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("under-way-*"))) < RANKS:
            assert time.monotonic() < deadline, "the ranks have not begun"
            time.sleep(0.05)
        pair.cut()
        begin = time.monotonic()
        try:
            errors = [jobs.finish(process, 60).err for process in job.processes]
        finally:
            pair.mend()
    assert time.monotonic() - begin < 45
    for own, others, text in ((0, (2, 3), errors[0]), (2, (0, 1), errors[1])):
        assert "DistBackendError" in text or "DistNetworkError" in text, text
        assert any(f"rank {other}" in text for other in others) or "cut off" in text, text


def test_slurm_starts_the_ranks(tmp_path):
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    folder = tmp_path / "slurm"
    folder.mkdir()
    cluster = slurm.Slurm(str(folder)).start()
    try:
        ranks = 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; exec "$0" "$1"'
        with cluster.srun().start(["sh", "-c", ranks, sys.executable, str(script)], MASTER_ADDR="127.0.0.1", MASTER_PORT=slurm.processes.free_port(),
                                  OMP_NUM_THREADS=1) as job:
            ended = job.finish(120)
    finally:
        cluster.stop()
    assert ended.code == 0, ended
    hashes, _ = bits_of(ended.out)
    assert hashes == alone(script, "shm")[0]
