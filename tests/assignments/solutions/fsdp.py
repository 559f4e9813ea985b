"""A solution of assignment 4."""

import math

import numpy as np
from mlp import initial


class ShardedUnit:
    """A unit: its parameters are one flat parameter, of which this rank keeps a shard."""

    def __init__(self, unit, world):
        self.unit, self.world = unit, world
        self.offsets, elements = {}, 0
        for name, shape in unit.shapes.items():
            self.offsets[name] = elements
            elements += math.prod(shape)
        self.per_rank = -(-elements // world.size)
        self.shard = np.zeros(self.per_rank, np.float32)
        self.gradient = np.zeros(self.per_rank, np.float32)
        unit.pre_forward, unit.post_forward = self.unshard, self.reshard
        unit.pre_backward, unit.post_backward = self.begin_backward, self.end_backward

    def initialize(self, seed):
        begin = self.per_rank * self.world.rank
        for name, shape in self.unit.shapes.items():
            offset, count = self.offsets[name], math.prod(shape)
            first, last = max(begin, offset), min(begin + self.per_rank, offset + count)
            if first < last:
                self.shard[first - begin : last - begin] = initial(self.unit.name, name, seed, first - offset, last - offset)

    def views(self, flat):
        return {name: flat[self.offsets[name] : self.offsets[name] + math.prod(shape)].reshape(shape)
                for name, shape in self.unit.shapes.items()}

    def unshard(self):
        flat = np.empty(self.per_rank * self.world.size, np.float32)
        self.world.all_gather(flat, self.shard).wait()
        self.unit.parameters.update(self.views(flat))

    def reshard(self):
        self.unit.parameters.clear()

    def begin_backward(self):
        self.unshard()
        self.flat_gradient = np.zeros(self.per_rank * self.world.size, np.float32)
        self.unit.gradients.update(self.views(self.flat_gradient))

    def end_backward(self):
        self.reshard()
        self.world.reduce_scatter(self.gradient, self.flat_gradient, op="avg").wait()
        self.unit.gradients.clear()
        self.flat_gradient = None

    def step(self, learning_rate):
        self.shard -= np.float32(learning_rate) * self.gradient


class Fsdp:
    def __init__(self, model, world):
        self.units = [ShardedUnit(unit, world) for unit in model.units]

    def initialize(self, seed):
        for unit in self.units:
            unit.initialize(seed)

    def step(self, learning_rate):
        """After a backward: updates this rank's shards by SGD."""
        for unit in self.units:
            unit.step(learning_rate)

    def shard(self, index):
        """This rank's shard of a unit's flat parameter, with padding."""
        return self.units[index].shard


def fully_shard(model, world):
    """Makes each of model.units a unit of FSDP."""
    return Fsdp(model, world)
