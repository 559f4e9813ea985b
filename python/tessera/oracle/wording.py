"""Short texts for operations, counts and ranks."""

from __future__ import annotations

from typing import Any, Iterable, Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0-3` or `ranks 1, 0`. The order counts: it is that of the group."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(str(r) for r in ranks)


def operation_name(entry: dict[str, Any]) -> str:
    return f"{entry['kind']} #{entry['number']}"


def operation_text(entry: dict[str, Any]) -> str:
    """`all_reduce #5 (sum, 4096 f32, ranks 0-3)`"""
    parts = [entry["op"]] if "op" in entry else []
    if entry.get("dtype"):
        parts.append(f"{entry['count']} {entry['dtype']}")
    if "root" in entry:
        parts.append(f"root {entry['root']}")
    if "peer" in entry:
        parts.append(f"peer {entry['peer']}")
    parts.append(ranks_text(entry["group"]))
    return f"{operation_name(entry)} ({', '.join(parts)})"


def count_text(count: int, word: str) -> str:
    if count == 1:
        return f"1 {word}"
    plural = word + "es" if word.endswith("s") else word + "s"
    return f"{count} {plural}"


def list_text(names: Iterable[str], limit: int = 3) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def number_text(value: float) -> str:
    return f"{value:.6g}"
