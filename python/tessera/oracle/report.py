"""The result of a comparison as text."""

from __future__ import annotations

from typing import Any, Optional

from tessera.oracle.causes import likely_causes
from tessera.oracle.comparison import CollectivePair, Comparison, Difference, carrier, pairs
from tessera.oracle.files import KINDS, Run
from tessera.oracle.wording import count_text, list_text, number_text, operation_text, ranks_text

_WORDS = {"gradients": "gradient", "parameters": "parameter", "state": "optimizer tensor"}


def _shape(difference: Difference) -> str:
    whole = difference.a or difference.b
    return f" [{'x'.join(map(str, whole.shape)) or 'scalar'} {whole.dtype}]" if whole else ""


def _what(difference: Difference) -> str:
    if difference.problem.startswith("missing"):
        on = f" on {ranks_text(difference.ranks)}" if difference.ranks else ""
        return f"is {difference.problem}{on}"
    a, b = difference.a, difference.b
    if difference.problem == "dtype" and a and b:
        return f"is {a.dtype} in A and {b.dtype} in B"
    if difference.problem == "shape" and a and b:
        return f"has shape {a.shape} in A and {b.shape} in B"
    return "differs first"


def _data(pair: CollectivePair) -> str:
    """What is known of the inputs and outputs of a pair of operations."""
    words = {True: "are equal", False: "differ", None: "cannot be compared"}
    inputs, outputs = pair.equal("inputs"), pair.equal("outputs")
    if inputs is False:
        ranks = [i for i, (x, y) in enumerate(zip(pair.a, pair.b)) if x.get("inputs") != y.get("inputs")]
        return f"the inputs differ already, on {ranks_text(ranks)}; the outputs {words[outputs]}"
    joint = "but" if inputs is True and outputs is False else "and"
    return f"the inputs {words[inputs]}, {joint} the outputs {words[outputs]}"


def _pair_text(pair: CollectivePair) -> str:
    x, y = pair.a[0], pair.b[0]
    if pair.same_signature:
        return f"{operation_text(x)}: {_data(pair)}"
    return f"{operation_text(x)} in A is {operation_text(y)} in B"


def _carriers(found: Comparison) -> list[str]:
    """The operation that made the difference: the one that carried the tensor, and the first that differs."""
    if found.first is None or not found.in_both:
        return []
    a, b = found.steps_a(), found.steps_b()
    lines: list[str] = []
    named: Optional[int] = None
    if found.first.kind == "gradients":
        in_a, in_b = carrier(a, found.first.name), carrier(b, found.first.name)
        if in_a and in_b:
            aligned = found.same_strategy and _place(a, in_a[0]) == _place(b, in_b[0])
            if aligned:
                named = in_a[0]["number"]
                lines.append(f"carried by   {_pair_text(CollectivePair(in_a, in_b))}")
            else:
                lines.append(f"carried by   {operation_text(in_a[0])} in A, {operation_text(in_b[0])} in B")
        elif in_a or in_b:
            present, absent = ("A", "B") if in_a else ("B", "A")
            entry = (in_a or in_b or [{}])[0]
            lines.append(f"carried by   {operation_text(entry)} in {present}; by no operation in {absent}")
    pair = found.first_pair()
    if pair is not None and pair.a[0]["number"] != named:
        lines.append(f"operations   the first that differs at this step: {_pair_text(pair)}")
    elif pair is None and found.same_strategy and pairs(a, b) and named is None and not lines:
        lines.append("operations   all that both runs issue at this step are equal")
    if not found.same_strategy:
        lines.append("operations   the runs use different ones, so their data is not compared in order")
    return lines


def _place(steps: list[Any], entry: dict[str, Any]) -> int:
    return next(i for i, c in enumerate(steps[0].collectives) if c is entry)


def _others(found: Comparison) -> list[str]:
    if found.step is None:
        return []
    lines = []
    for kind in KINDS:
        differing = [d for d in found.step.differences if d.kind == kind]
        total = found.step.compared.get(kind, 0)
        if differing:
            names = list_text(d.name for d in differing)
            lines.append(f"at this step {len(differing)} of {count_text(total, _WORDS[kind])} differ: {names}")
    return lines


def _numbers(found: Comparison) -> list[str]:
    first = found.first
    if first is None or first.a is None or first.b is None:
        return []
    lines = []
    if first.a.norm is not None and first.b.norm is not None:
        ratio = first.ratio()
        times = f", {number_text(ratio)} times that" if ratio is not None else ""
        lines.append(f"norm         {number_text(first.a.norm)} in A, {number_text(first.b.norm)} in B{times}")
    common = sorted(set(first.a.values) & set(first.b.values))
    if common:
        differences = [abs(first.a.values[i] - first.b.values[i]) for i in common]
        mean = sum(differences) / len(differences)
        lines.append(
            f"values       of the first {count_text(len(common), 'element')}: the difference is at most "
            f"{number_text(max(differences))}, {number_text(mean)} in the mean"
        )
    return lines


def _operations(run: Run) -> int:
    return sum(len(step.collectives) for step in run.ranks[0].steps)


def _first_operation(a: Run, b: Run) -> Optional[str]:
    """The first operation that differs in two runs whose tensors are equal."""
    for index in range(len(a)):
        x, y = a.steps(index), b.steps(index)
        for pair in pairs(x, y):
            if pair.differs:
                return f"operations differ, first at step {x[0].number}, but the tensors do not: {_pair_text(pair)}"
        if any(len(p.collectives) != len(q.collectives) for p, q in zip(x, y)):
            return f"operations differ, first at step {x[0].number}, but the tensors do not: another number of them"
    return None


def _equal_report(found: Comparison) -> list[str]:
    steps = sum(step.update > 0 for step in found.a.ranks[0].steps)
    counts = ", ".join(count_text(found.compared.get(kind, 0), _WORDS[kind]) for kind in KINDS)
    lines = [f"equal: {count_text(steps, 'step')} of {count_text(len(found.a.ranks), 'rank')}; at each step {counts}"]
    note = _first_operation(found.a, found.b) if found.same_strategy else None
    if note:
        lines.append(f"note: {note}")
    elif not found.same_strategy:
        lines.append("the runs use different operations between ranks; their data is not compared")
    elif _operations(found.a):
        lines.append(f"{count_text(_operations(found.a), 'operation')} of each rank are equal, too")
    return lines


def report(found: Comparison) -> str:
    """The text that `python -m tessera.oracle` prints."""
    skipped = [f"not compared, because of their placements: {list_text(found.skipped)}"] if found.skipped else []
    if found.equal:
        return "\n".join(_equal_report(found) + skipped)
    if found.first is None:
        lines = [f"different: the numbers or the order of steps differ from step {found.number} on"]
    else:
        ranks = f" on {ranks_text(found.first.ranks)}" if _some_ranks(found) else ""
        lines = [
            f"different: step {found.number}, {found.first.title}{_shape(found.first)} {_what(found.first)}{ranks}"
        ]
    lines += [f"  {line}" for line in _carriers(found) + _numbers(found) + _others(found)]
    causes = likely_causes(found)
    if causes:
        lines += ["likely causes"] + [f"  {number}. {text}" for number, text in enumerate(causes, 1)]
    return "\n".join(lines + skipped)


def _some_ranks(found: Comparison) -> bool:
    first = found.first
    return first is not None and first.problem == "value" and 0 < len(first.ranks) < len(found.a.ranks)
