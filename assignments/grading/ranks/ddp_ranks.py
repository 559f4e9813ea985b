"""Trains the model of mlp.py under a student's data_parallel()."""

import math
import time

import numpy as np
from facts import calls_of, fails, run_grading
from training import LEARNING_RATE, STEPS, Mlp, batch_of, flat, leave_out, reference, with_memory

WIDTHS = (23, 60, 60, 90, 17)  # layer1 can be left out
UNIT_TIME, SLOW_LINK = 0.05, 0.4e6


def skipped_unit(step, rank):
    return 1 if step == 1 or (step == 2 and rank == 1) else None


def mark_units(model, world, computes=0.0):
    """Marks calls with the unit whose backward computes."""
    for index, unit in enumerate(model.units):

        def watch(gradient, index=index, compute=unit.compute_backward):
            world.mark = index
            time.sleep(computes)
            return compute(gradient)

        unit.compute_backward = watch


def train_step(model, world, ddp, step):
    loss = model.loss(*batch_of(step, world.rank))
    model.backward()
    world.mark = -1  # outside of the backward
    ddp.finish()
    for index, unit in enumerate(model.units):
        for name, array in unit.parameters.items():
            array -= np.float32(LEARNING_RATE) * ddp.gradient(index, name).reshape(array.shape)
    return loss


def run(grading, student, kind, ranks, size):
    def new_model():
        return with_memory(Mlp(WIDTHS), gradients=False)

    def training(unused):
        def body(world, fact):
            losses, _, _, after = reference(world.size, WIDTHS, skipped_unit if unused else None)
            model = new_model()
            rows = [(f"{unit.name}.{name}", index, math.prod(shape)) for index, unit in enumerate(model.units)
                    for name, shape in unit.shapes.items()]
            fact.update(parameters=",".join(row[0] for row in rows), units_of=",".join(str(row[1]) for row in rows),
                        counts=[row[2] for row in rows], expected_losses=[step[world.rank] for step in losses], bucket_bytes=size)
            ddp = student.data_parallel(model, world, size)
            mark_units(model, world)
            fact["losses"] = []
            for step in range(STEPS):
                leave_out(model, skipped_unit(step, world.rank) if unused else None)
                fact["losses"].append(train_step(model, world, ddp, step))
                if step == 0:
                    sums = any(call["kind"] == "all_reduce" and call["sums"] for call in world.calls)
                    fact.update(calls=calls_of(world), sums=int(sums))
            fact["traffic"] = world.traffic()
            grading.write_floats(fact, "final", np.concatenate([flat(unit.parameters) for unit in model.units]))
            grading.write_floats(fact, "expected", np.concatenate(after))

        says = f"{ranks} rank{'s' if ranks > 1 else ''}, buckets of {size} bytes"
        says += ", layer1 unused in step 1, and on rank 1 in step 2" if unused else ""
        grading.run(f"n{ranks}-{size}{'-unused' if unused else ''}", ranks, says, body)

    def slow():
        def body(world, fact):
            model = new_model()
            ddp = student.data_parallel(model, world, size)
            mark_units(model, world, UNIT_TIME)
            count = sum(math.prod(shape) for unit in model.units for shape in unit.shapes.values())
            world.link = (0.0, SLOW_LINK)
            took = []
            for step in range(STEPS):
                begin = time.monotonic()
                train_step(model, world, ddp, step)
                took.append(1e3 * (time.monotonic() - begin))
            fact.update(took_ms=min(took), link_ms=4e3 * count / SLOW_LINK,
                        compute_ms=1e3 * UNIT_TIME * len(model.units))

        grading.run("slow", 2, "2 ranks over a link of 0.4 MB/s", body)

    def fault():
        def body(world, fact):
            model = new_model()
            ddp = student.data_parallel(model, world, size)
            if world.rank == 2:
                world.calls_left = 0
            fact["threw"] = int(fails(lambda: train_step(model, world, ddp, 0)))

        grading.run("fault", 3, "3 ranks, of which rank 2 fails in its first operation", body)

    if kind in ("train", "unused"):
        training(kind == "unused")
    else:
        {"slow": slow, "fault": fault}[kind]()


run_grading(run)
