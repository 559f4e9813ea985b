"""A tiny training with a mistake that can be planted in it. The tests run it under the oracle."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.outer = nn.Linear(8, 3)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


def batch(step, microbatch, rank, size=4):
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def loss_of(model, step, microbatch=0, rank=None):
    x, y = batch(step, microbatch, dist.get_rank() if rank is None else rank)
    return (model(x) - y).square().mean()


def train_ddp(options):
    """DDP, with two microbatches per step."""
    model = nn.parallel.DistributedDataParallel(Net())
    if options.mistake == "bf16_reduction":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        model.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        count = 1 if options.mistake == "lost_microbatch" and step == 2 else 2
        for microbatch in range(count):
            last = microbatch == count - 1 or (options.mistake == "missed_no_sync" and step == 2)
            with contextlib.nullcontext() if last else model.no_sync():
                (loss_of(model, step, microbatch) / 2).backward()
        optimizer.step()
        if options.mistake == "extra_step" and step == 1:
            optimizer.step()
        if options.mistake == "changed_parameter" and step == 1:
            with torch.no_grad():
                model.module.inner.weight[0, 0] += 0.5


def train_fsdp2(options):
    """The same training under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            scale = 3 if options.mistake == "wrong_scale" and step == 2 else 2
            (loss_of(model, step, microbatch) / scale).backward()
        optimizer.step()


def train_plain(options):
    """All-reduces written by hand: one for each parameter, or one for a bucket of all."""
    torch.manual_seed(options.seed)
    model, ranks = Net(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    samples = [3, 5]
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        if options.mistake == "dropout_seed":
            torch.manual_seed(options.seed + 100 * step + options.dropout_seed + dist.get_rank())
            x, y = batch(step, 0, dist.get_rank(), 400)
            kept = nn.functional.dropout(x, 0.01)
            (100 + (model(kept) - y).square().mean()).backward()
        elif options.uneven:
            x, y = batch(step, 0, dist.get_rank(), samples[dist.get_rank()])
            each = (model(x) - y).square().mean(dim=1)
            wrong = options.mistake == "wrong_divisor" and step == 2
            (each.mean() / ranks if wrong else each.sum() / sum(samples)).backward()
        else:
            (loss_of(model, step) / ranks).backward()
        if options.bucket:
            carried = [p for n, p in model.named_parameters() if options.mistake != "left_out" or n != "inner.bias"]
            flat = torch.cat([p.grad.reshape(-1) for p in carried])
            averages = options.mistake == "avg_for_sum" and step == 2
            dist.all_reduce(flat, op=dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM)
            if options.mistake == "divided_sum" and step == 2:
                flat /= ranks
            for p, part in zip(carried, flat.split([p.numel() for p in carried])):
                p.grad.copy_(part.view_as(p))
        else:
            for name, p in model.named_parameters():
                if not (options.mistake == "skipped_all_reduce" and step == 2 and name == "outer.weight"):
                    dist.all_reduce(p.grad)
        optimizer.step()


def train_sharded(options):
    """Each rank holds a shard of the parameters, gathers all for a pass, and reduces and scatters the gradients."""
    torch.manual_seed(options.seed)
    model, rank, ranks = Net(), dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % ranks)])
    holder = nn.Module()
    holder.shard = nn.Parameter(flat.chunk(ranks)[rank].clone())
    optimizer = torch.optim.SGD([holder.shard], lr=options.lr)
    before = holder.shard.detach().clone()
    for step in range(1, options.steps + 1):
        source = before if options.mistake == "stale_gather" and step == 2 else holder.shard.detach()
        if not (options.mistake == "skipped_gather" and step == 2):
            dist.all_gather_into_tensor(flat, source)
        offset = 0
        for p in parameters:
            p.data.copy_(flat[offset : offset + p.numel()].view_as(p))
            p.grad = None
            offset += p.numel()
        (loss_of(model, step) / ranks).backward()
        gradient = torch.zeros_like(flat)
        gradient[:offset] = torch.cat([p.grad.reshape(-1) for p in parameters])
        parts = list(gradient.chunk(ranks))
        if options.mistake == "swapped_ranks" and step == 2:
            parts.reverse()
        holder.shard.grad = torch.empty_like(holder.shard)
        dist.reduce_scatter(holder.shard.grad, [part.contiguous() for part in parts])
        before = holder.shard.detach().clone()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--mistake", default="")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--bucket", action="store_true")
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--dropout-seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed + (options.mistake == "changed_seed"))
    dist.init_process_group(options.backend)
    globals()[f"train_{options.strategy}"](options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
