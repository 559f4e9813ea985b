"""Assignment 1: the sum over all ranks, around a ring. The handout is README.md beside this file."""

import numpy as np


def slice_of(count, slices, index):
    """The slice of `index`: its elements are x[begin:end]."""
    # TODO: slices differ by at most one element, the longer ones first.
    return slice(0, 0)


def ring_all_reduce(world, x):
    """x, a contiguous array of f32, becomes the sum over all ranks of x. Only world.send, recv and batch are used."""
    n, rank = world.size, world.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    # TODO phase 1 (reduce-scatter): n - 1 steps. In step k send slice rank - k to `after`, receive slice rank - k - 1
    # from `before`, and add it to yours.
    # TODO phase 2 (all-gather): n - 1 steps. In step k send slice rank + 1 - k, and receive slice rank - k in place.
