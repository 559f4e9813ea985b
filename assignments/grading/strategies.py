"""Judges assignment 5: strategies as data, by what `tessera compare` counts."""

from __future__ import annotations

import json
import pathlib
import re
import runpy

from grading.build import Builder
from grading.worlds import run_limited

POINTS = 12
PARAMETERS, RANKS, STEPS = 120_576, 4, 4  # gpt-nano on a mesh of 2 x 2
FIELDS = ("param_at_rest", "param_after_forward", "gradient", "optimizer")
AXES = {"replicate": "kReplicateAxis", "shard": "kShardAxis"}

# What a rank keeps: by how many ranks each kind of state is divided, and bytes of optimizer state for a parameter.
MEMORY = {"lean": (1, 1, 4, 8), "near": (2, 2, 2, 8), "twice": (4, 4, 4, 8), "seldom": (2, 2, 2, 12)}
KINDS = ("parameter", "gradient", "optimizer")
# What a rank sends in a step on average: (calls, bytes) of all_gather, reduce_scatter and all_reduce. The root and the last unit
# stay gathered from forward to backward unless the strategy says otherwise for all.
TRAFFIC = {
    "lean": {"all_gather": (6, 361_728), "reduce_scatter": (6, 361_728), "all_reduce": (0, 0)},
    "near": {"all_gather": (3, 241_152), "reduce_scatter": (3, 241_152), "all_reduce": (3, 241_152)},
    "twice": {"all_gather": (7, 461_696), "reduce_scatter": (6, 361_728), "all_reduce": (0, 0)},
    "seldom": {"all_gather": (4, 341_120), "reduce_scatter": (3, 241_152), "all_reduce": (1.5, 120_576)},
}
HINTS = {
    "lean": "no rank shards parameters or gradients; all four share the optimizer's state, so it is sharded over both axes",
    "near": "each host has one copy of everything, sharded inside it; what is gathered for forward stays until backward",
    "twice": "everything is sharded over both axes between steps; between forward and backward over one, so that backward gathers inside a host",
    "seldom": "a host is an fsdp of its own; between the hosts nothing but parameter deltas, every second step",
}


class WrongTable(Exception):
    """The student's table can't be a plug-in."""


def axes_code(name: str, field: str, axes) -> str:
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise WrongTable(f"{name}: {field} names the axis {unknown[0]!r}; there are replicate and shard")
    return "{" + ", ".join(AXES[axis] for axis in axes) + "}"


def plugin_source(table: dict) -> str:
    """A plug-in in C++ of a table in Python."""
    strategies = []
    for name, row in table.items():
        if not re.fullmatch(r"\w+", name) or not isinstance(row, dict) or set(row) - {*FIELDS, "sync"} or set(FIELDS) - set(row):
            raise WrongTable(f"{name}: a strategy has {', '.join(FIELDS)} and perhaps sync, yours {', '.join(map(str, row))}")
        fields = [f'.name = "{name}"', *(f".{field} = {axes_code(name, field, row[field])}" for field in FIELDS)]
        periods = []
        for axis, period in row.get("sync", {}).items():
            axes_code(name, "sync", [axis])
            periods.append(f"{{{AXES[axis]}, {{.when = Sync::When::period, .what = Sync::What::parameter_delta, .period = {int(period)}}}}}")
        if periods:
            fields.append(f".sync = {{{', '.join(periods)}}}")
        strategies.append("{" + ", ".join([*fields, ".two_axes = true"]) + "}")
    return (f'#include "tessera/fsdp/plugin.h"\nusing namespace tessera::fsdp;\nstatic PluginExports exports() {{\n'
            f'  return {{.strategies = {{{", ".join(strategies)}}}}};\n}}\nTESSERA_FSDP_PLUGIN(exports)\n')


