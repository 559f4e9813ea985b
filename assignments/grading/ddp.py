"""Judges assignment 2: replicated data parallelism with buckets and overlap."""

from __future__ import annotations

import dataclasses

from grading.worlds import World

POINTS = 15
STEPS = 3
ONE_EACH, USUAL, ALL = 1, 24_000, 1 << 30  # sizes of buckets, in bytes


@dataclasses.dataclass
class Bucket:
    names: list[str]
    elements: int
    last_unit: int  # after whose backward it is complete


def buckets_of(fact: dict) -> list[Bucket]:
    """The buckets of the handout, in order."""
    limit = fact["bucket_bytes"]
    found: list[Bucket] = []
    rows = list(zip(fact["parameters"].split(","), map(int, fact["counts"]), map(int, fact["units_of"].split(","))))
    for name, count, unit in reversed(rows):
        if not found or 4 * (found[-1].elements + count) > limit:
            found.append(Bucket([], 0, unit))
        found[-1].names.append(name)
        found[-1].elements += count
        found[-1].last_unit = unit  # units end in this order
    for earlier, later in zip(found, found[1:]):  # issued in order: never before an earlier one
        later.last_unit = min(earlier.last_unit, later.last_unit)
    return found


def units(fact: dict) -> list[str]:
    names: dict[int, str] = {}
    for name, unit in zip(fact["parameters"].split(","), fact["units_of"].split(",")):
        names.setdefault(int(unit), name.split(".")[0])
    return [names[i] for i in sorted(names)]


def training_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = world.problems(name, ranks)
    for fact in world.case(name) if not problems else []:
        where = f"{fact['says']}: "
        for step, (got, want) in enumerate(zip(fact["losses"], fact["expected_losses"])):
            if got != want:
                why = "before any update: the parameters were changed" if step == 0 else (
                    f"step {step - 1} was right, so the gradients of step {step - 1} are not their mean")
                if fact["sums"]:
                    why += "; your all_reduce sums, and " + (
                        "dividing before the sum rounds once for each rank: let it average" if abs(got - want) < 1e-5 * abs(want) else
                        "a step needs the average over the ranks")
                problems.append(f"{where}the loss of step {step} on rank {fact['rank']} is {got:.12g}, should be {want:.12g}: {why}")
                break
        else:
            problems += wrong_parameter(world, fact, where)
    return problems


def wrong_parameter(world: World, fact: dict, where: str) -> list[str]:
    """The first parameter that differs at the end."""
    got, want, offset = world.floats(fact, "final"), world.floats(fact, "expected"), 0
    for name, count in zip(fact["parameters"].split(","), map(int, fact["counts"])):
        if got[offset:offset + count].tobytes() != want[offset:offset + count].tobytes():
            return [f"{where}after {STEPS} steps {name} differs on rank {fact['rank']}: its last gradient is not the mean"]
        offset += count
    return []


def unused_problems(world: World, name: str, ranks: int) -> list[str]:
    hint = (": a unit that is not used calls no hook of backward. Reduce its buckets in finish(), in the order of the others, with zeros "
            "in its place, not what the step before left")
    return [problem + hint for problem in training_problems(world, name, ranks)]


def wrong_bucket(fact: dict) -> str:
    """The first all_reduce of a step that is not a bucket of the handout, or ""."""
    others = sorted({call[0] for call in fact["calls"]} - {"all_reduce"})
    if others:
        return f"rank {fact['rank']} calls {', '.join(others)}; each bucket is one all_reduce"
    want, made = buckets_of(fact), [call[3] for call in fact["calls"]]
    for index, (bucket, elements) in enumerate(zip(want, made)):
        if elements != bucket.elements:
            first, last = bucket.names[0], bucket.names[-1]
            holds = first if first == last else f"{first} to {last}"
            return (f"rank {fact['rank']}: bucket {index} holds {holds}, {bucket.elements:,} elements of {int(fact['bucket_bytes']) // 4:,} "
                    f"that fit; yours has {elements:,}")
    if len(made) != len(want):
        return f"rank {fact['rank']}: {len(made)} all_reduces in a step instead of {len(want)}"
    return ""


