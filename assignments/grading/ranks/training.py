"""The model of assignment 4 trained in one process for all ranks: what a data-parallel training must compute, bit for bit."""

import math
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "4-fsdp"))

from mlp import Mlp, initial  # noqa: E402

SEED, STEPS, LEARNING_RATE, ROWS = 7, 3, 0.5, 4


def batch_of(step, rank):
    """The rows of a rank in a step, and their targets."""

    def values(columns, key):
        index = np.arange(ROWS * columns, dtype=np.int64) + 977 * step + 7919 * rank + key
        return ((index * 48_271 % 65_537 % 2_003).astype(np.float32) / np.float32(1_000) - np.float32(1)).reshape(ROWS, columns)

    return values(Mlp.WIDTHS[0], 1), values(Mlp.WIDTHS[-1], 2)


def with_memory(model, gradients=True):
    """All parameters with their initial values, and memory for gradients."""
    for unit in model.units:
        for name, shape in unit.shapes.items():
            unit.parameters[name] = initial(unit.name, name, SEED, 0, math.prod(shape)).reshape(shape)
            if gradients:
                unit.gradients[name] = np.zeros(shape, np.float32)
    return model


def tree_sum(terms):
    """The library's order: sum(a..b) = sum(a..m) + sum(m..b), m in the middle."""
    if len(terms) == 1:
        return terms[0]
    middle = len(terms) // 2
    return tree_sum(terms[:middle]) + tree_sum(terms[middle:])


def flat(arrays):
    return np.concatenate([array.ravel() for array in arrays.values()])


def gradients_of(model, step, rank):
    """The loss, and each unit's gradients: flat, of one rank."""
    loss = model.loss(*batch_of(step, rank))
    for unit in model.units:
        for array in unit.gradients.values():
            array[...] = 0
    model.backward()
    return loss, [flat(unit.gradients) for unit in model.units]


def average(parts):
    return tree_sum(parts) / np.float32(len(parts))


def leave_out(model, skipped):
    for index, unit in enumerate(model.units):
        unit.uses = index != skipped


def reference(ranks, widths=Mlp.WIDTHS, skipped=None):
    """(losses of each step and rank, the units' flat parameters before, after the first step, and after all).

    skipped(step, rank): the unit that a rank leaves out, or None.
    """
    model = with_memory(Mlp(widths))
    initial_values = [flat(unit.parameters) for unit in model.units]
    losses, first = [], []
    for step in range(STEPS):
        every = []
        for rank in range(ranks):
            leave_out(model, skipped(step, rank) if skipped else None)
            every.append(gradients_of(model, step, rank))
        losses.append([loss for loss, _ in every])
        for index, unit in enumerate(model.units):
            gradient = average([gradients[index] for _, gradients in every])
            offset = 0
            for array in unit.parameters.values():
                array -= np.float32(LEARNING_RATE) * gradient[offset : offset + array.size].reshape(array.shape)
                offset += array.size
        first = first or [flat(unit.parameters) for unit in model.units]
    return losses, initial_values, first, [flat(unit.parameters) for unit in model.units]
