"""Observes every operation between ranks: those of the script, of DDP's reducer in C++, of FSDP2 and of DTensor.

All of them pass PyTorch's dispatcher as an operator of the namespace c10d. A kernel for the key BackendSelect, which is
part of every dispatch, runs before the kernel of the device and passes the call on to it. So the process groups stay as
they are, whatever their backend is.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist

from torch._C._distributed_c10d import Work, _create_work_from_future

from tessera.oracle import hashing
from tessera.oracle.layout import dtype_name, sample_of
from tessera.oracle.waiters import Waiters

if not hasattr(dist.ReduceOp, "unbox"):
    raise ImportError(
        f"tessera.oracle can't record with PyTorch {torch.__version__}, which does not tell what its collectives reduce; "
        "use a newer one (2.15 is tried)"
    )

# Operator: the kind of the operation in a record, and how to find its inputs and outputs among the arguments.
_OPERATORS: dict[str, tuple[str, str]] = {
    "allreduce_": ("all_reduce", "in_place"),
    "allreduce_coalesced_": ("all_reduce", "in_place"),
    "reduce_": ("reduce", "in_place"),
    "broadcast_": ("broadcast", "in_place"),
    "allgather_": ("all_gather", "outputs_inputs"),
    "allgather_coalesced_": ("all_gather", "outputs_inputs"),
    "_allgather_base_": ("all_gather", "outputs_inputs"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs_inputs"),
    "reduce_scatter_": ("reduce_scatter", "outputs_inputs"),
    "_reduce_scatter_base_": ("reduce_scatter", "outputs_inputs"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "outputs_inputs"),
    "gather_": ("gather", "outputs_inputs"),
    "gather_into_tensor_": ("gather", "outputs_inputs"),
    "scatter_": ("scatter", "outputs_inputs"),
    "alltoall_": ("all_to_all", "outputs_inputs"),
    "alltoall_base_": ("all_to_all", "outputs_inputs"),
    "send": ("send", "inputs"),
    "recv_": ("recv", "outputs"),
    "recv_any_source_": ("recv", "outputs"),
    "barrier": ("barrier", "none"),
}
# Whole tensors that hold one part per rank. Their parts are hashed one by one, as lists of tensors are.
_PARTED_OUTPUTS = ("_allgather_base_", "allgather_into_tensor_coalesced_", "gather_into_tensor_")
_PARTED_INPUTS = ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
_HAVE_INPUTS = ("in_place", "inputs", "outputs_inputs")
_HAVE_OUTPUTS = ("in_place", "outputs", "outputs_inputs")
# The kinds whose outputs become gradients. Their outputs are kept until the optimizer's step, to see which they carry.
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce", "all_to_all")


class Collective:
    """One operation of this rank, from its issue to its completion."""

    def __init__(self, entry: dict[str, Any], outputs: list[torch.Tensor], parts: int = 1) -> None:
        self.entry = entry
        self.outputs = outputs
        self.parts = parts  # in how many parts each output is hashed
        self.done = threading.Event()


def _flattened(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _flattened(item)]


def _parts(tensors: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        parts.extend(flat.chunk(ranks) if flat.numel() % ranks == 0 and flat.numel() else [flat])
    return parts


def _hashes(tensors: list[torch.Tensor], parts: int) -> dict[str, Any]:
    if parts > 1:
        tensors = _parts(tensors, parts)
    return {"hashes": [hashing.text(hashing.hash_flat(t)) for t in tensors]}


def _squares(tensors: list[torch.Tensor]) -> float:
    """The sum of squares of all elements, for the ratio of two runs."""
    return sum(hashing.square_sum(t) or 0.0 for t in tensors)


def _ranks_of(group: Any) -> list[int]:
    """The global ranks of a process group in the order of its own ranks."""
    process_group = dist.ProcessGroup.unbox(group)
    try:
        return list(dist.get_process_group_ranks(process_group))
    except (KeyError, ValueError):  # while the group is being made
        return list(range(process_group.size()))


def _reduction(value: Any) -> str:
    return str(dist.ReduceOp.unbox(value).op).rsplit(".", 1)[-1].lower()


class Observer:
    """Calls `on_issue` with each operation before it starts. The hashes of its outputs follow when it completes."""

    def __init__(self, on_issue: Callable[[Collective], None]) -> None:
        self._on_issue = on_issue
        self._error: Optional[Exception] = None
        self._waiters = Waiters()
        self._after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        self._library: Optional[torch.library.Library] = torch.library.Library("c10d", "IMPL")
        for name in _OPERATORS:
            packet = getattr(torch.ops.c10d, name, None)  # other releases of PyTorch lack some of them
            if packet is not None:
                self._library.impl(name, self._kernel(name, packet.default), "BackendSelect", with_keyset=True)
        self._original_wait = Work.wait
        Work.wait = self._wait_method()  # type: ignore[method-assign]

    def close(self, seconds: float) -> None:
        """Stops observing. Waits some seconds for operations in flight."""
        if self._library is not None:
            self._library._destroy()
            self._library = None
            Work.wait = self._original_wait  # type: ignore[method-assign]
            self._waiters.close(seconds)

    def raise_error(self) -> None:
        """Raises, once, what an operation raised. A work made from a future returns from wait() without it."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait_method(self) -> Callable[..., Any]:
        original = self._original_wait

        def wait(work: Work, *arguments: Any, **named: Any) -> Any:
            try:
                result = original(work, *arguments, **named)
            except RuntimeError as error:
                if "FutureWrappingWork" not in str(error):
                    raise
                result = original(work)  # it takes no timeout; that of the group holds
            self.raise_error()
            return result

        return wait

    def _kernel(self, name: str, operator: Any) -> Callable[..., Any]:
        arguments = [argument.name for argument in operator._schema.arguments]

        def kernel(keys: Any, *values: Any, **named: Any) -> Any:
            self.raise_error()
            collective = self._issued(name, {**dict(zip(arguments, values)), **named})
            result = operator.redispatch(keys & self._after, *values, **named)
            if isinstance(result, tuple):
                return (*result[:-1], self._watched(result[-1], collective))
            return self._watched(result, collective)

        return kernel

    @torch.no_grad()
    def _issued(self, name: str, arguments: dict[str, Any]) -> Collective:
        kind, form = _OPERATORS[name]
        ranks = _ranks_of(arguments["process_group"])
        tensors = [_flattened(v) for v in arguments.values() if isinstance(v, (list, tuple, torch.Tensor))]
        inputs = tensors[{"in_place": 0, "inputs": 0, "outputs_inputs": 1}[form]] if form in _HAVE_INPUTS else []
        outputs = tensors[0] if form in _HAVE_OUTPUTS else []
        entry: dict[str, Any] = {"kind": kind, "group": ranks}
        if "reduce_op" in arguments:
            entry["op"] = _reduction(arguments["reduce_op"])
        for key, label in (("root_rank", "root"), ("dst", "peer"), ("src", "peer"), ("tag", "tag")):
            if key in arguments:
                entry[label] = arguments[key]
        shown = inputs or outputs
        entry["dtype"] = dtype_name(shown[0].dtype) if shown else ""
        entry["count"] = sum(t.numel() for t in shown)
        # Only the root's input of a broadcast and the root's output of a reduction have a meaning.
        if "root" in entry and entry["root"] < len(ranks) and ranks[entry["root"]] != dist.get_rank():
            inputs = [] if kind == "broadcast" else inputs
            outputs = [] if kind == "reduce" else outputs
        if any(t.layout != torch.strided for t in inputs + outputs):
            entry["unhashed"] = "a sparse tensor"
            outputs = []
        else:
            entry["inputs"] = _hashes(inputs, len(ranks) if name in _PARTED_INPUTS else 1)
            if kind in REDUCTIONS:
                entry["inputs"]["squares"] = _squares(inputs)
                entry["inputs"]["sample"] = [value for tensor in inputs for value in sample_of(tensor)]
        collective = Collective(entry, outputs, len(ranks) if name in _PARTED_OUTPUTS else 1)
        self._on_issue(collective)
        return collective

    def _watched(self, boxed: Any, collective: Collective) -> Any:
        """A work whose waiter continues only after the outputs were hashed. Before that the program could change them."""
        if not isinstance(boxed, torch.ScriptObject):
            return boxed
        work, results = Work.unbox(boxed), collective.outputs
        if work is None:  # within coalescing there is one work for several operations
            return boxed

        future: torch.futures.Future = torch.futures.Future()

        def wait() -> None:
            try:
                self._original_wait(work)
                self._completed(collective)
            except Exception as error:
                self._error = error
                collective.done.set()
                future.set_exception(error)
            else:
                future.set_result(results)

        self._waiters.run(wait)
        return _create_work_from_future(future).boxed()

    @torch.no_grad()
    def _completed(self, collective: Collective) -> None:
        if "unhashed" not in collective.entry:
            try:
                collective.entry["outputs"] = _hashes(collective.outputs, collective.parts)
            except Exception as error:  # the training goes on; the record says what is missing
                collective.entry["unhashed"] = f"{type(error).__name__}: {error}"
        if collective.entry["kind"] not in REDUCTIONS:
            collective.outputs = []
        collective.done.set()
