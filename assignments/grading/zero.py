"""Judges assignment 3: a sharded optimizer."""

from __future__ import annotations

from grading.worlds import World

POINTS = 13
STEPS = 3
USUAL, FEW = 49_990, 21
SLACK = 24_000  # bytes of objects


def begin(count: int, ranks: int, rank: int) -> int:
    return count if rank == ranks else rank * count // ranks // 8 * 8


def length(fact: dict, rank: int) -> int:
    count, ranks = int(fact["count"]), fact["ranks"]
    return begin(count, ranks, rank + 1) - begin(count, ranks, rank)


def result_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = world.problems(name, ranks)
    for fact in world.case(name) if not problems else []:
        got, want = world.floats(fact, "final"), world.floats(fact, "expected")
        wrong = [i for i in range(len(want)) if got[i] != want[i]]
        if not wrong:
            continue
        owners = sorted({owner(fact, i) for i in wrong})
        text = (f"{fact['says']}: after {STEPS} steps {len(wrong):,} of {len(want):,} parameters are wrong on rank {fact['rank']}, all in the "
                f"slices of ranks {', '.join(map(str, owners))}; the first is {wrong[0]:,}: {got[wrong[0]]:.9g} instead of {want[wrong[0]]:.9g}")
        if fact["rank"] not in owners and length(fact, fact["rank"]) > 0:
            text += "; your own slice is right, those of others did not arrive"
        elif all(abs(got[i] - want[i]) <= 1e-6 * max(1e-3, abs(want[i])) for i in wrong[:100]):
            text += "; up to rounding it is right: average by one reduction, which adds in a fixed order and divides once"
        problems.append(text)
    return problems


def owner(fact: dict, index: int) -> int:
    return next(rank for rank in range(fact["ranks"]) if index < begin(int(fact["count"]), fact["ranks"], rank + 1))


def wrong_call(fact: dict) -> str:
    """What differs from a reduce_scatter and an all_gather of the handout's slices in the first step, or ""."""
    rank, count = fact["rank"], int(fact["count"])
    start, own = begin(count, fact["ranks"], rank), length(fact, rank)
    calls = [call for call in fact["calls"] if call[6] == 0]
    kinds = [call[0] for call in calls]
    if kinds != ["reduce_scatter", "all_gather"]:
        return f"rank {rank} calls {', '.join(kinds) or 'nothing'} in a step; it needs one reduce_scatter and one all_gather"
    scatter, gather = calls
    if gather[2] >= 0 and gather[2] != start and own > 0:
        return f"rank {rank}'s slice starts at {start:,}, yours at {gather[2]:,}"
    if scatter[3] != count:
        return f"rank {rank} reduces {scatter[3]:,} gradients, there are {count:,}"
    for kind, got in (("reduce_scatter", scatter[5]), ("all_gather", gather[3])):
        if got != own:
            return (f"rank {rank}'s slice has {own:,} elements, from {start:,} to {start + own:,}; the one in your {kind} has {got:,}")
    return ""


def slice_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = world.problems(name, ranks)
    return problems + [f"{fact['says']}: {wrong_call(fact)}" for fact in world.case(name) if not problems and wrong_call(fact)]


def bytes_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = world.problems(name, ranks)
    for fact in world.case(name) if not problems else []:
        own, count = length(fact, fact["rank"]), int(fact["count"])
        want = {"reduce_scatter": 4 * (count - own), "all_gather": 4 * own * (ranks - 1)}
        for kind in sorted({*want, *fact["traffic"]}):
            sent = fact["traffic"].get(kind, [0, 0])[1] / STEPS
            if sent != want.get(kind, 0):
                problems.append(f"{fact['says']}: rank {fact['rank']} sends {sent:,.0f} bytes a step by {kind}, ZeRO-1 {want.get(kind, 0):,}")
    return problems


def memory_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = world.problems(name, ranks)
    for fact in world.case(name) if not problems else []:
        own = 4 * length(fact, fact["rank"])
        where = f"{fact['says']}: rank {fact['rank']}"
        if fact["kept_bytes"] > 3 * own + SLACK:
            problems.append(f"{where} keeps {fact['kept_bytes']:,.0f} bytes between steps; two moments and the gradients of its slice are "
                            f"{3 * own:,}, a whole moment is {4 * int(fact['count']):,}")
    if not problems and not all(fact["traffic"] for fact in world.case(name)):
        problems.append("not judged: no step communicates")
    return problems


def clip_problems(world: World, name: str, ranks: int) -> list[str]:
    hint = (": the norm is that of the averaged gradients of all ranks, so the squares of the slices are added over the ranks, "
            "in f64, before the root")
    return [problem + hint for problem in result_problems(world, name, ranks)]


def fault_problems(world: World) -> list[str]:
    silent = [fact["rank"] for fact in world.case("fault") if fact.get("threw") == 0]
    if silent:
        return [f"rank 2 failed in its second operation, and step() of rank {silent[0]} returned: wait for every Work, and let what it "
                "throws pass"]
    return world.problems("fault", 3)


def grade(student, worlds, report) -> None:
    command = student.command("zero")
    shm = worlds.run(command, 4, "shm", (f"fault,3,{USUAL}", *(f"step,{n},{USUAL}" for n in (1, 2, 3, 4)), f"step,4,{FEW}",
                                         f"clip,4,{USUAL}", f"clip,3,{USUAL}"))
    tcp = worlds.run(command, 5, "tcp", (f"step,5,{USUAL}",))

    def on(check, *ranks: int) -> list[str]:
        return [problem for n in ranks for problem in check(shm, f"n{n}-{USUAL}", n)]

    results = on(result_problems, 2, 3, 4)
    wrong = ["not judged before the parameters are right"] if results else []
    report.test("parameters: on 2 to 4 ranks each bit is that of AdamW on one rank", 3, results)
    report.test("slices: where they start, one reduce_scatter and one all_gather a step", 2, on(slice_problems, 2, 3, 4))
    report.test("bytes: 2 (n-1)/n of the parameters", 1, on(bytes_problems, 2, 3, 4))
    report.test("memory: the state of one slice", 2, on(memory_problems, 2, 4))
    report.test("clipping by the norm over all ranks", 2, wrong or [
        problem for n in (3, 4) for problem in clip_problems(shm, f"n{n}-{USUAL}-clip", n)])
    report.test("21 parameters on 4 ranks: short slices, and an odd end", 1, result_problems(shm, f"n4-{FEW}", 4))
    report.test("5 ranks over tcp, and one rank alone", 1, result_problems(tcp, f"n5-{USUAL}", 5) or on(result_problems, 1))
    report.test("a rank that fails: the others get an error", 1, fault_problems(shm))
