"""Deduces likely causes of a difference from the two records."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Callable, Optional

from tessera.oracle.comparison import Comparison, carrier, pairs
from tessera.oracle.files import Run, Step
from tessera.oracle.wording import count_text, list_text, number_text, operation_name, ranks_text

_TOLERANCE = 1e-3  # of ratios of norms: the values may be rounded in a half precision
_EXACT = 1e-6
_ROUNDING = 1e-5
_VALUES = 1e-2  # of single values: those of bf16 have 8 bits


_REDUCING = ("all_reduce", "reduce_scatter", "reduce")  # named first: gradients depend on them


def _hashes(steps: list[Step], kind: str) -> list[dict[str, str]]:
    return [{name: entry["hash"] for name, entry in step.tensors[kind].items()} for step in steps]


def _extra_step_of(run: Run, index: int, label: str, other: str) -> Optional[str]:
    """Tells whether the step at an index repeats the one before without a new backward pass."""
    if index < 1 or index >= len(run):
        return None
    steps, before = run.steps(index), run.steps(index - 1)
    if steps[0].optimizer != before[0].optimizer or before[0].update == 0 or any(step.backwards for step in steps):
        return None
    same = _hashes(steps, "gradients") == _hashes(before, "gradients")
    detail = f"it has the gradients of step {before[0].number} again" if same else "its gradients come from no new pass"
    return (
        f"an extra optimizer step in {label}: there is no backward pass before step {steps[0].number} of {label}; "
        f"{detail}. {other} has {{}} steps in all, {label} {{}}"
    )


def extra_step(found: Comparison) -> Optional[str]:
    updates = [sum(step.update > 0 for step in run.ranks[0].steps) for run in (found.a, found.b)]
    in_a = _extra_step_of(found.a, found.index, "A", "B")
    in_b = _extra_step_of(found.b, found.index, "B", "A")
    if in_b and not in_a:
        return in_b.format(*updates)
    if in_a and not in_b:
        return in_a.format(*reversed(updates))
    if not found.in_both:
        longer, shorter = ("B", "A") if updates[1] > updates[0] else ("A", "B")
        count = count_text(abs(updates[1] - updates[0]), "step")
        return f"{longer} makes {count} more than {shorter}; all steps that both make are equal"
    return None


def initial_state(found: Comparison) -> Optional[str]:
    if found.first is None or not found.in_both or found.steps_a()[0].update > 0:
        return None
    if found.first.problem != "value":
        return "the runs train different models, or the same model in another dtype"
    return "the runs start from different parameters: a changed seed, another initialization or another checkpoint"


def settings(found: Comparison) -> Optional[str]:
    if not found.in_both:
        return None
    changes: list[str] = []
    for group, (x, y) in enumerate(zip(found.steps_a()[0].settings, found.steps_b()[0].settings)):
        for key in sorted(set(x) & set(y)):
            # How an optimizer computes may differ between equal trainings; what it computes may not.
            if x[key] != y[key] and key not in ("foreach", "fused", "capturable", "differentiable"):
                changes.append(f"{key} of group {group} is {x[key]} in A and {y[key]} in B")
    return f"the optimizers have different settings: {list_text(changes)}" if changes else None


def backward_passes(found: Comparison) -> Optional[str]:
    if not found.in_both or found.steps_a()[0].update == 0:
        return None
    for x, y in zip(found.steps_a(), found.steps_b()):
        a, b = len(x.backwards), len(y.backwards)
        if a != b and a and b:
            less, more = ("B", "A") if b < a else ("A", "B")
            return (
                f"a lost microbatch in {less}, or an additional one in {more}: before step {x.number} "
                f"A makes {count_text(a, 'backward pass')} and B {b}"
            )
    return None


def changed_parameters(found: Comparison) -> Optional[str]:
    """Parameters that are not those that the last step left, when the next pass reads them."""
    if not found.in_both or len(found.a.ranks) != len(found.b.ranks):
        return None
    for rank, (x, y) in enumerate(zip(found.steps_a(), found.steps_b())):
        a, b = (step.backwards[0].get("changed", {}) if step.backwards else {} for step in (x, y))
        names = sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
        if names:
            where = "A" if not b else "B" if not a else "both runs, in another way"
            return (
                f"parameters changed outside the optimizer in {where}: after the step before step {x.number} and before its "
                f"first backward pass, {list_text(names)} on rank {rank}"
            )
    return None


def random_state(found: Comparison) -> Optional[str]:
    """The loss of the first backward pass differs although the parameters were equal."""
    if changed_parameters(found) or not found.in_both or found.index < 1 or len(found.a.ranks) != len(found.b.ranks):
        return None
    ranks: list[int] = []
    for rank, (x, y) in enumerate(zip(found.steps_a(), found.steps_b())):
        losses = [step.backwards[0].get("hash") if step.backwards else None for step in (x, y)]
        if None not in losses and losses[0] != losses[1]:
            ranks.append(rank)
    if not ranks:
        return None
    x, y = found.steps_a()[ranks[0]], found.steps_b()[ranks[0]]
    differ = "differ, too: a changed seed, or another number of random values"
    states = differ if x.random != y.random else "are equal: the data or its order, or what is not recorded"
    return (
        f"the first loss of step {x.number} differs already on {ranks_text(ranks)} ({number_text(x.backwards[0]['loss'])} "
        f"and {number_text(y.backwards[0]['loss'])}) with equal parameters: other inputs, another scale of the loss or "
        f"stale parameters; the states of the random generator {states}"
    )


def _reductions_in_each_pass(x: Step, y: Step, kind: str) -> Optional[str]:
    """One run reduces in each of several backward passes what the other reduces in the last one."""
    passes = len(x.backwards)
    if passes < 2 or passes != len(y.backwards) or kind not in _REDUCING:
        return None

    def early(step: Step) -> int:
        """The operations before the last backward pass."""
        last = step.backwards[-1]["issued"]
        return sum(c["kind"] == kind and c["number"] <= last for c in step.collectives)

    a, b = early(x), early(y)
    if (a == 0) == (b == 0):
        return None
    often, once = ("A", "B") if a else ("B", "A")
    return (
        f"gradients are reduced in each of {passes} backward passes in {often} and only in the last in {once}: no_sync() or "
        f"set_requires_gradient_sync(False) is missing in {often}, or not meant in {once}"
    )


def operations(found: Comparison) -> Optional[str]:
    """Another number of operations, or operations that differ in more than their data."""
    if not found.in_both or not found.same_strategy:
        return None
    texts: list[str] = []
    for rank, (x, y) in enumerate(zip(found.steps_a(), found.steps_b())):
        kinds = sorted(
            {c["kind"] for c in x.collectives + y.collectives}, key=lambda kind: (kind not in _REDUCING, kind)
        )
        for kind in kinds:
            a, b = (sum(c["kind"] == kind for c in step.collectives) for step in (x, y))
            if a != b:
                repeated = _reductions_in_each_pass(x, y, kind)
                if repeated is not None:
                    return repeated
                less = "B" if b < a else "A"
                stale = (
                    ": stale values of an earlier one may be in use" if "gather" in kind or kind == "broadcast" else ""
                )
                texts.append(
                    f"a skipped {kind} in {less}: at step {x.number} rank {rank} issues {a} in A and {b} in B{stale}; "
                    "which of the two is wrong is not known"
                )
        if texts:
            return texts[0]
    for pair in pairs(found.steps_a(), found.steps_b()):
        p, q = pair.a[0], pair.b[0]
        if pair.same_signature:
            continue
        name = operation_name(p)
        if p.get("op") != q.get("op"):
            return f"another reduction: {name} has op {p.get('op')} in A and {q.get('op')} in B"
        if p["dtype"] != q["dtype"]:
            return f"a reduction in another dtype: {name} has {p['dtype']} in A and {q['dtype']} in B"
        if p["group"] != q["group"]:
            return f"another order of ranks or another group: {name} is of {p['group']} in A and {q['group']} in B"
        if p["count"] != q["count"]:
            return _counts(found, p, q)
    return None


def _counts(found: Comparison, x: dict[str, Any], y: dict[str, Any]) -> str:
    a, b = found.steps_a(), found.steps_b()
    total = [sum(c["count"] for c in steps[0].collectives if c["kind"] == x["kind"]) for steps in (a, b)]
    if total[0] == total[1]:
        return (
            f"other buckets: {operation_name(x)} has {x['count']} elements in A and {y['count']} in B, with the same total; "
            "the order of additions may depend on the place in a bucket"
        )
    less = "B" if total[1] < total[0] else "A"
    left_out = [
        name
        for name in a[0].tensors["gradients"]
        if (carrier(a, name) is None) != (carrier(b, name) is None) and (carrier(b, name) is None) == (less == "B")
    ]
    which = f", {list_text(left_out)}," if left_out else ""
    return (
        f"a parameter{which} is left out of a bucket in {less}: the operations of kind {x['kind']} carry {total[0]} elements "
        f"in A and {total[1]} in B"
    )


def ranks_disagree(found: Comparison) -> Optional[str]:
    """Gradients that differ between the ranks of one run and agree in the other."""
    if found.step is None:
        return None
    for label, side in (("B", "b"), ("A", "a")):
        other = "a" if side == "b" else "b"
        names = []
        for d in found.step.differences:
            mine, theirs = getattr(d, side), getattr(d, other)
            if d.kind == "gradients" and mine and theirs and mine.local is None:
                if len(set(mine.hashes)) > 1 and len(set(theirs.hashes)) == 1:
                    names.append(d.name)
        if names:
            return (
                f"gradients are not reduced in {label}: {list_text(names)} differ between its ranks, in the other run they "
                "are the same on all: a skipped all_reduce, or a parameter that is left out"
            )
    return None


def _is_multiple(a: list[Any], b: list[Any], ratio: float) -> bool:
    """Whether all elements that both records keep are in B those in A times the ratio. False if none are kept."""
    pairs_of_values = [(x, y) for p, q in zip(a, b) for x, y in zip(p.get("sample", []), q.get("sample", []))]
    if len(a) != len(b) or any(len(p.get("sample", [])) != len(q.get("sample", [])) for p, q in zip(a, b)):
        return False
    largest = max((abs(ratio * x) for x, _ in pairs_of_values), default=0.0)
    return largest > 0 and all(
        math.isclose(ratio * x, y, rel_tol=_VALUES, abs_tol=_TOLERANCE * largest) for x, y in pairs_of_values
    )


def _gradients_are_multiples(found: Comparison, ratio: float) -> bool:
    a, b = found.steps_a(), found.steps_b()
    names = [d.name for d in found.step.differences if d.kind == "gradients"] if found.step else []
    for name in names:
        entries = [[step.tensors["gradients"].get(name) for step in steps] for steps in (a, b)]
        if any(entry is None for side in entries for entry in side) or not _is_multiple(*entries, ratio):
            return False
        if [entry["layout"] for entry in entries[0]] != [entry["layout"] for entry in entries[1]]:
            return False
    return bool(names)


def scaled(found: Comparison) -> Optional[str]:
    """All gradients that differ are those of the other run times one factor."""
    if found.step is None or found.first is None or found.first.kind != "gradients":
        return None
    ratios = [d.ratio() for d in found.step.differences if d.kind == "gradients" and d.a and d.a.norm]
    known = [r for r in ratios if r]
    if not known or len(known) != len(ratios) or max(known) > min(known) * (1 + _TOLERANCE):
        return None
    ratio = known[0]
    # Equal ratios of several tensors are no accident. That of a single one is, unless it is a simple fraction.
    simple = float(Fraction(ratio).limit_denominator(16))
    if abs(ratio - 1) <= _TOLERANCE or (len(known) == 1 and not math.isclose(simple, ratio, rel_tol=_EXACT)):
        return None
    if not found.in_both or not _gradients_are_multiples(found, ratio):
        return None
    ranks = len(found.a.ranks)
    text = f"the norms of all gradients that differ are in B {number_text(ratio)} times those in A"
    for factor, meaning in ((ranks, "SUM where A averages"), (1 / ranks, "AVG where A sums")):
        if ranks > 1 and math.isclose(ratio, factor, rel_tol=_TOLERANCE):
            return f"{text}, the number of ranks being {ranks}: B uses {meaning}, or divides by another number"
    return f"{text}: a wrong divisor (ranks, microbatches, tokens) or another scale of the loss"


def divisor_by_rank(found: Comparison) -> Optional[str]:
    """The inputs of the reductions are those of the other run times a factor, which depends on the rank."""
    pair = found.first_pair()
    if pair is None or not pair.same_signature or pair.equal("inputs") is not False or "op" not in pair.a[0]:
        return None
    ratios: list[float] = []
    for x, y in zip(pair.a, pair.b):
        a, b = x["inputs"].get("squares"), y["inputs"].get("squares")
        if not a or not b or not math.isfinite(a) or not math.isfinite(b):
            return None
        ratios.append(math.sqrt(b / a))
        if not _is_multiple([x["inputs"]], [y["inputs"]], ratios[-1]):
            return None
    if max(ratios) <= min(ratios) * (1 + _TOLERANCE):
        return None
    losses = _loss_ratios(found)
    # The losses are scaled as the gradients are if the divisor is wrong. Other data changes them differently.
    if losses is None or any(not math.isclose(p, q, rel_tol=1e-2) for p, q in zip(losses, ratios)):
        return None
    by_rank = ", ".join(f"{number_text(r)} on rank {i}" for i, r in enumerate(ratios))
    return (
        f"a wrong divisor for uneven batches: losses and inputs of {operation_name(pair.a[0])} in B are those in A times "
        f"a factor that depends on the rank ({by_rank})"
    )


def _loss_ratios(found: Comparison) -> Optional[list[float]]:
    ratios: list[float] = []
    for x, y in zip(found.steps_a(), found.steps_b()):
        a = [p["loss"] for p in x.backwards if "loss" in p]
        b = [p["loss"] for p in y.backwards if "loss" in p]
        if len(a) != len(b) or not a or not sum(a):
            return None
        ratios.append(sum(b) / sum(a))
    return ratios


def swapped_ranks(found: Comparison) -> Optional[str]:
    """What one rank has in A another one has in B."""
    if not found.in_both or not found.same_strategy:
        return None
    for pair in pairs(found.steps_a(), found.steps_b()):
        if not pair.differs:
            continue
        for side in ("inputs", "outputs"):
            if any(side not in entry for entry in pair.a + pair.b):
                continue
            a = [entry[side]["hashes"] for entry in pair.a]
            b = [entry[side]["hashes"] for entry in pair.b]
            name = operation_name(pair.a[0])
            for x, y in zip(a, b):
                if len(x) > 1 and x != y and sorted(x) == sorted(y):
                    order = [x.index(value) for value in y]
                    return (
                        f"a swapped order of ranks: the parts of the {side} of {name} in B are the parts {order} of A"
                    )
            if a != b and sorted(a) == sorted(b) and len({str(x) for x in a}) == len(a):
                order = [a.index(value) for value in b]
                return f"a swapped order of ranks: the {side} of {name} on ranks {order} of A are those on ranks 0, 1, ... of B"
    return None


def stale_gather(found: Comparison) -> Optional[str]:
    """A gather whose inputs are those of an earlier one in one run and are new in the other."""
    if not found.in_both:
        return None

    def earlier(run: Run, rank: int, entry: dict[str, Any]) -> Optional[str]:
        hashes = entry.get("inputs", {}).get("hashes")
        for step in run.ranks[rank].steps[: found.index + 1]:
            for other in step.collectives:
                if other["number"] >= entry["number"]:
                    return None
                if other["kind"] == entry["kind"] and hashes and other.get("inputs", {}).get("hashes") == hashes:
                    return f"{operation_name(entry)} in {{}} gathers the values of {operation_name(other)} again"
        return None

    for pair in pairs(found.steps_a(), found.steps_b()):
        if "gather" not in pair.a[0]["kind"] or pair.equal("inputs") is not False:
            continue
        for rank, (x, y) in enumerate(zip(pair.a, pair.b)):
            in_a, in_b = earlier(found.a, rank, x), earlier(found.b, rank, y)
            if (in_a is None) != (in_b is None):
                text = (in_a or in_b or "").format("A" if in_a else "B")
                return f"a stale gather: {text}, while in the other run they are new"
    return None


def arithmetic(found: Comparison) -> Optional[str]:
    pair = found.first_pair()
    if (
        pair is None
        or not pair.same_signature
        or pair.equal("inputs") is not True
        or pair.equal("outputs") is not False
    ):
        return None
    return (
        f"{operation_name(pair.a[0])} computes something else from equal inputs: another order of additions (algorithm, "
        "backend, number of threads), or a rank that is missing in its result"
    )


def rounding(found: Comparison) -> Optional[str]:
    """All gradients that differ have almost the same norms."""
    if found.step is None or found.first is None or found.first.kind != "gradients" or found.same_strategy:
        return None
    ratios = [d.ratio() for d in found.step.differences if d.kind == "gradients"]
    if any(r is None or abs(r - 1) > _ROUNDING for r in ratios):
        return None
    worst = max(abs(r - 1) for r in ratios if r is not None)
    return (
        f"rounding: the norms of the gradients that differ agree to {number_text(worst)} of their size, as after additions "
        "in another order. Over Gloo this order depends on the place in a bucket; over tessera it does not"
    )


def local_computation(found: Comparison) -> Optional[str]:
    """The operations agree, so the ranks compute differently."""
    if found.first is None or not found.in_both or found.steps_a()[0].update == 0:
        return None
    a, b = found.steps_a(), found.steps_b()
    if found.first.kind != "gradients":
        before = {d.kind for d in found.step.differences} if found.step else set()
        if "gradients" not in before:
            return "the gradients are equal: the optimizer, its settings, or what changes parameters after the step"
        return None
    if found.same_strategy and found.first_pair() is None and pairs(a, b):
        same_count = all(len(x.collectives) == len(y.collectives) for x, y in zip(a, b))
        if same_count:
            return (
                "all operations of the step are equal, inputs and outputs: the ranks change the gradients after them "
                "(division, clipping, order of ranks), or do not use their outputs"
            )
    return None


# In the order of how much they explain: the first that is found is often the reason for the others.
CAUSES: list[Callable[[Comparison], Optional[str]]] = [
    extra_step,
    initial_state,
    settings,
    backward_passes,
    operations,
    stale_gather,
    swapped_ranks,
    divisor_by_rank,
    ranks_disagree,
    scaled,
    changed_parameters,
    random_state,
    arithmetic,
    rounding,
    local_computation,
]


# After these, what else differs is a consequence.
_SUFFICIENT = (extra_step, initial_state)


def likely_causes(found: Comparison, limit: int = 3) -> list[str]:
    """The causes that the records support, the most telling first."""
    texts: list[str] = []
    for cause in CAUSES:
        text = cause(found)
        if text is not None:
            texts.append(text)
            if cause in _SUFFICIENT:
                break
    return texts[:limit]
