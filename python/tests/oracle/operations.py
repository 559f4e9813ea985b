"""Operations of many forms between two ranks, with checks of their results. The tests run it with and without recording."""

import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def expect(tensor, values):
    assert tensor.reshape(-1).tolist() == values, (tensor, values)


def collectives(rank):
    peer = 1 - rank
    mine = torch.tensor([float(rank + 1), 10.0])
    dist.all_reduce(mine)
    expect(mine, [3.0, 20.0])
    work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, async_op=True)
    assert work.wait(timeout=timedelta(seconds=30))
    expect(mine, [3.0, 20.0])
    future = dist.all_reduce(mine, async_op=True).get_future()
    expect(future.wait()[0], [6.0, 40.0])
    work = dist.all_reduce(torch.ones(4), async_op=True)
    while not work.is_completed():  # a program may poll
        time.sleep(0.001)
    dist.reduce(mine, dst=1)
    expect(mine, [12.0, 80.0] if rank == 1 else mine.tolist())
    mine = torch.tensor([float(rank)])
    gathered = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(gathered, mine)
    expect(torch.cat(gathered), [0.0, 1.0])
    whole = torch.zeros(2)
    dist.all_gather_into_tensor(whole, mine)
    expect(whole, [0.0, 1.0])
    part = torch.zeros(1)
    dist.reduce_scatter(part, [torch.ones(1), torch.full((1,), 2.0)])
    expect(part, [2.0 * (rank + 1)])
    dist.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0]))
    expect(part, [2.0 * (rank + 1)])
    dist.broadcast(mine, src=1)
    expect(mine, [1.0])
    dist.scatter(part, [torch.zeros(1), torch.ones(1)] if rank == 0 else None, src=0)
    expect(part, [float(rank)])
    dist.gather(part, gathered if rank == 0 else None, dst=0)
    expect(torch.cat(gathered), [0.0, 1.0])
    exchanged = torch.zeros(2)
    dist.all_to_all_single(exchanged, torch.tensor([rank * 10.0, rank * 10.0 + 1]))
    expect(exchanged, [float(rank), 10.0 + rank])
    dist.barrier()
    expect(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 0, [2.0, 2.0])
    expect(functional.all_gather_tensor(torch.tensor([float(rank)]), 0, dist.group.WORLD) + 0, [0.0, 1.0])
    integers = torch.tensor([rank, 5], dtype=torch.int64)
    dist.all_reduce(integers)
    expect(integers, [1, 10])
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    strided = torch.arange(6.0).view(2, 3).t()[:2]
    dist.all_gather([torch.zeros(2, 2), torch.zeros(2, 2)], strided.contiguous())
    with dist._coalescing_manager(async_ops=True) as several:
        tensors = [torch.ones(3), torch.ones(2)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    several.wait()
    expect(torch.cat(tensors), [2.0] * 5)
    # The receive is issued before the operation that lets the peer send: no wait may block another operation.
    received = torch.zeros(1)
    receive = dist.irecv(received, src=peer)
    late = torch.ones(1)
    dist.all_reduce(late)
    send = dist.isend(torch.tensor([float(rank)]), dst=peer)
    send.wait()
    while not receive.is_completed():
        time.sleep(0.001)
    receive.wait()
    expect(received, [float(peer)])
    batch = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    expect(received, [1.0])


def crossing_groups(rank):
    """Asynchronous operations of two groups, issued in another order on each rank."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    tensors = [torch.full((100,), float(rank + i)) for i in range(2)]
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in ((0, 1) if rank == 0 else (1, 0))]
    for work in works:
        work.wait()
    expect(tensors[0][:1], [1.0])
    expect(tensors[1][:1], [3.0])


def threads(rank):
    """Each thread uses a group of its own."""
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    failures = []

    def use(group):
        for _ in range(20):
            tensor = torch.ones(1000)
            dist.all_reduce(tensor, group=group)
            if tensor[0] != 2:
                failures.append(tensor[0])

    running = [threading.Thread(target=use, args=(group,)) for group in groups]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failures


def changes_after_wait(rank):
    """The outputs are hashed before the program changes them."""
    for _ in range(50):
        tensor = torch.ones(50_000)
        dist.all_reduce(tensor, async_op=True).wait()
        tensor.zero_()


def step():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    if sys.argv[1] == "fails":
        if rank == 1:
            step()
            raise SystemExit(0)  # without the operation that rank 0 waits for
        tensor = torch.ones(4)
        try:
            dist.all_reduce(tensor, async_op=True).wait()
        except RuntimeError as error:
            print("wait raises", type(error).__name__)
            raise
        raise SystemExit(0)
    globals()[sys.argv[1]](rank)
    step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
