"""Every operation against its definition."""

import time

import pytest
import torch
import torch.distributed as dist

from ranks import run

TRANSPORTS = ("shm", "tcp", "ucx")
REDUCED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
OTHERS = (torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64)


def value(rank, dtype, count=7):
    """Small integers: their sums and products are exact."""
    return ((torch.arange(count) + rank) % 3).to(dtype)


def same(got, want, what):
    assert got.dtype == want.dtype and torch.equal(got, want), f"{what}: {got} instead of {want}"


def reductions(rank, ranks):
    every = {dtype: [value(r, dtype) for r in range(ranks)] for dtype in REDUCED + (torch.complex64,)}
    combine = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.PRODUCT: torch.mul, dist.ReduceOp.MIN: torch.minimum,
               dist.ReduceOp.MAX: torch.maximum}
    for dtype, values in every.items():
        for op, add in combine.items():
            if dtype.is_complex and op != dist.ReduceOp.SUM:
                continue
            want = values[0]
            for other in values[1:]:
                want = add(want, other)
            x = values[rank].clone()
            dist.all_reduce(x, op=op)
            same(x, want, f"all_reduce {op} {dtype}")
            for root in range(ranks):
                x = values[rank].clone()
                dist.reduce(x, root, op=op)
                if rank == root:
                    same(x, want, f"reduce {op} {dtype}")
            whole = torch.cat([values[rank]] * ranks)
            part = torch.empty_like(values[rank])
            dist.reduce_scatter_tensor(part, whole, op=op)
            same(part, want, f"reduce_scatter_tensor {op} {dtype}")
            dist.reduce_scatter(part.zero_(), [values[rank].clone() for _ in range(ranks)], op=op)
            same(part, want, f"reduce_scatter {op} {dtype}")
    bits = {dist.ReduceOp.BAND: torch.bitwise_and, dist.ReduceOp.BOR: torch.bitwise_or, dist.ReduceOp.BXOR: torch.bitwise_xor}
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        values = [torch.arange(256).to(dtype) * (2 * r + 3) for r in range(ranks)]
        for op, combine in bits.items():
            want = values[0]
            for other in values[1:]:
                want = combine(want, other)
            x = values[rank].clone()
            dist.all_reduce(x, op=op)
            same(x, want, f"all_reduce {op} {dtype}")
    x = value(rank, torch.float32) * 3
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    same(x, sum(value(r, torch.float32) * 3 for r in range(ranks)) / ranks, "average")
    for op, want in ((dist.ReduceOp.BOR, [False, True, ranks > 1]), (dist.ReduceOp.BAND, [False, ranks == 1, False]),
                     (dist.ReduceOp.BXOR, [False, ranks % 2 == 1, ranks > 1]), (dist.ReduceOp.SUM, [False, True, ranks > 1]),
                     (dist.ReduceOp.MIN, [False, ranks == 1, False])):
        x = torch.tensor([False, rank == 0 or (op == dist.ReduceOp.BXOR), rank == 1])
        if op == dist.ReduceOp.BAND or op == dist.ReduceOp.MIN:
            x = torch.tensor([False, rank == 0, False])
        dist.all_reduce(x, op=op)
        same(x, torch.tensor(want), f"all_reduce {op} of booleans")
    with pytest.raises(NotImplementedError, match="BAND of Float is not supported"):
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND)


