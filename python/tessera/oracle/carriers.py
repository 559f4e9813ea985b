"""Which operation carried which gradient: by its memory, else by its content."""

from __future__ import annotations

from typing import Optional

import torch

from tessera.oracle.collectives import REDUCTIONS, Collective


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def _holds(output: torch.Tensor, gradient: torch.Tensor) -> bool:
    if output.untyped_storage().nbytes() == 0 or output.numel() == 0 or not output.is_contiguous():
        return False
    begin, end = _range_of(output)
    first, last = _range_of(gradient)
    return begin <= first and last <= end


def _contains(output: torch.Tensor, gradient: torch.Tensor, ranks: int) -> bool:
    """Whether the output has the elements of the gradient in a row, as they are or divided by the number of ranks."""
    if not output.is_floating_point() or output.numel() < gradient.numel() or output.untyped_storage().nbytes() == 0:
        return False
    flat, wanted = output.detach().reshape(-1), gradient.reshape(-1)
    # An element that is not zero is rare in other places. It is sought first.
    marker = int(wanted.abs().argmax())
    for candidates in (flat.to(wanted.dtype), (flat / ranks).to(wanted.dtype)):
        for position in (candidates == wanted[marker]).nonzero().reshape(-1).tolist()[:64]:
            begin = position - marker
            if begin >= 0 and torch.equal(candidates[begin : begin + wanted.numel()], wanted):
                return True
    return False


class Carriers:
    """Finds the last reduction of a step that carried each gradient.

    To compare contents takes long, so what was found is used again while the steps have the same operations.
    """

    def __init__(self) -> None:
        self._shape: Optional[tuple] = None
        self._known: dict[str, int] = {}

    @torch.no_grad()
    def find(self, collectives: list[Collective], gradients: dict[str, torch.Tensor]) -> dict[str, int]:
        """The index in `collectives` of the operation that carried a gradient, by name."""
        shape = tuple((c.entry["kind"], c.entry["count"], c.entry["dtype"]) for c in collectives)
        if shape == self._shape:
            return self._known
        candidates = [
            (index, collective, output)
            for index, collective in reversed(list(enumerate(collectives)))
            if collective.entry["kind"] in REDUCTIONS and collective.done.is_set()
            for output in collective.outputs
        ]
        found: dict[str, int] = {}
        for name, gradient in gradients.items():
            if gradient.numel() == 0 or not gradient.is_contiguous() or gradient.layout != torch.strided:
                continue
            match = next((index for index, _, output in candidates if _holds(output, gradient)), None)
            if match is None:
                match = next(
                    (i for i, c, output in candidates if _contains(output, gradient, len(c.entry["group"]))), None
                )
            if match is not None:
                found[name] = match
        self._shape, self._known = shape, found
        return found
