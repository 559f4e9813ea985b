"""Compares two records: finds the first step whose tensors differ, and the operations that explain it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Optional

from tessera.oracle.files import KINDS, RecordError, Run, Step, read_run

_MASK = (1 << 64) - 1
SINGULAR = {"gradients": "gradient", "parameters": "parameter", "state": "optimizer state"}


@dataclass
class Whole:
    """The values of one tensor at one step: the hash of the whole tensor, for each replica."""

    hashes: list[str]  # for each rank if `by_rank`, else for each replica
    by_rank: bool
    local: Optional[str]  # the placements, if the parts cannot be combined
    dtype: str
    shape: list[int]
    norm: Optional[float]
    values: dict[int, float] = field(default_factory=dict)


def whole_of(entries: list[dict[str, Any]]) -> Whole:
    """Combines the entries of all ranks."""
    first = entries[0]["layout"]
    squares = [e.get("squares") for e in entries]
    known = [s for s in squares if s is not None]
    values: dict[int, float] = {}
    for entry in reversed(entries):
        offset, kept = entry.get("values", (0, []))
        values.update((offset + i, value) for i, value in enumerate(kept))
    if "replica" not in first:
        norm = math.sqrt(known[0]) if known else None
        return Whole(
            [e["hash"] for e in entries], True, first.get("local"), first["dtype"], first["shape"], norm, values
        )
    totals: dict[tuple[int, ...], int] = {}
    for entry in entries:
        replica = tuple(entry["layout"]["replica"])
        totals[replica] = (totals.get(replica, 0) + int(entry["hash"], 16)) & _MASK
    norm = math.sqrt(sum(known) / len(totals)) if known else None
    hashes = [f"{totals[key]:016x}" for key in sorted(totals)]
    return Whole(hashes, False, None, first["dtype"], first["shape"], norm, values)


@dataclass
class Difference:
    """One tensor that differs at one step."""

    kind: str
    name: str
    problem: str  # "value", "dtype", "shape", "placement", "missing in A" or "missing in B"
    a: Optional[Whole]
    b: Optional[Whole]
    ranks: list[int] = field(default_factory=list)  # those that differ, where each rank holds all of it

    @property
    def title(self) -> str:
        return f"{SINGULAR[self.kind]} {'of ' if self.kind == 'gradients' else ''}{self.name}"

    def ratio(self) -> Optional[float]:
        """The norm in B over that in A."""
        if self.a is None or self.b is None or not self.a.norm or self.b.norm is None:
            return None
        return self.b.norm / self.a.norm if math.isfinite(self.a.norm) and math.isfinite(self.b.norm) else None


def _difference(kind: str, name: str, a: list[Step], b: list[Step]) -> Optional[Difference]:
    entries_a = [step.tensors[kind].get(name) for step in a]
    entries_b = [step.tensors[kind].get(name) for step in b]
    present_a = [i for i, entry in enumerate(entries_a) if entry is not None]
    present_b = [i for i, entry in enumerate(entries_b) if entry is not None]
    # Runs with different numbers of ranks are compared if all their ranks have the tensor.
    if (present_a != present_b) if len(a) == len(b) else (len(present_a) < len(a) or len(present_b) < len(b)):
        lacking = "A" if len(present_a) * len(b) < len(present_b) * len(a) else "B"
        ranks = sorted(set(present_a) ^ set(present_b)) if len(a) == len(b) else []
        return Difference(kind, name, f"missing in {lacking}", None, None, ranks)
    x, y = whole_of([e for e in entries_a if e is not None]), whole_of([e for e in entries_b if e is not None])
    for problem, differs in (("shape", x.shape != y.shape), ("dtype", x.dtype != y.dtype)):
        if differs:
            return Difference(kind, name, problem, x, y)
    if x.local != y.local:
        return Difference(kind, name, "placement", x, y)
    if x.by_rank == y.by_rank and len(x.hashes) == len(y.hashes):
        ranks = [r for r, p, q in zip(present_a, x.hashes, y.hashes) if p != q] if x.by_rank else []
        return Difference(kind, name, "value", x, y, ranks) if x.hashes != y.hashes else None
    return None if set(x.hashes) == set(y.hashes) else Difference(kind, name, "value", x, y)


def _names(steps: list[Step], kind: str) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step.tensors[kind]))


@dataclass
class StepComparison:
    """The tensors of one step that differ, and how many were compared."""

    differences: list[Difference]
    compared: dict[str, int]
    skipped: list[str]  # tensors whose placements cannot be compared


def compare_step(a: list[Step], b: list[Step]) -> StepComparison:
    result = StepComparison([], {}, [])
    for kind in KINDS:
        names = list(dict.fromkeys(_names(a, kind) + _names(b, kind)))
        result.compared[kind] = len(names)
        for name in names:
            found = _difference(kind, name, a, b)
            if found is not None and found.problem == "placement":
                result.skipped.append(f"{found.title}")
            elif found is not None:
                result.differences.append(found)
    return result


def signature(entry: dict[str, Any]) -> tuple:
    """What an operation is, without its data."""
    keys = ("kind", "group", "count", "dtype", "op", "root", "peer")
    return tuple(str(entry.get(key)) for key in keys)


def same_data(a: dict[str, Any], b: dict[str, Any], side: str) -> Optional[bool]:
    """Whether the inputs or outputs of two operations are equal; None if one of them is not known."""
    if side not in a or side not in b:
        return None
    return a[side]["hashes"] == b[side]["hashes"]


@dataclass
class CollectivePair:
    """An operation of A and the operation of B at the same place, on all ranks."""

    a: list[dict[str, Any]]
    b: list[dict[str, Any]]

    @property
    def same_signature(self) -> bool:
        return all(signature(x) == signature(y) for x, y in zip(self.a, self.b))

    def equal(self, side: str) -> Optional[bool]:
        answers = [same_data(x, y, side) for x, y in zip(self.a, self.b)]
        if any(answer is False for answer in answers):
            return False
        return None if any(answer is None for answer in answers) else True

    @property
    def differs(self) -> bool:
        return not self.same_signature or self.equal("inputs") is False or self.equal("outputs") is False


def pairs(a: list[Step], b: list[Step]) -> list[CollectivePair]:
    """The operations of a step in order, as far as both runs and all ranks have them."""
    if len(a) != len(b):
        return []
    count = min(len(step.collectives) for step in a + b)
    return [CollectivePair([s.collectives[i] for s in a], [s.collectives[i] for s in b]) for i in range(count)]


def same_strategy(a: Run, b: Run) -> bool:
    """Whether the operations of two runs can be compared in order: both scatter what they reduce, or neither does."""
    if len(a.ranks) != len(b.ranks):
        return False
    scatters: list[bool] = []
    for run in (a, b):
        kinds = {c["kind"] for rank in run.ranks for step in rank.steps for c in step.collectives}
        if not kinds & {"all_reduce", "reduce_scatter", "reduce"}:
            return True  # a run without reductions lacks them, whatever its strategy is
        scatters.append("reduce_scatter" in kinds)
    return scatters[0] == scatters[1]


@dataclass
class Comparison:
    """The result: equal, or the first difference with what explains it."""

    a: Run
    b: Run
    equal: bool
    same_strategy: bool
    index: int = 0  # of the first step that differs, in the order of the record
    step: Optional[StepComparison] = None
    first: Optional[Difference] = None
    extra_steps: int = 0  # steps of B that A lacks; negative: the other way round
    skipped: list[str] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The number of the first step that differs."""
        longer = self.a if len(self.a) > len(self.b) else self.b
        return longer.ranks[0].steps[self.index].number

    @property
    def in_both(self) -> bool:
        """Whether both runs have the step that differs."""
        return self.index < min(len(self.a), len(self.b))

    def steps_a(self) -> list[Step]:
        return self.a.steps(self.index)

    def steps_b(self) -> list[Step]:
        return self.b.steps(self.index)

    def first_pair(self) -> Optional[CollectivePair]:
        """The first pair of operations of the step that differs, if the operations can be compared."""
        if not self.in_both or not self.same_strategy:
            return None
        return next((pair for pair in pairs(self.steps_a(), self.steps_b()) if pair.differs), None)


