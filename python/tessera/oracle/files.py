"""Reads records. A record is a directory with a file of JSON lines for each rank."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import Any, Optional

FORMAT = 1
KINDS = ("gradients", "parameters", "state")


class RecordError(Exception):
    """A record that cannot be read, or that is incomplete."""


def record_path(directory: str, rank: int) -> str:
    return os.path.join(directory, f"rank{rank}.jsonl")


@dataclass
class Step:
    """One step of one optimizer on one rank. Step 0 of an optimizer is the state before its first update."""

    number: int
    optimizer: int
    update: int
    random: Optional[str] = None
    settings: list[dict[str, Any]] = field(default_factory=list)
    backwards: list[dict[str, Any]] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # by kind and name


@dataclass
class RankRecord:
    rank: int
    ranks: int
    steps: list[Step]
    rest: list[dict[str, Any]]  # operations after the last step


@dataclass
class Run:
    """The record of a whole run."""

    directory: str
    ranks: list[RankRecord]

    def steps(self, index: int) -> list[Step]:
        """The step at an index on every rank."""
        return [rank.steps[index] for rank in self.ranks]

    def __len__(self) -> int:
        return len(self.ranks[0].steps)


def _step(line: dict[str, Any], layouts: dict[tuple[int, str, str], Any]) -> Step:
    step = Step(line["step"], line["optimizer"], line["update"], line.get("random"), line.get("settings", []))
    step.backwards, step.collectives = line.get("backwards", []), line.get("collectives", [])
    for kind in KINDS:
        step.tensors[kind] = line.get(kind, {})
        for name, entry in step.tensors[kind].items():
            key = (step.optimizer, kind, name)
            if "layout" in entry:
                layouts[key] = entry["layout"]
            entry["layout"] = layouts[key]
    return step


def _read_rank(path: str) -> RankRecord:
    steps: list[Step] = []
    layouts: dict[tuple[int, str, str], Any] = {}
    header: dict[str, Any] = {}
    rest: list[dict[str, Any]] = []
    end: Optional[dict[str, Any]] = None
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                entry = json.loads(line)
                if "tessera_oracle" in entry:
                    header = entry
                elif "step" in entry:
                    steps.append(_step(entry, layouts))
                elif "rest" in entry:
                    rest = entry["collectives"]
                elif "end" in entry:
                    end = entry
    except (OSError, ValueError, KeyError) as error:
        raise RecordError(f"{path}: not a record: {error}") from None
    if header.get("tessera_oracle") != FORMAT:
        raise RecordError(f"{path}: format {header.get('tessera_oracle')} is not {FORMAT}; record the run again")
    if end is None or not end["complete"]:
        raise RecordError(f"{path}: the run did not end normally; the record has {len(steps)} lines of steps")
    if not steps:
        raise RecordError(f"{path}: no optimizer made a step")
    return RankRecord(header["rank"], header["ranks"], steps, rest)


def read_run(directory: str) -> Run:
    """Reads a record and checks that it has all ranks with equally many steps."""
    try:
        names = sorted(n for n in os.listdir(directory) if re.fullmatch(r"rank\d+\.jsonl", n))
    except OSError as error:
        raise RecordError(f"{directory}: not a record: {error.strerror}") from None
    if not names:
        raise RecordError(f"{directory}: not a record: it has no file rank0.jsonl")
    ranks = sorted((_read_rank(os.path.join(directory, name)) for name in names), key=lambda r: r.rank)
    if [r.rank for r in ranks] != list(range(ranks[0].ranks)):
        raise RecordError(f"{directory}: it has ranks {[r.rank for r in ranks]} of {ranks[0].ranks}")
    steps = {r.rank: [(s.optimizer, s.update) for s in r.steps] for r in ranks}
    for rank, made in steps.items():
        if made != steps[0]:
            raise RecordError(f"{directory}: rank {rank} made {len(made)} steps, rank 0 made {len(steps[0])}")
    return Run(directory, ranks)
