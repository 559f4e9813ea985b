"""A solution of assignment 3."""

import numpy as np
from adamw import adamw, squares


class ZeroOptimizer:
    def __init__(self, world, parameters, max_norm):
        self.world, self.parameters, self.max_norm, self.steps = world, parameters, max_norm, 0
        n, count = world.size, len(parameters)
        begins = [r * count // n // 8 * 8 for r in range(n)] + [count]
        self.counts = [begins[r + 1] - begins[r] for r in range(n)]
        self.mine = parameters[begins[world.rank] : begins[world.rank + 1]]
        self.gradient, self.m, self.v = (np.zeros(len(self.mine), np.float32) for _ in range(3))

    def step(self, gradients):
        self.steps += 1
        self.world.reduce_scatter(self.gradient, gradients, op="avg", counts=self.counts).wait()
        if self.max_norm > 0:
            self.clip()
        adamw(self.mine, self.gradient, self.m, self.v, self.steps)
        self.world.all_gather(self.parameters, self.mine, counts=self.counts).wait()

    def clip(self):
        total = np.array([squares(self.gradient)])
        self.world.all_reduce(total).wait()
        self.gradient *= np.float32(min(1.0, self.max_norm / (float(np.sqrt(total[0])) + 1e-6)))


def zero_optimizer(world, parameters, max_norm):
    return ZeroOptimizer(world, parameters, max_norm)
