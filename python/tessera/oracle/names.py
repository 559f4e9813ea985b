"""The full names of an optimizer's parameters, found without a change of the script."""

from __future__ import annotations

import gc
from typing import Optional

import torch
from torch import nn

# Wrappers add these to the names of what they wrap. Without them a model has the same names under every wrapper.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _unwrapped(module: nn.Module) -> nn.Module:
    while isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        module = module.module
    return module


def _roots() -> list[nn.Module]:
    """The modules of the process that are no part of another one, in the order in which they were made."""
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and "_modules" in o.__dict__]
    children = {id(child) for module in modules for child in module._modules.values() if child is not None}
    roots: list[nn.Module] = []
    for module in modules:
        if id(module) not in children:
            root = _unwrapped(module)
            if all(root is not known for known in roots):
                roots.append(root)
    return roots


def parameter_names(optimizer: torch.optim.Optimizer, model: Optional[nn.Module] = None) -> dict[int, str]:
    """The name of each parameter of the optimizer, by id. A name that is not found is `group.index`."""
    wanted = {
        id(p): f"{g}.{i}" for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])
    }
    roots = [_unwrapped(model)] if model is not None else _roots()
    found: list[tuple[nn.Module, dict[int, str]]] = []
    for root in roots:
        names = {id(p): _plain(n) for n, p in root.named_parameters() if id(p) in wanted}
        if names:
            found.append((root, names))
    # A module that holds more of the parameters is the outer one, so its names are the full names.
    found.sort(key=lambda entry: -len(entry[1]))
    result: dict[int, str] = {}
    used: set[str] = set()
    for root, names in found:
        new = {key: name for key, name in names.items() if key not in result}
        if any(name in used for name in new.values()):
            prefix, count = type(root).__name__, 1
            while any(f"{prefix}{count}.{name}" in used for name in new.values()):
                count += 1
            new = {key: f"{prefix}{count}.{name}" for key, name in new.items()}
        result.update(new)
        used.update(new.values())
    for key, fallback in wanted.items():
        result.setdefault(key, fallback)
    return result
