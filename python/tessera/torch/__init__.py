"""torch.distributed's backend "tessera".

    torch.distributed.init_process_group("tessera")

PyTorch registers it by itself when the package is installed. `TESSERA_BACKEND` chooses the transport: shm, tcp, ucx, mpi,
or auto, which is the default here. With `TESSERA_TORCH_REPLACES_GLOO=1` programs that ask for "gloo" get it, too.
"""

import atexit
import datetime
import logging
import os
import weakref

import torch
import torch.distributed as dist

__all__ = ["clip_grad_norm_", "ddp_average_hook", "register"]

_replaces_gloo = os.environ.get("TESSERA_TORCH_REPLACES_GLOO", "0") not in ("", "0")


def _extension():
    """The compiled backend. Raises ImportError, with what to do, if it isn't one for this PyTorch."""
    from tessera._built_for import TORCH

    def minor(version):
        return version.split(".")[:2]

    try:
        if TORCH and minor(TORCH) == minor(torch.__version__):
            from tessera import _c10d

            return _c10d
        cause = None
    except ImportError as error:
        cause = error
    built = f"was built for PyTorch {TORCH}" if TORCH else "was built without PyTorch"
    raise ImportError(
        f"tessera {built}, and this is PyTorch {torch.__version__}; install the package again in this environment, "
        "with PyTorch there: pip install --force-reinstall --no-deps ./python" + (f" ({cause})" if cause else "")
    ) from cause


def _create(options, backend_options, name="tessera"):
    """What torch.distributed calls to make a process group, on each of its members."""
    _c10d = _extension()

    global _world
    timeout = options.timeout if backend_options is None else backend_options._timeout
    members = options.global_ranks_in_group
    group = getattr(options, "process_group", None)
    device = group.bound_device_id if group is not None else None  # init_process_group's device_id
    settings = _c10d.GroupSettings(options.store, options.group_rank, options.group_size, timeout, members, device)
    world = _world() if members else None
    if world is not None and not world.closed:
        backend = _c10d.Backend(world, settings, options.group_id, name)
    else:
        backend = _c10d.Backend(settings, name)
    if not members:
        _world = weakref.ref(backend)
    _backends[:] = [one for one in _backends if one() is not None]
    _backends.append(weakref.ref(backend))
    return backend


_backends = []
_world = lambda: None  # the default process group's, of which others are made
_process = os.getpid()
_PATIENCE = datetime.timedelta(seconds=10)  # for operations that are in flight when the process ends


@atexit.register
def _leave():
    """A program need not destroy its process groups. Afterwards no thread may need Python, which is about to end."""
    if os.getpid() != _process:
        return  # a forked child, which has no part in its parent's groups
    for reference in reversed(_backends):
        backend = reference()
        if backend is not None:
            backend.leave(_PATIENCE)


def _create_instead_of_gloo(options, backend_options):
    if options.group_rank == 0:
        logging.getLogger("tessera").warning("TESSERA_TORCH_REPLACES_GLOO: backend gloo is tessera")
    return _create(options, backend_options, "gloo")


def register():
    """Makes the backend known to torch.distributed, once. `import torch` calls it, and so does the import of this module."""
    if not dist.is_available() or "TESSERA" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("tessera", _create, extended_api=True, devices=["cpu", "cuda"])
    if _replaces_gloo:
        dist.Backend.register_backend("gloo", _create_instead_of_gloo, extended_api=True, devices=["cpu", "cuda"])


def __getattr__(name):
    # Imported on demand: `import torch` calls register(), when much of PyTorch is not there yet.
    if name in ("clip_grad_norm_", "ddp_average_hook"):
        from tessera.torch import averaging

        return getattr(averaging, name)
    raise AttributeError(f"module 'tessera.torch' has no attribute '{name}'")


register()
