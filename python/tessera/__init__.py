"""Communication between ranks over shared memory, TCP, UCX or MPI, and the tool `tessera`.

    import numpy as np
    import tessera

    world = tessera.init()          # under `tessera run -n 4 -- python program.py`, torchrun, mpirun or Slurm
    x = np.full(3, float(world.rank))
    world.all_reduce(x).wait()      # in place; arrays of NumPy, PyTorch, JAX, ...

`tessera.bench`, `tessera.compare` and `tessera.plan` run the tool and return what its JSON files hold. PyTorch programs
use the backend "tessera" of torch.distributed: see `tessera.torch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tessera._core import Communicator, Work, init
    from tessera.errors import (
        Aborted,
        BackendError,
        Error,
        InvalidUsage,
        Mismatch,
        PeerLost,
        SystemError,
        Timeout,
        Unsupported,
    )
    from tessera.tool import ToolError, bench, compare, plan

__all__ = [
    "Aborted",
    "BackendError",
    "Communicator",
    "Error",
    "InvalidUsage",
    "Mismatch",
    "PeerLost",
    "SystemError",
    "Timeout",
    "ToolError",
    "Unsupported",
    "Work",
    "bench",
    "compare",
    "init",
    "plan",
]

_MODULES = {"_core": ("Communicator", "Work", "init"), "tool": ("ToolError", "bench", "compare", "plan")}


def __getattr__(name: str) -> Any:
    # Imported on demand: `import torch` imports tessera.torch, and pays for no more than that.
    if name not in __all__:
        raise AttributeError(f"module 'tessera' has no attribute '{name}'")
    import importlib

    module = next((module for module, names in _MODULES.items() if name in names), "errors")
    return getattr(importlib.import_module(f"tessera.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
