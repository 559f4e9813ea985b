"""Starts the ranks of a run on this host and waits for them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from typing import Optional

_POLL_SECONDS = 0.05
_LINES_OF_LOG = 15


class RunError(Exception):
    """A run that failed."""


def _free_port() -> int:
    """One that nothing uses, below those that the kernel gives to connections, one of which could take it meanwhile."""
    for port in random.sample(range(10000, 32000), 100):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise RunError("no port of 100 between 10,000 and 32,000 is free")


def _kill(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # with the workers of its data loaders
            except ProcessLookupError:
                pass
    for process in processes:
        process.wait()


def _tail(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return "".join(f"  | {line.rstrip()}\n" for line in file.readlines()[-_LINES_OF_LOG:])
    except OSError:
        return ""


def run_ranks(
    directory: str,
    command: list[str],
    ranks: int,
    environment: dict[str, str],
    keep_values: int = 0,
    timeout: Optional[float] = None,
    logs: bool = True,
) -> None:
    """Runs a script as `ranks` processes that record themselves into `directory`. Raises RunError if one fails.

    With `logs` the output of each rank goes to a file beside its record, else to that of this process.
    """
    os.makedirs(directory, exist_ok=True)
    for name in os.listdir(directory):
        if name.startswith("rank") and name.endswith((".jsonl", ".log")):
            os.remove(os.path.join(directory, name))
    port = str(_free_port())
    processes: list[subprocess.Popen] = []
    files = []
    try:
        for rank in range(ranks):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **environment,
            }
            if ranks > 1:
                variables.setdefault("OMP_NUM_THREADS", "1")
            output = None
            if logs:
                output = open(os.path.join(directory, f"rank{rank}.log"), "wb")
                files.append(output)
            recording = [sys.executable, "-m", "tessera.oracle", "record", "-o", directory]
            recording += ["--keep-values", str(keep_values), "--in-place", "--", *command]
            processes.append(
                subprocess.Popen(recording, env=variables, stdout=output, stderr=output, start_new_session=True)
            )
        _wait(processes, directory, timeout, logs)
    finally:
        _kill(processes)
        for file in files:
            file.close()


def _wait(processes: list[subprocess.Popen], directory: str, timeout: Optional[float], logs: bool) -> None:
    deadline = time.monotonic() + timeout if timeout else None
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                how = f"ended with code {code}" if code > 0 else f"was killed by signal {-code}"
                log = _tail(os.path.join(directory, f"rank{rank}.log")) if logs else ""
                raise RunError(
                    f"run: rank {rank} of {directory} {how}" + (f"; the end of its output:\n{log}" if log else "")
                )
        if all(code == 0 for code in codes):
            return
        if deadline is not None and time.monotonic() > deadline:
            left = [rank for rank, code in enumerate(codes) if code is None]
            raise RunError(f"run: ranks {left} of {directory} did not end within {timeout:g} s; use a longer --timeout")
        time.sleep(_POLL_SECONDS)
