"""Assignment 4: FSDP by hooks. The handout is README.md beside this file, the model mlp.py."""

import numpy as np
from mlp import initial


class ShardedUnit:
    """A unit: its parameters are one flat parameter, of which this rank keeps a shard."""

    def __init__(self, unit, world):
        self.unit, self.world = unit, world
        # TODO lay out the flat parameter: the offset of each parameter, and per_rank, which includes the padding.
        self.per_rank = 0
        self.shard = np.zeros(self.per_rank, np.float32)
        self.gradient = np.zeros(self.per_rank, np.float32)
        # TODO set the hooks: unit.pre_forward, unit.post_forward, unit.pre_backward, unit.post_backward.

    def initialize(self, seed):
        """Writes this rank's shard, without communication: initial(unit.name, parameter, seed, begin, end)."""
        # TODO for each parameter of which this rank has a part.

    # TODO unshard(): gather the flat parameter, and put views of it into unit.parameters.
    # TODO reshard(): remove the views, and free the flat parameter.
    # TODO begin_backward(): unshard, and put views of a buffer into unit.gradients.
    # TODO end_backward(): reshard, and reduce-scatter the gradients' buffer.

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
