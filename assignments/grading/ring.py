"""Judges assignment 1: ring all-reduce."""

from __future__ import annotations

import array
import functools
import math

from grading.worlds import World

POINTS = 10
EVEN, UNEVEN, FEW, LARGE = 1200, 49_990, 3, 120_000


def f32(values) -> array.array:
    """Rounds each value once; a sum or quotient of two f32 in double precision rounds as in single precision."""
    return array.array("f", values)


@functools.cache
def inputs(count: int, rank: int) -> array.array:
    """The values of a rank, as the ranks make them."""
    thirds = f32((((i * 7919 + rank * 104729) % 8191) - 4095) / 3 for i in range(count))
    return f32(math.ldexp(value, (i + 3 * rank) % 5) for i, value in enumerate(thirds))


def slice_of(count: int, slices: int, index: int) -> tuple[int, int]:
    length, rest = divmod(count, slices)
    begin = index * length + min(index, rest)
    return begin, begin + length + (1 if index < rest else 0)


def partial(count: int, ranks: int, index: int, terms: int) -> array.array:
    """Slice `index` after `terms` ranks, from rank `index` on around the ring."""
    begin, end = slice_of(count, ranks, index)
    total = inputs(count, index)[begin:end]
    for k in range(1, terms):
        other = inputs(count, (index + k) % ranks)[begin:end]
        total = f32(a + b for a, b in zip(total, other))
    return total


@functools.cache
def expected(count: int, ranks: int) -> array.array:
    total = array.array("f")
    for index in range(ranks):
        total += partial(count, ranks, index, ranks)
    return total


def explain_slice(count: int, ranks: int, rank: int, index: int, got: array.array) -> str:
    """What a wrong slice holds, in the words of the handout."""
    begin, end = slice_of(count, ranks, index)
    where = f"slice {index} (elements {begin:,} to {end - 1:,}) on rank {rank}"
    want = expected(count, ranks)[begin:end]
    first = next(i for i in range(end - begin) if got[i:i + 1].tobytes() != want[i:i + 1].tobytes())
    if got == inputs(count, rank)[begin:end]:
        return f"{where} is still that rank's own input: nothing was received into it"
    for other in range(ranks):
        if got == inputs(count, other)[begin:end]:
            return f"{where} holds only the values of rank {other}: they were passed on without yours being added, or too early"
    for terms in range(2, ranks):
        if got == partial(count, ranks, index, terms):
            return (f"{where} holds the sum of only {terms} of {ranks} ranks: phase 1 needs n - 1 = {ranks - 1} steps, and phase 2 "
                    f"passes on the slice that is complete")
    scale = max(abs(value) for value in want)
    if all(abs(a - b) <= 1e-5 * scale for a, b in zip(got, want)):
        return (f"{where} is right up to rounding, but its additions are in another order: the sum begins with rank {index}'s "
                f"values, and each rank adds what arrives to its own")
    if all(abs(a - ranks * b) <= 1e-4 * scale * ranks for a, b in zip(got, want)) or \
            all(abs(a * ranks - b) <= 1e-4 * scale for a, b in zip(got, want)):
        return f"{where} is off by a factor of {ranks}: it should be the sum, not an average"
    return f"{where}: element {begin + first:,} is {got[first]:.9g}, the sum is {want[first]:.9g}"


def wrong_result(world: World, name: str, count: int, ranks: int) -> list[str]:
    problems = world.problems(name, ranks)
    if problems:
        return problems
    want = expected(count, ranks)
    for fact in world.case(name):
        got = world.floats(fact)
        if got.tobytes() == want.tobytes():
            continue
        for index in range(ranks):
            begin, end = slice_of(count, ranks, index)
            if got[begin:end].tobytes() != want[begin:end].tobytes():
                problems.append(f"{fact['says']}: {explain_slice(count, ranks, fact['rank'], index, got[begin:end])}")
                break
    return problems


def plan(count: int, ranks: int, rank: int) -> list[tuple[str, int, int, int]]:
    """(phase and step, slice, begin, end) of what a rank sends, in order; empty slices left out."""
    slices = [(f"step {k} of phase 1", (rank - k) % ranks) for k in range(ranks - 1)]
    slices += [(f"step {k} of phase 2", (rank + 1 - k) % ranks) for k in range(ranks - 1)]
    sends = [(step, index, *slice_of(count, ranks, index)) for step, index in slices]
    return [send for send in sends if send[3] > send[2]]


