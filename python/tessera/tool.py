"""The tool's measurements as functions: they run `tessera`, and return what its JSON files hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from typing import Any, Optional

__all__ = ["ToolError", "bench", "compare", "plan"]


class ToolError(RuntimeError):
    """The tool is missing, or has refused its options; its message says why."""


def _executable() -> str:
    named = os.environ.get("TESSERA_TOOL")
    found = shutil.which(named or "tessera")
    if found is None:
        where = f"TESSERA_TOOL is {named}, which can't be run" if named else "no `tessera` is on the PATH"
        raise ToolError(f"{where}; build it with scripts/setup, then set TESSERA_TOOL to build/release/tessera")
    return found


def _words(options: dict[str, Any]) -> list[str]:
    """`max_bytes="4M", strategies=["ddp", "fsdp"], check=True` as --max-bytes 4M --strategies ddp,fsdp --check."""
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append("--" + name.rstrip("_").replace("_", "-"))
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
    return words


def _run(command: str, words: list[str], timeout: Optional[float]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "result.json")
        line = [_executable(), command, *words, "--json", file]
        try:
            done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=timeout)
        except subprocess.TimeoutExpired as late:
            raise ToolError(f"tessera {command} has not ended within {timeout} s") from late
        if not os.path.exists(file):
            raise ToolError(done.stderr.strip() or f"tessera {command} has ended with {done.returncode}")
        with open(file, encoding="utf-8") as stream:
            result = json.load(stream)
        if done.returncode != 0:
            raise ToolError(done.stderr.strip() or done.stdout.strip().splitlines()[-1])
        return result


def bench(*operations: str, timeout: Optional[float] = None, **options: Any) -> Any:
    """`tessera bench`: bench("all_reduce", backends=["shm", "tcp"], ranks=2, max_bytes="1M")."""
    return _run("bench", [*([",".join(operations)] if operations else []), *_words(options)], timeout)


def compare(timeout: Optional[float] = None, **options: Any) -> Any:
    """`tessera compare`: compare(model="gpt-nano", ranks=4, steps=3, strategies=["ddp", "fsdp"])."""
    return _run("compare", _words(options), timeout)


def plan(timeout: Optional[float] = None, **options: Any) -> Any:
    """`tessera plan`: plan(model="gpt2", ranks=8, cluster="a100-200g", strategies=["ddp", "fsdp"])."""
    return _run("plan", _words(options), timeout)
