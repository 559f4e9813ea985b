"""Runs a student's ring_all_reduce() on worlds of 1 to 5 ranks."""

import numpy as np
from facts import calls_of, fails, run_grading


def inputs(count, rank):
    """As in ring_harness.cpp."""
    i = np.arange(count, dtype=np.int64)
    whole = ((i * 7919 + rank * 104729) % 8191 - 4095).astype(np.float32)
    return np.ldexp(whole / np.float32(3), ((i + 3 * rank) % 5).astype(np.int32))


def run(grading, student, kind, ranks, count):
    def sums(world, fact):
        x = inputs(count, world.rank)
        fact["count"] = count
        student.ring_all_reduce(world, x)
        fact.update(calls=calls_of(world, x), traffic=world.traffic())
        grading.write_floats(fact, "output", x)

    def fault(world, fact):
        x = inputs(1000, world.rank)
        if world.rank == 2:
            world.abort("the grader made rank 2 fail")
            return
        fact["threw"] = int(fails(lambda: student.ring_all_reduce(world, x)))

    if kind == "fault":
        grading.run("fault", 3, "3 ranks, of which rank 2 fails", fault)
    else:
        grading.run(f"n{ranks}-{count}", ranks, f"{ranks} ranks, {count} elements", sums)


run_grading(run)