def _first(differences: list[Difference], a: list[Step], b: list[Step], ordered: bool) -> Difference:
    """The difference to name: of the earliest kind; of those, the tensor that the earliest differing operation carried."""
    kind = next(k for k in KINDS if any(d.kind == k for d in differences))
    candidates = [d for d in differences if d.kind == kind]
    if kind == "gradients" and ordered:
        for pair in pairs(a, b):
            if pair.differs:
                carried = set(pair.a[0].get("carries", [])) | set(pair.b[0].get("carries", []))
                named = [d for d in candidates if d.name in carried]
                if named:
                    return named[0]
    # A tensor that no operation carried in one of the runs explains more than those that follow from it.
    for d in candidates:
        if d.kind == "gradients" and (carrier(a, d.name) is None) != (carrier(b, d.name) is None):
            return d
    return candidates[0]


def carrier(steps: list[Step], name: str) -> Optional[list[dict[str, Any]]]:
    """The operation that carried a gradient, on each rank."""
    found = [next((c for c in step.collectives if name in c.get("carries", [])), None) for step in steps]
    return None if any(entry is None for entry in found) else found  # type: ignore[return-value]


def compare_runs(a: Run, b: Run) -> Comparison:
    result = Comparison(a, b, True, same_strategy(a, b))
    for index in range(min(len(a), len(b))):
        steps_a, steps_b = a.steps(index), b.steps(index)
        same_place = (steps_a[0].optimizer, steps_a[0].update) == (steps_b[0].optimizer, steps_b[0].update)
        compared = compare_step(steps_a, steps_b)
        result.skipped = compared.skipped or result.skipped
        result.compared = {k: max(v, result.compared.get(k, 0)) for k, v in compared.compared.items()}
        if compared.differences or not same_place:
            result.equal, result.index, result.step = False, index, compared
            if compared.differences:
                result.first = _first(compared.differences, steps_a, steps_b, result.same_strategy)
            result.extra_steps = len(b) - len(a)
            return result
    if result.compared.get("parameters", 0) <= len([t for t in result.skipped if t.startswith("parameter ")]):
        raise RecordError("compare: no parameter has placements that can be compared; see the limits in docs/oracle.md")
    if len(a) != len(b):
        result.equal, result.index, result.extra_steps = False, min(len(a), len(b)), len(b) - len(a)
    return result


def compare(directory_a: str, directory_b: str) -> Comparison:
    """Compares two records. Raises RecordError if one cannot be compared."""
    return compare_runs(read_run(directory_a), read_run(directory_b))