def movements(rank, ranks):
    for dtype in REDUCED + OTHERS:
        mine = value(rank, dtype)
        every = [value(r, dtype) for r in range(ranks)]
        for root in range(ranks):
            x = mine.clone()
            dist.broadcast(x, root)
            same(x, every[root], f"broadcast {dtype}")
            got = [torch.empty_like(mine) for _ in range(ranks)] if rank == root else None
            dist.gather(mine, got, dst=root)
            if rank == root:
                same(torch.cat(got), torch.cat(every), f"gather {dtype}")
            x = torch.empty_like(mine)
            dist.scatter(x, [value(r + 1, dtype) for r in range(ranks)] if rank == root else None, src=root)
            same(x, value(rank + 1, dtype), f"scatter {dtype}")
        got = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(got, mine)
        same(torch.cat(got), torch.cat(every), f"all_gather {dtype}")
        whole = torch.empty(7 * ranks, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine)
        same(whole, torch.cat(every), f"all_gather_into_tensor {dtype}")
        out = torch.empty(7 * ranks, dtype=dtype)
        dist.all_to_all_single(out, torch.cat([value(rank + r, dtype) for r in range(ranks)]))
        same(out, torch.cat([value(r + rank, dtype) for r in range(ranks)]), f"all_to_all_single {dtype}")
        out = [torch.empty(r + 1, dtype=dtype) for r in range(ranks)]
        dist.all_to_all(out, [value(r, dtype, rank + 1) for r in range(ranks)])
        for r in range(ranks):
            same(out[r], value(rank, dtype, r + 1), f"all_to_all {dtype}")
    # Parts of different lengths, along the first dimension.
    out = torch.empty(sum(r + 1 for r in range(ranks)), 2)
    dist.all_to_all_single(out, torch.full(((rank + 1) * ranks, 2), float(rank)), [r + 1 for r in range(ranks)],
                           [rank + 1] * ranks)
    same(out, torch.cat([torch.full((r + 1, 2), float(r)) for r in range(ranks)]), "all_to_all_single with splits")
    got = [torch.empty(r + 1) for r in range(ranks)]
    dist.all_gather(got, torch.full((rank + 1,), float(rank)))
    for r in range(ranks):
        same(got[r], torch.full((r + 1,), float(r)), "all_gather of different lengths")


def strides(rank, ranks):
    """Tensors that are not contiguous, and empty ones."""
    x = torch.full((4, 6), float(rank + 1)).t()
    dist.all_reduce(x)
    same(x, torch.full((6, 4), ranks * (ranks + 1) / 2), "all_reduce of a transposed tensor")
    big = torch.zeros(4, 6)
    part = big[:, 1:3]
    part += rank + 1
    dist.all_reduce(part)
    assert big.sum() == 8 * ranks * (ranks + 1) / 2 and big[0, 0] == 0
    x = torch.arange(6.0).reshape(2, 3).t() if rank == 0 else torch.zeros(2, 3).t()
    dist.broadcast(x, 0)
    same(x.contiguous(), torch.arange(6.0).reshape(2, 3).t().contiguous(), "broadcast of a transposed tensor")
    whole = torch.empty(3, 2 * ranks).t()
    dist.all_gather_into_tensor(whole, torch.full((2, 3), float(rank)))
    same(whole.contiguous(), torch.arange(ranks).repeat_interleave(2)[:, None].expand(-1, 3).float().contiguous(), "all_gather")
    dist.all_reduce(torch.empty(0))
    a, b = torch.ones(3) * rank, torch.ones(2, 2) * rank
    dist.all_reduce_coalesced([a, b])
    assert a[0] == b[0, 0] == ranks * (ranks - 1) / 2
    with pytest.raises(ValueError, match="has 3 elements, not"):
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(4))


