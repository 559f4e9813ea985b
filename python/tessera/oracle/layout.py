"""What part of a whole tensor a rank holds: all of it, a shard along the first dimension, or another part."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tessera.oracle import hashing

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).replace("torch.", ""))


class Part(NamedTuple):
    """A rank's part of a tensor, and how parts of several ranks make the whole."""

    local: torch.Tensor
    offset: int  # in elements of the flat whole tensor
    layout: dict[str, Any]  # as it stands in a record


SAMPLES = 16  # elements of a tensor whose values are kept


def sample_of(tensor: torch.Tensor) -> list[float]:
    """The values of some elements, evenly spaced: enough to tell a factor from another computation."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel() or flat.is_complex():
        return []
    places = torch.linspace(0, flat.numel() - 1, min(SAMPLES, flat.numel())).to(torch.int64)
    return flat[places.to(flat.device)].to(torch.float64).tolist()


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def _local_of(tensor: Any) -> torch.Tensor:
    local = tensor._local_tensor
    return local.wait() if hasattr(local, "wait") and type(local).__name__ == "AsyncCollectiveTensor" else local


def part_of(tensor: torch.Tensor) -> Part:
    """The part that this rank holds. Only Shard(0) and Replicate() can be combined over ranks; other placements are
    compared rank by rank, with a run of the same placements."""
    layout: dict[str, Any] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
    if not _is_dtensor(tensor):
        return Part(tensor.detach(), 0, layout)
    local = _local_of(tensor).detach()
    placements, mesh = tensor.placements, tensor.device_mesh
    if all(p.is_replicate() for p in placements):
        return Part(local, 0, layout)
    # A _StridedShard is no Shard(0) of consecutive rows, so its type is compared, too.
    combines = all(p.is_replicate() or (p.is_shard(0) and type(p).__name__ == "Shard") for p in placements)
    if not combines or tensor.dim() == 0:
        layout["local"] = f"{[str(p) for p in placements]}"
        return Part(local, 0, layout)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    row = 1
    for extent in tensor.shape[1:]:
        row *= extent
    coordinate = mesh.get_coordinate() or [0] * len(placements)
    layout["replica"] = [c for c, p in zip(coordinate, placements) if p.is_replicate()]
    # The storage may hold padding; the local shape says how much belongs to the tensor.
    if list(local.shape) != list(shape):
        local = local[: shape[0]]
    return Part(local, offsets[0] * row if local.numel() else 0, layout)


def entry_of(tensor: torch.Tensor, norms: bool, keep_values: int) -> dict[str, Any]:
    """The entry of a tensor in a record: the hash of the part that this rank holds, and its layout."""
    part = part_of(tensor)
    shape = tuple(part.layout["shape"])
    per_word = hashing.elements_per_word(shape, part.local.element_size())
    if "local" in part.layout:
        value = hashing.hash_flat(part.local)
    else:
        value = hashing.hash_elements(part.local, part.offset, per_word)
    entry: dict[str, Any] = {"hash": hashing.text(value), "layout": part.layout}
    if norms:
        squares = hashing.square_sum(part.local)
        if squares is not None:
            entry["squares"] = squares
            entry["sample"] = sample_of(part.local)
    if keep_values > part.offset and part.local.numel() and not part.local.is_complex():
        kept = part.local.reshape(-1)[: keep_values - part.offset]
        entry["values"] = [part.offset, kept.to(torch.float64).tolist()]
    return entry
