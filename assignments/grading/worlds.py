"""Runs a program as the ranks of a world, and collects the facts that the ranks write."""

from __future__ import annotations

import array
import dataclasses
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from typing import Any

# Bytes are those of the `direct` algorithms, for every size and backend.
ALGORITHMS = "all_reduce=direct,reduce_scatter=direct"
MOST_OUTPUT = 1 << 20  # bytes of a program's output that are kept


@dataclasses.dataclass
class World:
    """What one run of a program left."""

    launch: list[str]  # the command that starts ranks
    program: list[str]  # of one rank, without its cases
    backend: str
    folder: pathlib.Path
    facts: list[dict[str, Any]]  # of all ranks and cases
    exit_code: int | None  # None: it did not end in time
    output: str
    seconds: float

    def case(self, name: str) -> list[dict[str, Any]]:
        """The facts of a case by rank; ranks that did not report it are missing."""
        return sorted((fact for fact in self.facts if fact["case"] == name and fact["status"] != "began"), key=lambda fact: fact["rank"])

    def floats(self, fact: dict[str, Any], key: str = "output") -> array.array:
        """An array of f32 that a rank wrote beside a fact."""
        values = array.array("f")
        values.frombytes((self.folder / fact[key]).read_bytes())
        return values

    def open_facts(self) -> list[dict[str, Any]]:
        """Of the case in which the program ended, the facts of the ranks that had not returned; [] if it ended between cases."""
        ended = {(fact["case"], fact["rank"]) for fact in self.facts if fact["status"] != "began" and fact.get("kind") != "exit"}
        begun = [fact for fact in self.facts if fact["status"] == "began" and (fact["case"], fact["rank"]) not in ended]
        return sorted((fact for fact in begun if fact["case"] == begun[0]["case"]), key=lambda fact: fact["rank"])

    def death(self) -> str:
        """Why no facts came, in a line; "" if the program ended well."""
        if self.exit_code == 0:
            return ""
        begun = self.open_facts()
        where = f", in the case '{begun[0]['says']}'" if begun else ""
        if self.exit_code is None:
            late = f" ({name_ranks([fact['rank'] for fact in begun])} had not returned)" if begun else ""
            return f"the program did not end within {self.seconds:.0f} s and was stopped{where}{late}: it hangs outside of the library"
        left = [fact for fact in self.facts if fact.get("kind") == "exit"]
        if left:
            return f"{left[0]['says']}: rank {left[0]['rank']}: {left[0]['error']}"
        lines = [printable(line)[:200] for line in self.output.splitlines() if line.strip()]
        lines = [line for line in lines if not re.search(r"rank \d+ (died|aborted)", line)] or lines  # said by those that saw it
        errors = [line for line in lines if re.search(r"[Ee]rror|terminate|what\(\)|[Aa]ssert|corrupt|free\(\)", line)]
        own, of_tool = ([line for line in chosen if line.startswith("tessera:") == tools] for chosen, tools in ((errors, False), (lines, True)))
        said = own[-1:] + of_tool[-1:] or lines[-1:] or ["no output"]
        return f"the program ended with exit code {self.exit_code}{where}: {'; '.join(said)}"

    def alone(self) -> str:
        """The command that runs the case in which the program ended, and no other; "" if there is none."""
        begun = self.open_facts() if self.exit_code != 0 else []
        if not begun:
            return ""
        return f"TESSERA_BACKEND={self.backend} {shlex.join([*self.launch, '-n', str(begun[0]['ranks']), '--', *self.program, begun[0]['part']])}"

    def problems(self, name: str, ranks: int) -> list[str]:
        """Why case `name` of `ranks` ranks has no result: errors of the student's code, or ranks that died."""
        facts = self.case(name)
        found = [f"{fact['says']}: rank {fact['rank']}: {fact['error']}" for fact in facts if fact["status"] == "error"]
        missing = sorted(set(range(ranks)) - {fact["rank"] for fact in facts})
        if missing:
            found.append(self.death() or f"case {name}: no result of {name_ranks(missing)}: not run, because an earlier case timed out")
        return prefer_causes(found)


def name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def printable(text: str) -> str:
    """Without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


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
        self.alone = ""  # how to run alone what ended badly first

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
        launch = [str(self.tool), "run"]
        code, output = run_limited([*launch, "-n", str(ranks), "--", *command, *arguments], self.limit, environment)
        if code is None:  # a program that hangs will hang again
            self.limit = min(self.limit, 10)
        world = World(launch, command, backend, folder, read_facts(folder), code, output, time.monotonic() - begin)
        self.alone = self.alone or world.alone()
        return world


def run_limited(command: list[str], limit: float, environment: dict[str, str] | None = None) -> tuple[int | None, str]:
    """Exit code and the end of the output; code None: stopped after `limit` seconds, with all its processes."""
    end = bytearray()  # a program may print without end
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, bufsize=0,
                          start_new_session=True) as process:
        def read() -> None:
            while chunk := process.stdout.read(65536):
                end.extend(chunk)
                del end[:-MOST_OUTPUT]

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        code: int | None = None
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            reader.join(timeout=5)  # a process that it left behind may keep the pipe open
    return code, bytes(end).decode(errors="replace")


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
