"""Runs a program as the ranks of a world, and collects the facts that the ranks write."""

from __future__ import annotations

import array
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
from typing import Any

# Bytes are those of the `direct` algorithms, for every size and backend.
ALGORITHMS = "all_reduce=direct,reduce_scatter=direct"


@dataclasses.dataclass
class World:
    """What one run of a program left."""

    backend: str
    ranks: int
    folder: pathlib.Path
    facts: list[dict[str, Any]]  # of all ranks and cases
    exit_code: int | None  # None: it did not end in time
    output: str
    seconds: float

    def case(self, name: str) -> list[dict[str, Any]]:
        """The facts of a case by rank; ranks that did not report it are missing."""
        return sorted((fact for fact in self.facts if fact["case"] == name), key=lambda fact: fact["rank"])

    def floats(self, fact: dict[str, Any], key: str = "output") -> array.array:
        """An array of f32 that a rank wrote beside a fact."""
        values = array.array("f")
        values.frombytes((self.folder / fact[key]).read_bytes())
        return values

    def death(self) -> str:
        """Why no facts came, in a line; "" if the program ended well."""
        if self.exit_code is None:
            return f"the program did not end within {self.seconds:.0f} s and was stopped: it hangs outside of the library"
        if self.exit_code == 0:
            return ""
        lines = [line for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"signal|[Ee]rror|terminate", line)]
        return f"the program ended with exit code {self.exit_code}: {(errors or lines or ['no output'])[-1][:300]}"

    def problems(self, name: str, ranks: int) -> list[str]:
        """Why case `name` of `ranks` ranks has no result: errors of the student's code, or ranks that died."""
        facts = self.case(name)
        if not self.facts:
            return [self.death() or "the program ended without a result"]
        found = []
        for fact in facts:
            if fact["status"] == "error":
                found.append(f"{fact['says']}: rank {fact['rank']}: {fact['error']}")
        if len(facts) < ranks:
            missing = sorted(set(range(ranks)) - {fact["rank"] for fact in facts})
            started = "not run, because an earlier case timed out" if not self.death() else self.death()
            found.append(f"case {name}: no result of rank {', '.join(map(str, missing))}: {started}")
        return prefer_causes(found)


def prefer_causes(problems: list[str]) -> list[str]:
    """Errors of ranks that only saw another one fail come last."""
    return sorted(problems, key=lambda text: bool(re.search(r"Aborted|PeerLost|no result of rank", text)))


class Worlds:
    """Starts worlds with `tessera run`; removes what they wrote when it is closed."""

    def __init__(self, tool: pathlib.Path, limit: float, keep: str | None = None):
        self.tool, self.limit = tool, limit
        self._temporary = None if keep else tempfile.TemporaryDirectory(prefix="tessera-grade-")
        self.folder = pathlib.Path(keep or self._temporary.name)
        self.count = 0

    def close(self) -> None:
        if self._temporary:
            self._temporary.cleanup()

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, command: list[str], ranks: int, backend: str = "shm", arguments: tuple[str, ...] = (),
            env: dict[str, str] | None = None) -> World:
        self.count += 1
        folder = self.folder / f"world{self.count}"
        folder.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ, TESSERA_BACKEND=backend, TESSERA_ALGO=ALGORITHMS, TESSERA_TIMEOUT="4s", TESSERA_DETERMINISTIC="1",
                           GRADE_DIR=str(folder), OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1",
                           **(env or {}))
        for inherited in ("TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_RUN_ID", "TESSERA_MASTER"):
            environment.pop(inherited, None)
        begin = time.monotonic()
        code, output = run_limited([str(self.tool), "run", "-n", str(ranks), "--", *command, *arguments], self.limit, environment)
        if code is None:  # a program that hangs will hang again
            self.limit = min(self.limit, 10)
        return World(backend, ranks, folder, read_facts(folder), code, output, time.monotonic() - begin)


def run_limited(command: list[str], limit: float, environment: dict[str, str] | None = None) -> tuple[int | None, str]:
    """Exit code and output; code None: stopped after `limit` seconds, with all its processes."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
                          text=True, errors="replace", start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def read_facts(folder: pathlib.Path) -> list[dict[str, Any]]:
    """All complete lines that ranks wrote; a rank that died may have left part of one."""
    facts = []
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                facts.append(json.loads(line))
            except ValueError:
                continue
    return facts