def wrong_message(fact: dict, count: int, ranks: int) -> str:
    """The first message that is not the ring's, or ""."""
    rank, after = fact["rank"], (fact["rank"] + 1) % ranks
    others = sorted({call[0] for call in fact["calls"]} - {"send", "recv"})
    if others:
        return f"rank {rank} calls {', '.join(others)}: only send, recv and batch are allowed"
    sent = [call for call in fact["calls"] if call[0] == "send" and call[3] > 0]
    for (_, peer, offset, length, *_), (step, index, begin, end) in zip(sent, plan(count, ranks, rank)):
        if peer != after:
            return f"{step}: rank {rank} sends to rank {peer}; in the ring it sends only to rank {after}"
        if offset >= 0 and offset != begin:
            return (f"{step}: rank {rank} sends slice {index}, which starts at {begin:,}, yours at {offset:,}"
                    + (f"; {offset:,} is where slice {starts(count, ranks)[offset]} starts" if offset in starts(count, ranks) else ""))
        if length != end - begin:
            return f"{step}: rank {rank} sends slice {index} of {end - begin:,} elements (it ends at {end:,}), yours has {length:,}"
    expected_sends = len(plan(count, ranks, rank))
    if len(sent) != expected_sends:
        return f"rank {rank} sends {len(sent)} messages instead of {expected_sends}: n - 1 = {ranks - 1} in each of the two phases"
    return ""


def starts(count: int, ranks: int) -> dict[int, int]:
    return {slice_of(count, ranks, index)[0]: index for index in range(ranks)}


def wrong_bytes(world: World, name: str, count: int, ranks: int) -> list[str]:
    problems = world.problems(name, ranks)
    for fact in world.case(name) if not problems else []:
        message = wrong_message(fact, count, ranks)
        want = 4 * sum(end - begin for _, _, begin, end in plan(count, ranks, fact["rank"]))
        got = sum(sent for _, sent in fact["traffic"].values())
        if not message and got != want:
            message = f"rank {fact['rank']} sent {got:,} bytes, the ring needs {want:,}: 2 (n-1)/n of {4 * count:,}"
        if message:
            problems.append(f"{fact['says']}: {message}")
    return problems


def large_problems(world: World) -> list[str]:
    problems = wrong_result(world, f"n3-{LARGE}", LARGE, 3)
    if any(fact.get("kind") == "Timeout" for fact in world.facts):
        return ["with slices of 65,000 bytes and more the ranks wait for each other: a send of this size is done only when its receiver takes it, "
                "and every rank waits for its send before it receives; start both, then wait for both, or use batch()"]
    return problems


def fault_problems(world: World) -> list[str]:
    facts = world.case("fault")
    silent = [fact["rank"] for fact in facts if fact.get("threw") == 0]
    if silent:
        return [f"rank 2 failed, and the call of rank {silent[0]} returned as if all were well: wait for every Work, and let what it "
                "throws pass"]
    return world.problems("fault", 3)


def grade(student, worlds, report) -> None:
    command = student.command("ring")
    sizes = [(1, EVEN), (2, EVEN), (3, EVEN), (4, EVEN), (5, EVEN), (2, UNEVEN), (3, UNEVEN), (4, UNEVEN), (5, UNEVEN), (5, FEW), (4, FEW)]
    arguments = [f"sum,{ranks},{count}" for ranks, count in sizes]
    shm = worlds.run(command, 5, "shm", ("fault,3,0", *arguments))
    tcp = worlds.run(command, 3, "tcp", (f"sum,3,{UNEVEN}", f"sum,3,{LARGE}"))

    def results(count: int) -> list[str]:
        return [problem for ranks, length in sizes if length == count and ranks > 1
                for problem in wrong_result(shm, f"n{ranks}-{count}", count, ranks)]

    one = wrong_result(shm, f"n1-{EVEN}", EVEN, 1)
    problems = results(EVEN)
    report.test("2 to 5 ranks, equal slices: every rank has the sum, bit for bit", 2, problems)
    skipped = ["not judged before the sums are right"] if problems else []
    report.test("2 to 5 ranks, 49,990 elements: slices differ by one", 2, results(UNEVEN))
    report.test("fewer elements than ranks", 1, results(FEW))
    report.test("the messages: neighbors only, the slices of the handout, 2 (n-1)/n of the bytes", 2, [
        problem for ranks, count in sizes if ranks > 1 for problem in wrong_bytes(shm, f"n{ranks}-{count}", count, ranks)])
    report.test("large slices over tcp: no rank waits for another that waits for it", 1, large_problems(tcp) or
                wrong_result(tcp, f"n3-{UNEVEN}", UNEVEN, 3))
    report.test("a rank that fails: the others get an error instead of a result", 1, fault_problems(shm))
    alone = [f"one rank: {fact['traffic']}: nothing is to be sent" for fact in shm.case(f"n1-{EVEN}")
             if fact["status"] == "ok" and sum(calls for calls, _ in fact["traffic"].values())]
    report.test("one rank: nothing is sent, nothing changes", 1, one + alone + skipped)
