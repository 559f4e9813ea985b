"""Gradients that are averaged and clipped in the same way under DDP and under FSDP2 (fully_shard)."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def ddp_average_hook(group, bucket):
    """A communication hook for DistributedDataParallel: the sum of the ranks' gradients, divided once by their number.

    By default DDP multiplies each rank's gradients by 1/n before it adds them. FSDP2 divides the sum. The two agree to the
    bit only where n is a power of two; with this hook they agree for any n:

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, ddp_average_hook)
    """
    group = group if group is not None else dist.group.WORLD
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Sums along the last dimension by a binary tree. Only element-wise additions: their result depends neither on the
    number of threads nor on what lies beside."""
    while values.shape[-1] > 1:
        count = values.shape[-1]
        half = (count + 1) // 2
        lower = values[..., :half].clone()
        lower[..., : count - half] += values[..., half:]
        values = lower
    return values.squeeze(-1) if values.shape[-1] == 1 else values.new_zeros(values.shape[:-1])


def _square_sum(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of squares of the whole gradient, on each rank, with the same order of additions however it is sharded."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if gradient.dim() == 0:
        local = local.reshape(1)
    rows = local.shape[0]
    # A row lies on one rank, since FSDP2 shards the first dimension. The square of an f32 is exact in f64.
    squares = _tree_sum(local.detach().double().square().reshape(rows, local.numel() // rows if rows else 0))
    if isinstance(gradient, DTensor):
        if any(not (p.is_replicate() or p.is_shard(0)) for p in gradient.placements):
            raise ValueError(f"clip_grad_norm_: a gradient has placements {gradient.placements}; only those of FSDP2 and "
                             "DDP are supported: Shard(0) and Replicate()")
        squares = DTensor.from_local(squares, gradient.device_mesh, gradient.placements, run_check=False,
                                     shape=torch.Size([gradient.shape[0]]), stride=(1,)).full_tensor()
    return _tree_sum(squares)


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm: float) -> torch.Tensor:
    """Scales the gradients so that their common 2-norm is at most `max_norm`, and returns the norm before.

    As torch.nn.utils.clip_grad_norm_, but the norm has the same bits under DDP and FSDP2: it is added in f64 by one tree
    over the rows of the whole gradients. All ranks call it with the same parameters, in the same order.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norm = _tree_sum(torch.stack([_square_sum(g) for g in gradients])).sqrt().float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(local.dtype))
    return norm
