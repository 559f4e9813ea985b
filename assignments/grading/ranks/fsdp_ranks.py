"""Trains the model of mlp.py under a student's fully_shard()."""

import gc
import tracemalloc

from facts import calls_of, fails, run_grading
from training import LEARNING_RATE, SEED, STEPS, Mlp, batch_of, reference


class Observer:
    """Looks at the model from inside its units, between the student's hooks."""

    def __init__(self, model, world):
        self.model, self.world, self.seen = model, world, []
        for index, unit in enumerate(model.units):
            unit.compute = self.watched(index, 0, unit.compute)
            unit.compute_backward = self.watched(index, 1, unit.compute_backward)

    def unsharded(self):
        return sum(1 << index for index, unit in enumerate(self.model.units) if unit.parameters)

    def watched(self, index, backward, compute):
        def watch(array):
            self.seen += [index, backward, self.unsharded(), len(self.world.calls)]
            return compute(array)

        return watch


def train_step(model, sharded, step, rank):
    loss = model.loss(*batch_of(step, rank))
    model.backward()
    sharded.step(LEARNING_RATE)
    return loss


def live_bytes():
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def run(grading, student, kind, ranks, _):
    def training(world, fact):
        losses, before, first, after = reference(world.size)
        model = Mlp()
        fact.update(units=",".join(unit.name for unit in model.units), elements=[len(unit) for unit in before],
                    slack=60_000, expected_losses=[step[world.rank] for step in losses])
        tracemalloc.start()
        rest = live_bytes()
        sharded = student.fully_shard(model, world)
        sharded.initialize(SEED)
        fact["calls_before"] = len(world.calls)

        def write_shards(when, expected):
            for unit, values in enumerate(expected):
                grading.write_floats(fact, f"{when}_expected{unit}", values)
                grading.write_floats(fact, f"{when}_shard{unit}", sharded.shard(unit))

        write_shards("initial", before)
        observer, earlier, peak = Observer(model, world), world.traffic(), 0
        world.calls.clear()
        fact["losses"] = []
        for step in range(STEPS):
            world.mark = step
            kept = live_bytes()
            tracemalloc.reset_peak()
            fact["losses"].append(train_step(model, sharded, step, world.rank))
            peak = max(peak, tracemalloc.get_traced_memory()[1] - kept)
            if step == 0:
                write_shards("first", first)
        traffic = {kind: [calls, sent - earlier.get(kind, [0, 0])[1]] for kind, (calls, sent) in world.traffic().items()}
        sums = any(call["kind"] == "reduce_scatter" and call["sums"] for call in world.calls)
        fact.update(calls=calls_of(world), traffic=traffic, seen=observer.seen, unsharded_at_end=observer.unsharded(),
                    sums=int(sums), peak_bytes=peak, at_rest_bytes=live_bytes() - rest)
        tracemalloc.stop()
        write_shards("final", after)

    def fault(world, fact):
        model = Mlp()
        sharded = student.fully_shard(model, world)
        sharded.initialize(SEED)
        if world.rank == 2:
            world.calls_left = 2
        fact["threw"] = int(fails(lambda: train_step(model, sharded, 0, world.rank)))

    if kind == "fault":
        grading.run("fault", 3, "3 ranks, of which rank 2 fails in its third operation", fault)
    else:
        grading.run(f"n{ranks}", ranks, f"{ranks} rank{'s' if ranks > 1 else ''}", training)


run_grading(run)
