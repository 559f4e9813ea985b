"""Records a training while it runs: one line of JSON for each step of an optimizer."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from typing import Any, Iterator

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tessera.oracle import hashing, layout
from tessera.oracle.carriers import Carriers
from tessera.oracle.collectives import Collective, Observer
from tessera.oracle.files import FORMAT, record_path
from tessera.oracle.names import parameter_names

_SECONDS_FOR_WORK = 10.0  # for operations in flight when recording ends


class _OptimizerState:
    """What is known of one optimizer: its number, the names of its parameters, and its steps so far."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.updates = 0
        self.names: dict[int, str] = {}
        self.layouts: dict[str, Any] = {}
        self.after_step: dict[str, str] = {}  # the hashes of the parameters
        self.carriers = Carriers()


class Recorder:
    """Observes the optimizers, the backward passes and the operations between ranks of this process."""

    def __init__(self, directory: str, model: Any = None, optimizer: Any = None, keep_values: int = 0) -> None:
        self._model, self._only, self._keep_values = model, optimizer, keep_values
        self._rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        self._ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        os.makedirs(directory, exist_ok=True)
        self._file = open(record_path(directory, self._rank), "w", encoding="utf-8")
        self._write(
            {
                "tessera_oracle": FORMAT,
                "rank": self._rank,
                "ranks": self._ranks,
                "torch": torch.__version__,
                "command": sys.argv,
                "keep_values": keep_values,
            }
        )
        self._lock = threading.Lock()
        self._optimizers: dict[int, tuple[Any, _OptimizerState]] = {}
        self._collectives: list[Collective] = []
        self._backwards: list[dict[str, Any]] = []
        self._issued = 0
        self._steps = 0
        self._stepping: list[int] = []  # the optimizers whose step runs: one may call another one
        self._in_backward = threading.local()
        self._pending: list[tuple[dict[str, Any], list[Collective]]] = []
        self._event: dict[str, Any] = {}
        self._observer = Observer(self._on_issue) if dist.is_available() else None
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._observed_backward

    def close(self, complete: bool = True) -> None:
        """Ends the record. `complete` is false if the program failed."""
        if self._file.closed:
            return
        for hook in self._hooks:
            hook.remove()
        torch.autograd.backward = self._backward
        if self._observer is not None:
            self._observer.close(_SECONDS_FOR_WORK if complete else 0.0)
        self._flush(everything=True)
        rest = [dict(c.entry) for c in self._collectives]
        if rest or self._backwards:
            self._write({"rest": True, "backwards": self._backwards, "collectives": rest})
        self._write({"end": True, "complete": complete})
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def _flush(self, everything: bool = False) -> None:
        """Writes the steps whose operations are complete, in order."""
        while self._pending and (everything or all(c.done.is_set() for c in self._pending[0][1])):
            line, collectives = self._pending.pop(0)
            # A copy, since an operation that is still in flight may add its outputs.
            line["collectives"] = [dict(c.entry) for c in collectives]
            self._write(line)

    def _on_issue(self, collective: Collective) -> None:
        with self._lock:
            self._issued += 1
            collective.entry["number"] = self._issued
            self._collectives.append(collective)

    def _observed_backward(self, tensors: Any, *arguments: Any, **named: Any) -> Any:
        # Checkpointing of activations calls backward within a backward pass.
        depth = getattr(self._in_backward, "depth", 0)
        if depth == 0:
            losses = [t for t in (tensors if isinstance(tensors, (list, tuple)) else [tensors]) if t.numel() == 1]
            entry: dict[str, Any] = {"issued": self._issued}
            if losses and not hasattr(losses[0], "placements"):
                entry["loss"] = float(losses[0].detach())
                entry["hash"] = hashing.text(hashing.hash_flat(losses[0]))
            if not self._backwards:
                changed = self._changed_parameters()
                if changed:
                    entry["changed"] = changed
            self._backwards.append(entry)
        self._in_backward.depth = depth + 1
        try:
            return self._backward(tensors, *arguments, **named)
        finally:
            self._in_backward.depth = depth

    @torch.no_grad()
    def _changed_parameters(self) -> dict[str, str]:
        """The parameters that differ from what they were after the last step, with their hashes. Called in the first
        backward pass after it, which leaves parameters as the forward pass found them."""
        changed: dict[str, str] = {}
        for optimizer, known in self._optimizers.values():
            for name, parameter in self._parameters(optimizer, known):
                value = layout.entry_of(parameter, norms=False, keep_values=0)["hash"]
                if known.after_step.get(name, value) != value:
                    changed[name] = value
        return changed

    def _known(self, optimizer: Any) -> _OptimizerState:
        if id(optimizer) not in self._optimizers:  # the reference keeps the id from another use
            self._optimizers[id(optimizer)] = (optimizer, _OptimizerState(len(self._optimizers)))
        known = self._optimizers[id(optimizer)][1]
        if any(id(p) not in known.names for group in optimizer.param_groups for p in group["params"]):
            known.names = parameter_names(optimizer, self._model)
        return known

    def _parameters(self, optimizer: Any, known: _OptimizerState) -> Iterator[tuple[str, torch.Tensor]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield known.names[id(parameter)], parameter

    def _entries(
        self, known: _OptimizerState, kind: str, tensors: dict[str, torch.Tensor], norms: bool
    ) -> dict[str, Any]:
        """The entries of tensors. A layout is written where it differs from the one before."""
        entries: dict[str, Any] = {}
        for name, tensor in tensors.items():
            entry = layout.entry_of(tensor, norms, self._keep_values)
            key = f"{kind} {name}"
            if known.layouts.get(key) == entry["layout"]:
                del entry["layout"]
            else:
                known.layouts[key] = entry["layout"]
            entries[name] = entry
        return entries

    def _parameter_entries(self, optimizer: Any, known: _OptimizerState) -> dict[str, Any]:
        return self._entries(known, "parameters", dict(self._parameters(optimizer, known)), norms=False)

    def _state_entries(self, optimizer: Any, known: _OptimizerState) -> dict[str, Any]:
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters(optimizer, known):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                    tensors[f"{name}.{key}"] = value
        return self._entries(known, "state", tensors, norms=False)

    @torch.no_grad()
    def _before_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        if self._only is not None and optimizer is not self._only:
            return
        if id(optimizer) in self._stepping:  # its last step has failed
            del self._stepping[self._stepping.index(id(optimizer)) :]
        self._stepping.append(id(optimizer))
        if len(self._stepping) > 1:
            return
        if self._observer is not None:
            self._observer.raise_error()
        known = self._known(optimizer)
        if known.updates == 0:
            line: dict[str, Any] = {"step": self._steps, "optimizer": known.number, "update": 0}
            line["parameters"] = self._parameter_entries(optimizer, known)
            line["state"] = self._state_entries(optimizer, known)
            self._pending.append((line, []))
        known.updates += 1
        gradients = {n: p.grad for n, p in self._parameters(optimizer, known) if p.grad is not None}
        strided = {n: g for n, g in gradients.items() if g.layout == torch.strided}
        locals_ = {n: layout.part_of(g).local for n, g in strided.items()}
        for name, index in known.carriers.find(self._collectives, locals_).items():
            if index < len(self._collectives):
                self._collectives[index].entry.setdefault("carries", []).append(name)
        self._event = {
            "optimizer": known.number,
            "update": known.updates,
            "random": hashing.text(hashing.hash_flat(torch.random.get_rng_state())),
            "settings": [_settings(group) for group in optimizer.param_groups],
            "gradients": self._entries(known, "gradients", strided, norms=True),
        }
        if len(strided) < len(gradients):
            self._event["sparse"] = sorted(set(gradients) - set(strided))

    @torch.no_grad()
    def _after_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        if id(optimizer) not in self._stepping:
            return
        del self._stepping[self._stepping.index(id(optimizer)) :]
        if self._stepping:
            return
        known = self._known(optimizer)
        self._steps += 1
        line = {"step": self._steps, **self._event, "backwards": self._backwards}
        line["parameters"] = self._parameter_entries(optimizer, known)
        known.after_step = {name: entry["hash"] for name, entry in line["parameters"].items()}
        line["state"] = self._state_entries(optimizer, known)
        with self._lock:
            collectives, self._collectives = self._collectives, []
        for collective in collectives:
            if collective.done.is_set():
                collective.outputs = []
        self._backwards = []
        self._pending.append((line, collectives))
        self._flush()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers that an optimizer works with: learning rate, betas, and others."""
    result: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        plain = isinstance(value, (bool, int, float, str)) or value is None
        if plain or (isinstance(value, tuple) and all(isinstance(v, (int, float)) for v in value)):
            result[key] = list(value) if isinstance(value, tuple) else value
    return result


@contextlib.contextmanager
def record(directory: str, model: Any = None, optimizer: Any = None, keep_values: int = 0) -> Iterator[Recorder]:
    """Records the training inside the with statement into `directory`. Every rank calls it.

    Without `model` and `optimizer` all optimizers of the process are recorded. `keep_values` is the number of first
    elements of each tensor to keep, for the differences in a report.
    """
    recorder = Recorder(directory, model, optimizer, keep_values)
    try:
        yield recorder
    except BaseException:
        recorder.close(complete=False)
        raise
    recorder.close()
