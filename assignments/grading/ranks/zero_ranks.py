"""Updates parameters by a student's zero_optimizer() and, for comparison, by AdamW in one process."""

import gc
import os
import sys
import tracemalloc

import numpy as np
from facts import calls_of, fails, run_grading
from training import average, tree_sum


sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "3-zero"))

from adamw import adamw, squares  # noqa: E402

STEPS = 3


def waves(count, key):
    """As in zero_harness.cpp."""
    index = np.arange(count, dtype=np.int64)
    return ((index * 7919 + key * 104729) % 8191 - 4095).astype(np.float32) / np.float32(3000)


def gradients_of(count, step, rank):
    return waves(count, 10 * step + rank + 1)


def reference(count, ranks, max_norm):
    values, m, v = waves(count, 0), np.zeros(count, np.float32), np.zeros(count, np.float32)
    begins = [r * count // ranks // 8 * 8 for r in range(ranks)] + [count]
    for step in range(STEPS):
        mean = average([gradients_of(count, step, rank) for rank in range(ranks)])
        if max_norm > 0:
            total = tree_sum([np.float64(squares(mean[begins[r] : begins[r + 1]])) for r in range(ranks)])
            mean *= np.float32(min(1.0, max_norm / (float(np.sqrt(total)) + 1e-6)))
        adamw(values, mean, m, v, step + 1)
    return values


def run(grading, student, kind, ranks, count):
    def steps(max_norm):
        def body(world, fact):
            expected, parameters = reference(count, world.size, max_norm), waves(count, 0)
            gradients = [gradients_of(count, step, world.rank) for step in range(STEPS)]
            fact["count"], kept = count, 0
            gc.collect()
            tracemalloc.start()
            optimizer = student.zero_optimizer(world, parameters, max_norm)
            for step in range(STEPS):
                world.mark = step
                optimizer.step(gradients[step])
                kept = max(kept, tracemalloc.get_traced_memory()[0])
            fact.update(kept_bytes=kept, peak_bytes=tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            fact.update(calls=calls_of(world, parameters), traffic=world.traffic())
            grading.write_floats(fact, "final", parameters)
            grading.write_floats(fact, "expected", expected)

        clips = max_norm > 0
        says = f"{ranks} rank{'s' if ranks > 1 else ''}, {count} parameters{', clipped' if clips else ''}"
        grading.run(f"n{ranks}-{count}{'-clip' if clips else ''}", ranks, says, body)

    def fault(world, fact):
        parameters = waves(1000, 0)
        optimizer = student.zero_optimizer(world, parameters, 0)
        if world.rank == 2:
            world.calls_left = 1
        fact["threw"] = int(fails(lambda: optimizer.step(gradients_of(1000, 0, world.rank))))

    if kind == "fault":
        grading.run("fault", 3, "3 ranks, of which rank 2 fails in its second operation", fault)
    else:
        steps(5.0 if kind == "clip" else 0.0)


run_grading(run)