def plugin_of(student, folder: pathlib.Path) -> pathlib.Path:
    """The student's plug-in. Throws WrongTable, and DoesNotBuild of grading.build."""
    source = student.file
    if student.language == "python":
        try:
            table = runpy.run_path(str(student.file))["STRATEGIES"]
        except Exception as error:  # noqa: BLE001  (whatever the student's file raises)
            raise WrongTable(f"{student.file.name} has no table STRATEGIES: {type(error).__name__}: {error}") from None
        source = folder / "table.cpp"
        source.write_text(plugin_source(table))
    target = folder / "student.so"
    Builder(student.build).module(source, target)
    return target


def compare(worlds, plugin: pathlib.Path, names: tuple[str, ...]) -> tuple[dict[str, dict], str]:
    """The runs by strategy, and why there are none."""
    out = worlds.folder / "compare.json"
    out.unlink(missing_ok=True)
    strategies = ",".join(["hsdp", *(f"{plugin}:{name}" for name in names)])
    code, text = run_limited([str(worlds.tool), "compare", "--model", "gpt-nano", "--ranks", str(RANKS), "--mesh", "2x2", "--steps",
                              str(STEPS), "--strategies", strategies, "--json", str(out)], worlds.limit)
    if code != 0 or not out.exists():
        lines = text.strip().splitlines() or ["no output"]
        reason = "it did not end in time" if code is None else lines[-1].replace(f"{plugin}: ", "").replace("tessera: ", "")
        return {}, reason
    runs = json.loads(out.read_text())["runs"]
    return {run["strategy"].rpartition(":")[2]: run for run in runs}, ""


def with_hint(problems: list[str], name: str) -> list[str]:
    """The first one says what was wished."""
    return [f"{problem} ({HINTS[name]})" if index == 0 else problem for index, problem in enumerate(problems)]


def memory_problems(name: str, run: dict) -> list[str]:
    *shares, state = MEMORY[name]
    problems = []
    for kind, share, each in zip(KINDS, shares, (4, 4, state)):
        want, got = PARAMETERS * each // share, run["model_state_bytes"][kind]
        if got != want:
            problems.append(f"{name}: a rank keeps {got:,} bytes of {kind} state, should be {want:,}: {each} bytes a parameter, divided by "
                            f"{share} rank{'s' if share > 1 else ''}")
    return with_hint(problems, name)


def traffic_problems(name: str, run: dict) -> list[str]:
    problems = []
    for kind, (calls, sent) in TRAFFIC[name].items():
        got = run["calls_per_step"][kind], run["wire_bytes_per_step"][kind]
        if got != (calls, sent):
            problems.append(f"{name}: {got[0]} calls of {kind} and {got[1]:,} bytes a step, should be {calls} and {sent:,}")
    return with_hint(problems, name)


def bits_problems(name: str, run: dict, reference: dict) -> list[str]:
    equal = run["final_parameters_hash"] == reference["final_parameters_hash"]
    if name == "seldom":
        return [f"{name}: it ends with the parameters of hsdp: the hosts still exchange gradients in each step"] if equal else []
    return [] if equal else [f"{name}: it does not end with the parameters of hsdp: {HINTS[name]}"]


def grade(student, worlds, report) -> None:
    names = tuple(MEMORY)
    try:
        plugin = plugin_of(student, worlds.folder)
    except WrongTable as error:
        report.test("the table is read", POINTS, [str(error)])
        return
    runs, reason = compare(worlds, plugin, names)
    reasons = {}
    if reason:  # which of them is refused?
        for name in names:
            one, reasons[name] = compare(worlds, plugin, (name,))
            runs.update(one)
    for name in names:
        refused = [f"{name}: refused: {reasons[name]}"] if reasons.get(name) else []
        run = runs.get(name, {})
        memory = refused or memory_problems(name, run)
        report.test(f"{name}: memory", 1, memory)
        report.test(f"{name}: calls and bytes", 1, refused or traffic_problems(name, run))
        result = refused or memory or bits_problems(name, run, runs["hsdp"])
        report.test(f"{name}: the result", 1, result)