def messages(rank, ranks):
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    # A send that nobody waits for does not block, and arrives.
    dist.isend(torch.full((1_000_000,), float(rank)), after)
    x = torch.empty(1_000_000)
    assert dist.recv(x, before) == before
    assert bool((x == before).all())
    got = torch.empty(1000)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((1000,), float(rank)), after),
                                    dist.P2POp(dist.irecv, got, before)])
    for work in works:
        work.wait()
    assert bool((got == before).all())
    # In another order than they were sent, and from anyone.
    sends = [dist.isend(torch.full((count,), float(tag)), after, tag=tag) for tag, count in ((3, 9), (5, 100_000), (4, 9))]
    for tag, count in ((4, 9), (5, 100_000), (3, 9)):
        x = torch.empty(count)
        dist.recv(x, before, tag=tag)
        assert bool((x == tag).all())
    for work in sends:
        work.wait()
    if rank == 0:
        senders = set()
        for _ in range(ranks - 1):
            x = torch.empty(7)
            sender = dist.recv(x, tag=6)
            assert bool((x == sender).all())
            senders.add(sender)
        assert len(senders) == ranks - 1
    else:
        dist.send(torch.full((7,), float(rank)), 0, tag=6)
    with pytest.raises(ValueError, match="tag is 1048576"):
        dist.send(torch.ones(1), after, tag=1 << 20)
    got = [None] * ranks
    dist.all_gather_object(got, {"rank": rank, "text": "x" * rank})
    assert [one["rank"] for one in got] == list(range(ranks))
    there = ["hello", rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(there, 0)
    assert there == ["hello", 0]


def works(rank, ranks):
    x = torch.full((300_000,), float(rank + 1))
    total = ranks * (ranks + 1) / 2
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    assert bool((future.wait()[0] == total).all()) and work.is_completed() and work.is_success()
    y = torch.full((300_000,), float(rank + 1))
    seen = []
    chained = dist.all_reduce(y, async_op=True).get_future().then(lambda f: seen.append(f.value()[0][0].item()) or f.value())
    chained.wait()
    assert seen == [total]
    # Results that go through temporary tensors are there when the future is.
    parts = [torch.empty(1000, 2).t() for _ in range(ranks)]
    dist.all_gather(parts, torch.full((2, 1000), float(rank)), async_op=True).get_future().wait()
    for r in range(ranks):
        assert bool((parts[r] == r).all())
    # Dropped works end all the same, with their results.
    late = [torch.zeros(100_000) for _ in range(ranks)]
    dist.all_gather(late, torch.full((100_000,), float(rank)), async_op=True)
    end = time.monotonic() + 30
    while not all(bool((late[r] == r).all()) for r in range(ranks)) and time.monotonic() < end:
        time.sleep(0.001)
    assert all(bool((late[r] == r).all()) for r in range(ranks))
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    memory = backend.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu"))
    memory.fill_(rank + 1)
    dist.all_reduce(memory)
    assert bool((memory == total).all())
    sparse = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (ranks + 2,))
    dist.all_reduce(sparse)
    same(sparse.to_dense(), torch.tensor([float(ranks)] + [2.0] * ranks + [0.0]), "all_reduce of a sparse tensor")
    with dist._coalescing_manager(async_ops=True) as manager:
        a, b = torch.full((5,), float(rank)), torch.full((70_000,), float(rank))
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    assert a[0] == b[-1] == ranks * (ranks - 1) / 2


def splits(rank, ranks):
    """Groups that only their members make, and PyTorch's own split of a group."""
    low = list(range(ranks - 1))
    if rank in low:
        group = dist.new_group(low, use_local_synchronization=True)
        x = torch.full((5,), float(rank))
        dist.all_reduce(x, group=group)
        same(x, torch.full((5,), float(sum(low))), "a group of some")
    halves = dist.split_group(split_ranks=[[r for r in range(ranks) if r % 2 == half] for half in (0, 1)])
    x = torch.full((5,), float(rank))
    dist.all_reduce(x, group=halves)
    same(x, torch.full((5,), float(sum(r for r in range(ranks) if r % 2 == rank % 2))), "a split")
    assert sorted(dist.get_process_group_ranks(halves)) == [r for r in range(ranks) if r % 2 == rank % 2]
    dist.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_splits(ranks, transport):
    run(splits, ranks, env={"TESSERA_BACKEND": transport})


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
@pytest.mark.parametrize("body", (reductions, movements, strides, works), ids=lambda body: body.__name__)
def test_operations(body, ranks, transport):
    run(body, ranks, env={"TESSERA_BACKEND": transport})


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", (2, 3))
def test_messages(ranks, transport):
    run(messages, ranks, env={"TESSERA_BACKEND": transport})
