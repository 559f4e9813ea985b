"""Judges assignment 6: a wrapping policy, by `tessera plan`."""

from __future__ import annotations

import dataclasses
import json
import sys

from grading.build import ASSIGNMENTS
from grading.worlds import run_limited

POINTS = 10
BLOCKS, BLOCK, ROOT = 8, 49_984, 20_608  # gpt-tall
FORWARD, BACKWARD = 0.1527e-3, 0.3077e-3  # seconds of a block for one sequence, on the planned machine of 50 GFLOP/s
SLOWER = 1.05  # than the best units of equal size


@dataclasses.dataclass
class Scene:
    name: str
    ranks: int
    batch: int  # sequences of a step
    latency_us: int
    megabytes: int  # per second
    limit: int = 1 << 40  # bytes of gathered parameters

    @property
    def link(self) -> str:
        return f"{self.latency_us}us,{self.megabytes}MB/s"

    def arguments(self) -> list[str]:
        """In the order of wrap_harness.cpp."""
        sequences = self.batch // self.ranks
        values = (self.ranks, BLOCKS, BLOCK, ROOT, FORWARD * sequences, BACKWARD * sequences, self.latency_us * 1e-6,
                  float(self.megabytes * 1e6), self.limit)
        return [repr(value) for value in values]


SCENES = (
    Scene("many tokens, 100 MB/s", 4, 48, 20, 100),
    Scene("a fast link", 4, 12, 20, 1000),
    Scene("5 ms of latency, 1 GB/s", 4, 12, 5000, 1000),
    Scene("5 ms of latency, 100 MB/s", 4, 12, 5000, 100),
    Scene("the same, 1.3 MB of gathered parameters", 4, 12, 5000, 100, 1_300_000),
    Scene("the same, 0.9 MB", 4, 12, 5000, 100, 900_000),
    Scene("1 ms of latency, 0.5 MB", 4, 12, 1000, 1000, 500_000),
    Scene("2 ranks, 1 ms of latency", 2, 12, 1000, 1000),
)


def spec(units: list[int]) -> str:
    begin, names = 0, []
    for size in units:
        names.append("+".join(f"h.{i}" for i in range(begin, begin + size)))
        begin += size
    return ";".join(names)


class Planner:
    """Plans steps with the tool, each once."""

    def __init__(self, worlds):
        self.worlds, self.known = worlds, {}

    def plan(self, scene: Scene, units: list[int]) -> tuple[float, int]:
        """Milliseconds of a step, and bytes of gathered parameters at the peak."""
        key = (scene.link, scene.ranks, scene.batch, tuple(units))
        if key not in self.known:
            out = self.worlds.folder / "plan.json"
            code, text = run_limited([str(self.worlds.tool), "plan", "--model", "gpt-tall", "--ranks", str(scene.ranks), "--global-batch",
                                      str(scene.batch), "--strategies", "fsdp", "--link", scene.link, "--wrap", spec(units), "--json",
                                      str(out)], self.worlds.limit)
            if code != 0:
                raise RuntimeError(f"tessera plan: {text[-300:]}")
            run = json.loads(out.read_text())["runs"][0]
            self.known[key] = run["step_ms"]["median"], run["peak_bytes"]["unsharded_parameter"]
        return self.known[key]

    def best(self, scene: Scene) -> tuple[float, list[int]]:
        """The fastest units of equal size that fit."""
        found = []
        for size in range(1, BLOCKS + 1):
            units = [min(size, BLOCKS - begin) for begin in range(0, BLOCKS, size)]
            time, peak = self.plan(scene, units)
            if peak <= scene.limit:
                found.append((time, units))
        return min(found)


def answer(command: list[str], scene: Scene, limit: float) -> tuple[list[int], str]:
    """The student's units, and what is wrong with them."""
    code, text = run_limited([*command, *scene.arguments()], min(limit, 10))
    lines = text.strip().splitlines() or [""]
    if code is None:
        return [], "wrap() did not return within 10 s"
    if code != 0 or not lines[-1].startswith("units:"):
        return [], f"wrap() failed: {lines[-1][:200] or f'exit code {code}'}"
    try:
        units = [int(word) for word in lines[-1].split()[1:]]
    except ValueError:
        return [], f"wrap() should return whole numbers, not {lines[-1][7:]}"
    if sum(units) != BLOCKS or any(size < 1 for size in units):
        return [], f"units of {units} blocks have {sum(units)} blocks; the model has {BLOCKS}, each in one unit"
    return units, ""


def judge(planner: Planner, scene: Scene, units: list[int]) -> tuple[list[str], str]:
    time, peak = planner.plan(scene, units)
    if peak > scene.limit:
        return [f"units of {units} blocks gather {peak:,} bytes at a time, {scene.limit:,} are allowed: the root, the unit that computes "
                "and the one that is prefetched are there together"], ""
    least, best = planner.best(scene)
    said = f"units of {units} blocks: {time:.1f} ms a step, {peak:,} bytes gathered"
    if time <= SLOWER * least:
        return [], said
    count, fewer = len(units), len(best) < len(units)
    why = (f"each of the {count} units pays the latency for its gathers and its reduction" if fewer else
           "the first gather and the last reduction hide behind nothing, and they grow with the units")
    return [f"{said}; units of {best} take {least:.1f} ms: {why}"], ""


def grade(student, worlds, report) -> None:
    if student.language == "python":
        command = [sys.executable, str(ASSIGNMENTS / "grading" / "ranks" / "wrap_answers.py"), str(student.file)]
    else:
        command = student.command("wrap")
    planner, kept = Planner(worlds), []
    for scene in SCENES:
        units, wrong = answer(command, scene, worlds.limit)
        problems, note = ([wrong], "") if wrong else judge(planner, scene, units)
        report.test(scene.name, 1, [f"{scene.link}, {scene.ranks} ranks: {problem}" for problem in problems], note)
        kept += [f"{scene.name}: {problem}" for problem in problems if wrong or "are allowed" in problem]
    report.test("memory is never exceeded", 2, kept)
