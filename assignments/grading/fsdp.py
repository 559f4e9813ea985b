"""Judges assignment 4: FSDP by hooks."""

from __future__ import annotations

import array

from grading.worlds import World

POINTS = 15
STEPS = 3


def names(fact: dict) -> list[str]:
    """The names of the model's units."""
    return fact["units"].split(",")


def has_shards(fact: dict, when: str) -> bool:
    return "units" in fact and f"{when}_shard{len(names(fact)) - 1}" in fact


def per_rank(elements: int, ranks: int) -> int:
    """Elements of a shard: the flat parameter is padded to a multiple of the ranks."""
    return -(-int(elements) // ranks)


def place_in(values: array.array, shard: array.array) -> int | None:
    """Where the first values of a shard stand in the flat parameter; None: nowhere, or in several places."""
    head = shard[:16].tobytes()
    found = [i for i in range(len(values) - len(shard[:16]) + 1) if values[i:i + 16].tobytes() == head]
    return found[0] if len(found) == 1 else None


def wrong_shard(fact: dict, unit: int, want: array.array, got: array.array) -> str:
    """What is wrong with a rank's shard of a unit, or "". `want`: the whole unit."""
    ranks, rank, name = fact["ranks"], fact["rank"], names(fact)[unit]
    length = per_rank(len(want), ranks)
    begin = rank * length
    whole = want + array.array("f", [0.0] * (length * ranks - len(want)))
    if len(got) != length:
        return (f"rank {rank}'s shard of {name} has {len(got):,} elements, needs {length:,}: {len(want):,} are padded to "
                f"{length * ranks:,}, divided by {ranks} ranks")
    if got.tobytes() == whole[begin:begin + length].tobytes():
        return ""
    elsewhere = place_in(want, got)
    if elsewhere is not None and elsewhere != begin:
        return f"rank {rank}'s shard of {name} starts at {begin:,}, yours at {elsewhere:,} of the flat parameter"
    first = next(i for i in range(length) if got[i] != whole[begin + i] or str(got[i]) != str(whole[begin + i]))
    if begin + first >= len(want):
        return f"rank {rank}'s shard of {name}: the padding from element {len(want):,} on is {got[first]:.6g}, not 0"
    return f"rank {rank}'s shard of {name}: element {begin + first:,} of the flat parameter is {got[first]:.9g}, should be {whole[begin + first]:.9g}"


def case_problems(world: World, name: str, ranks: int) -> list[str]:
    """Why there is no result, with a hint for errors that are typical."""
    hint = ": forward and backward need the parameters, so unshard in pre_forward and again in pre_backward"
    return [problem + (hint if "is not readable" in problem else "") for problem in world.problems(name, ranks)]


def shards_problems(world: World, name: str, when: str) -> list[str]:
    problems = []
    for fact in world.case(name):
        for unit in range(len(names(fact))) if has_shards(fact, when) else ():
            text = wrong_shard(fact, unit, world.floats(fact, f"{when}_expected{unit}"), world.floats(fact, f"{when}_shard{unit}"))
            if text:
                problems.append(f"{fact['says']}, {'after initialize()' if when == 'initial' else f'after {STEPS} steps'}: {text}")
    return problems


def missing_shards(world: World, name: str, ranks: int) -> list[str]:
    """Why there are no initial shards; errors of the training, which came later, don't count."""
    return [] if sum(has_shards(fact, "initial") for fact in world.case(name)) == ranks else world.problems(name, ranks)


def wrong_after_first_step(world: World, fact: dict) -> str:
    """The first shard that is wrong after one step, in the order of the backward, or ""."""
    for unit in reversed(range(len(names(fact)))) if has_shards(fact, "first") else ():
        text = wrong_shard(fact, unit, world.floats(fact, f"first_expected{unit}"), world.floats(fact, f"first_shard{unit}"))
        if text:
            return text
    return ""


def losses_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = case_problems(world, name, ranks)
    for fact in world.case(name) if not problems else []:
        for step, (got, want) in enumerate(zip(fact["losses"], fact["expected_losses"])):
            if got == want:
                continue
            why = "no update has happened yet, so the gathered parameters are not those of the model" if step == 0 else (
                f"step {step - 1} was right, so its gradients or its update are not" +
                (f"; after step 0 {wrong}" if (wrong := wrong_after_first_step(world, fact)) else ""))
            if step > 0 and any(call[0] == "reduce_scatter" for call in fact["calls"]) and fact.get("sums") == 1:
                why += "; your reduce_scatter sums, and " + (
                    "dividing before the sum rounds once for each rank: let it average" if abs(got - want) < 1e-5 * abs(want) else
                    "a step needs the average over the ranks")
            problems.append(f"{fact['says']}: the loss of step {step} on rank {fact['rank']} is {got:.12g}, under ddp {want:.12g}: {why}")
            break
    return problems or shards_problems(world, name, "final")


def expected_calls(elements: list[float], ranks: int) -> list[tuple[str, int, int, int, str]]:
    """(kind, elements in, elements out, unit, when) of one step, in order."""
    sizes = [per_rank(count, ranks) for count in elements]
    units = range(len(sizes))
    calls = [("all_gather", sizes[u], sizes[u] * ranks, u, "before its forward") for u in units]
    for u in reversed(units):
        calls.append(("all_gather", sizes[u], sizes[u] * ranks, u, "again before its backward, since it was resharded"))
        calls.append(("reduce_scatter", sizes[u] * ranks, sizes[u], u, "after its backward"))
    return calls


def wrong_call(fact: dict) -> str:
    """The first call of the first step that is not FSDP's, or ""."""
    made = [call for call in fact["calls"] if call[6] == 0]
    rank = fact["rank"]
    for position, (kind, given, taken, unit, when) in enumerate(expected_calls(fact["elements"], fact["ranks"])):
        want = f"{kind} of {names(fact)[unit]} ({given:,} to {taken:,} elements) {when}"
        if position >= len(made):
            return f"rank {rank}: a step ends after {len(made)} calls; the next one should be {want}"
        got = made[position]
        if (got[0], got[3], got[5]) != (kind, given, taken):
            return f"rank {rank}: call {position} of a step is {got[0]} ({got[3]:,} to {got[5]:,} elements), should be {want}"
    extra = made[len(expected_calls(fact["elements"], fact["ranks"])):]
    return f"rank {rank}: after the {len(made) - len(extra)} calls of a step there is also {extra[0][0]}" if extra else ""


def calls_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = case_problems(world, name, ranks)
    for fact in world.case(name) if not problems else []:
        text = wrong_call(fact)
        if text:
            problems.append(f"{fact['says']}: {text}")
        elif fact["calls_before"]:
            problems.append(f"{fact['says']}: rank {fact['rank']} communicates before the first step: initial values depend only on "
                            "seed, name and index, so each rank can write its own")
    return problems


def bytes_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = case_problems(world, name, ranks)
    for fact in world.case(name) if not problems else []:
        part = 4 * (ranks - 1) * sum(per_rank(count, ranks) for count in fact["elements"])
        for kind, times in (("all_gather", 2), ("reduce_scatter", 1)):
            sent = fact["traffic"].get(kind, [0, 0])[1] / STEPS
            if sent != times * part:
                problems.append(f"{fact['says']}: rank {fact['rank']} sends {sent:,.0f} bytes a step by {kind}, FSDP {times * part:,}: "
                                f"{times} (n-1)/n of all padded parameters")
        others = sum(sent for kind, (_, sent) in fact["traffic"].items() if kind not in ("all_gather", "reduce_scatter"))
        if others:
            problems.append(f"{fact['says']}: rank {fact['rank']} sends {others:,} bytes by other operations")
    return problems


def units_in(fact: dict, bits: float) -> list[str]:
    return [name for unit, name in enumerate(names(fact)) if int(bits) >> unit & 1]


def one_at_a_time_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = case_problems(world, name, ranks)
    for fact in world.case(name) if not problems else []:
        where = f"{fact['says']}: rank {fact['rank']}"
        for unit, backward, bits, _ in zip(*[iter(fact["seen"])] * 4):
            others = [other for other in units_in(fact, bits) if other != names(fact)[int(unit)]]
            if others:
                problems.append(f"{where}: while {names(fact)[int(unit)]} computes its {'backward' if backward else 'forward'}, {others[0]} is "
                                "still unsharded: reshard it in post_forward and post_backward, which unbinds its parameters, too")
                break
        largest = 4 * ranks * max(per_rank(count, ranks) for count in fact["elements"])
        peaks = {"unsharded parameters": fact.get("peak_unsharded_parameter"), "unsharded gradients": fact.get("peak_unsharded_gradient")}
        if peaks["unsharded parameters"] == 0:
            problems.append(f"{where}: no memory is counted as unsharded_parameter; take the gathered buffer from Tensor::zeros(), "
                            "Tensor::empty() or world.allocate() with that category")
        for what, peak in peaks.items():
            if peak is not None and peak > largest:
                problems.append(f"{where}: the peak of {what} is {peak:,.0f} bytes, the largest unit has {largest:,}: free the buffer, "
                                "not only the views of it")
        if fact.get("peak_bytes", 0) > 2 * largest + fact["slack"]:
            problems.append(f"{where}: at the peak of a step {fact['peak_bytes']:,.0f} bytes come on top of what is kept; the largest unit "
                            f"and its gradients have {2 * largest:,}: free what is gathered, not only the views of it")
    return problems


def at_rest_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = case_problems(world, name, ranks)
    for fact in world.case(name) if not problems else []:
        kept = 2 * 4 * sum(per_rank(count, ranks) for count in fact["elements"])
        whole = units_in(fact, fact["unsharded_at_end"])
        where = f"{fact['says']}: between steps rank {fact['rank']}"
        if whole:
            problems.append(f"{where} still has {whole[0]} unsharded")
        elif fact["at_rest_bytes"] > kept + fact["slack"]:
            problems.append(f"{where} keeps {fact['at_rest_bytes']:,.0f} bytes; shards of parameters and gradients are {kept:,}")
    return problems


def fault_problems(world: World) -> list[str]:
    if sum("losses" in fact for fact in world.case("n3")) < 3:
        return world.problems("n3", 3) or ["no step has run on three ranks yet"]
    silent = [fact["rank"] for fact in world.case("fault") if fact.get("threw") == 0]
    if silent:
        return [f"rank 2 failed in its third operation, and the step of rank {silent[0]} went on: wait for every Work, and let what it "
                "throws pass"]
    return world.problems("fault", 3)


def grade(student, worlds, report) -> None:
    command = student.command("fsdp")
    shm = worlds.run(command, 4, "shm", (*(f"train,{n},0" for n in (1, 2, 3, 4)), "fault,3,0"), {"TESSERA_PRODUCTS": "own"})
    tcp = worlds.run(command, 5, "tcp", ("train,5,0",), {"TESSERA_PRODUCTS": "own"})

    def on(check, *ranks: int) -> list[str]:
        return [problem for n in ranks for problem in check(shm, f"n{n}", n)]

    report.test("shards: 2 to 4 ranks have the right initial values in the right places", 2, [
        problem for n in (2, 3, 4) for problem in shards_problems(shm, f"n{n}", "initial") or missing_shards(shm, f"n{n}", n)])
    report.test("training: on 2 to 4 ranks losses and parameters have ddp's bits", 4, on(losses_problems, 2, 3, 4))
    report.test("calls: every unit is gathered twice and its gradients reduced once, in order", 2, on(calls_problems, 2, 3, 4))
    report.test("bytes: 3 (n-1)/n of the padded parameters a step", 1, on(bytes_problems, 2, 3, 4))
    report.test("memory between steps: shards only", 1, on(at_rest_problems, 2, 4))
    report.test("memory in a step: one unit is unsharded at a time", 2, on(one_at_a_time_problems, 2, 4))
    report.test("5 ranks over tcp: the same", 1, losses_problems(tcp, "n5", 5))
    report.test("a rank that fails: the others get an error", 1, fault_problems(shm))
    report.test("one rank: it trains alone", 1, on(losses_problems, 1))
