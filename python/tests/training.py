"""A model that is trained under each of PyTorch's strategies. What is left of it is a hash of its parameters."""

import contextlib
import dataclasses
import functools
import hashlib

import torch
from torch import nn

import tessera.torch

STEPS = 4


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a model is wrapped. `shape` of an HSDP mesh: replicas and shards."""

    name: str
    shape: tuple = ()
    reshard: object = True  # fully_shard's reshard_after_forward
    hook: bool = True  # DDP: tessera.torch's average instead of DDP's own
    bucket_mb: float = 25
    group_memory: bool = False

    def __str__(self):
        differs = [f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)[1:]
                   if getattr(self, f.name) != f.default]
        return " ".join([self.name, *differs])


@dataclasses.dataclass(frozen=True)
class Run:
    strategy: Strategy
    optimizer: str = "sgd"
    dtype: str = "float32"
    microbatches: int = 1
    clip: bool = False


class Model(nn.Module):
    """In f32 its widths leave padded and uneven shards. In bf16 each shard is a multiple of a vector's length for 2, 3 and 4
    ranks: PyTorch's own kernel of `x.add_(y, alpha=a)`, which SGD calls, rounds the elements beyond the last full vector in
    another way than the others, and sharding moves these."""

    def __init__(self, dtype):
        super().__init__()
        width, hidden, vocabulary, depth = (24, 50, 32, 3) if dtype == torch.float32 else (384, 384, 384, 1)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)
        self.to(dtype)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def digest(model):
    full = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        full.update(name.removeprefix("module.").encode())
        full.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return full.hexdigest()[:16]


@functools.cache
def mesh_of(shape):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape):])


def data_parallel(strategy, model):
    """DistributedDataParallel, or `replicate`, which applies it in place."""
    from torch.distributed._composable.replicate import replicate
    from torch.nn.parallel import DistributedDataParallel

    wrap = DistributedDataParallel if strategy.name == "ddp" else replicate
    model = wrap(model, bucket_cap_mb=strategy.bucket_mb)
    if strategy.hook:
        model.register_comm_hook(None, tessera.torch.ddp_average_hook)
    return model


def sharded(strategy, model, ranks, dtype):
    """fully_shard, or the `replicate` that is made of it: of each block, and of the rest."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if strategy.shape and dtype == torch.bfloat16:  # a gradient of 16 bits would be rounded after each of two reductions
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        if strategy.name == "replicate by fsdp":
            replicate(module, mesh=mesh_of((ranks,)))
        else:
            fully_shard(module, mesh=mesh_of(strategy.shape or (ranks,)), reshard_after_forward=strategy.reshard,
                        mp_policy=policy)
        if strategy.group_memory:
            module.set_allocate_memory_from_process_group_for_comm(True)
    return model


def without_reduction(model):
    """A microbatch whose gradients stay on their rank."""
    if hasattr(model, "no_sync"):
        return model.no_sync()
    model.set_requires_gradient_sync(False)
    stack = contextlib.ExitStack()
    stack.callback(model.set_requires_gradient_sync, True)
    return stack


def train(rank, ranks, run):
    """The hash, and the gradients' norm in each step that clips."""
    dtype = getattr(torch, run.dtype)
    torch.manual_seed(7)
    model = Model(dtype)
    before = digest(model)
    if run.strategy.name in ("ddp", "replicate"):
        model = data_parallel(run.strategy, model)
    else:
        model = sharded(run.strategy, model, ranks, dtype)
    make = {"sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            "adamw": functools.partial(torch.optim.AdamW, lr=1e-2)}[run.optimizer]
    optimizer = make(list(model.parameters()), foreach=False)
    norms = []
    for step in range(STEPS):
        for part in range(run.microbatches):
            generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
            ids = torch.randint(0, 32, (4, 9), generator=generator)
            last = part == run.microbatches - 1
            with contextlib.nullcontext() if last else without_reduction(model):
                logits = model(ids[:, :-1])
                nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        if run.clip:
            norms.append(tessera.torch.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    after = digest(model)
    assert after != before, "nothing was trained"
    return after, norms