def bucket_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = world.problems(name, ranks)
    for fact in world.case(name) if not problems else []:
        text = wrong_bucket(fact)
        n, rank = ranks, fact["rank"]
        want = 0
        for bucket in buckets_of(fact):
            own = bucket.elements // n + (1 if rank < bucket.elements % n else 0)
            want += 4 * STEPS * (bucket.elements - own + (n - 1) * own)
        got = sum(sent for _, sent in fact["traffic"].values())
        if not text and got != want:
            text = f"rank {rank} sends {got:,} bytes in {STEPS} steps, should be {want:,}: 2 (n-1)/n of the gradients"
        if text:
            problems.append(f"{fact['says']}: {text}")
    return problems


def order_problems(world: World, name: str, ranks: int) -> list[str]:
    problems = world.problems(name, ranks)
    for fact in world.case(name) if not problems else []:
        names = units(fact)
        for index, (bucket, call) in enumerate(zip(buckets_of(fact), fact["calls"])):
            mark = call[6]
            if mark == bucket.last_unit:
                continue
            due = f"bucket {index} is complete after the backward of {names[bucket.last_unit]}"
            late = "is reduced only in finish()" if mark < 0 else f"is reduced during the backward of {names[mark]}"
            early = " before all of its gradients are written" if mark > bucket.last_unit else ""
            problems.append(f"{fact['says']}: rank {fact['rank']}: {due}; it {late}{early}")
            break
    return problems


def overlap_problems(world: World) -> list[str]:
    problems = world.problems("slow", 2)
    for fact in world.case("slow") if not problems else []:
        serial = fact["took_ms"] >= fact["compute_ms"] + 0.75 * fact["link_ms"]
        if serial:
            problems.append(f"{fact['says']}: a step takes {fact['took_ms']:.0f} ms; backward alone takes {fact['compute_ms']:.0f} and the "
                            f"link {fact['link_ms']:.0f}: they don't overlap. Start each bucket in the hook, and wait only in finish()")
    return problems


def fault_problems(world: World) -> list[str]:
    silent = [fact["rank"] for fact in world.case("fault") if fact.get("threw") == 0]
    if silent:
        return [f"rank 2 failed in its first operation, and the step of rank {silent[0]} went on: wait in finish() for every Work, and "
                "let what it throws pass"]
    return world.problems("fault", 3)


def grade(student, worlds, report) -> None:
    command = student.command("ddp")
    cases = [(2, USUAL), (3, USUAL), (4, USUAL), (3, ONE_EACH), (2, ALL)]
    products = {"TESSERA_PRODUCTS": "own"}
    shm = worlds.run(command, 4, "shm", (f"fault,3,{ALL}", *(f"train,{n},{size}" for n, size in cases), f"train,1,{USUAL}",
                                         f"unused,3,{USUAL}"), products)
    tcp = worlds.run(command, 5, "tcp", (f"train,5,{USUAL}",), products)
    slow = worlds.run(command, 2, "shm", (f"slow,2,{USUAL}",), products)
    times = slow.case("slow")
    note = "" if not times or "took_ms" not in times[0] else (
        f"a step took {times[0]['took_ms']:.0f} ms: {times[0]['compute_ms']:.0f} ms of backward, {times[0]['link_ms']:.0f} ms on the link")

    def on(check, chosen) -> list[str]:
        return [problem for n, size in chosen for problem in check(shm, f"n{n}-{size}", n)]

    training, buckets = on(training_problems, cases), on(bucket_problems, cases)
    unless = ["not judged before the buckets are right"] if any("all_reduces in a step" in problem for problem in buckets) else []
    wrong = ["not judged before the training is right"] if training else []
    report.test("training: on 2 to 4 ranks losses and parameters have the bits of the library's ddp", 4, training)
    report.test("buckets: their number, sizes and bytes", 3, buckets)
    report.test("overlap: each bucket is reduced as soon as it is complete", 2, unless or on(order_problems, cases))
    report.test("overlap: a slow link is hidden behind backward", 1, unless or overlap_problems(slow), note)
    report.test("unused units: zeros take part", 2, wrong or unused_problems(shm, f"n3-{USUAL}-unused", 3))
    report.test("5 ranks over tcp: the same", 1, training_problems(tcp, f"n5-{USUAL}", 5))
    report.test("a rank that fails: the others get an error", 1, fault_problems(shm))
    report.test("one rank: it trains alone", 1, wrong or training_problems(shm, f"n1-{USUAL}", 1))
