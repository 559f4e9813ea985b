"""What you can use in assignment 3."""

import numpy as np

LEARNING_RATE, BETA1, BETA2, EPS, DECAY = 0.01, 0.9, 0.999, 1e-8, 0.01


def adamw(values, gradients, m, v, step):
    """One step of AdamW on some elements, in place: `m` and `v` are 0 before the first step. `step` counts from 1."""
    f = np.float32
    m *= f(BETA1)
    m += f(1 - BETA1) * gradients
    v *= f(BETA2)
    v += f(1 - BETA2) * gradients * gradients
    values *= f(1 - LEARNING_RATE * DECAY)
    root = np.sqrt(v / f(1 - BETA2**step)) + f(EPS)
    values -= f(LEARNING_RATE / (1 - BETA1**step)) * m / root


def squares(values):
    """The sum of the squares, in f64."""
    wide = values.astype(np.float64)
    return float(np.add.reduce(wide * wide))
