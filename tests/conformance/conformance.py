#!/usr/bin/env python3
"""Runs the conformance suite over backends, with ranks as processes, and prints a table: backend x what was checked.

    conformance.py BUILD [--backends shm,tcp,ucx,mpi-openmpi,mpi-mpich] [--ranks 8] [--full | --huge] [--json FILE]
                         [--device ipc|staged] [--hosts N]

A cell is the number of cases, or what was wrong of how many. The worlds of 1, 2, 3, 4, 5 and 8 ranks are cut from the one
that is started; a plug-in's backend runs by its name, with TESSERA_PLUGIN_PATH set. --full: the whole matrix instead of a
seeded part; --huge: in its place one case beyond 2^31 bytes for each operation, on 2 ranks (10 GiB of memory).
--device: a part of it in memory of a device that only its streams can touch, by IPC or through the host's. --hosts: as if the ranks were
on so many hosts. Ends with 1 where a cell is wrong or empty.
"""

import argparse
import json
import os
import pathlib
import secrets
import socket
import subprocess
import sys

LAUNCHERS = {  # backends whose ranks the launcher of an MPI library must start
    "mpi-openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"],
    "mpi-mpich": ["mpirun.mpich", "-n"],
}


def run(build, backend, arguments):
    """Returns rank 0's output lines by subject, and the error, if any."""
    program = [str(build / "tests/conformance_ranks")] + ["full"] * arguments.full + ["huge"] * arguments.huge + [arguments.device] * bool(arguments.device)
    launcher = LAUNCHERS.get(backend, [str(build / "tessera"), "run", "--no-tag", "-n"])
    # Ranks outside a small world wait until it has run its whole matrix.
    environment = dict(os.environ, TESSERA_BACKEND=backend.partition("-")[0], TESSERA_TIMEOUT="6h" if arguments.full else "2m")
    if arguments.hosts > 1:
        program = ["sh", "-c", f'export TESSERA_HOST_ID=host$((TESSERA_RANK * {arguments.hosts} / {arguments.ranks})); exec "$@"', "rank", *program]
        with socket.create_server(("127.0.0.1", 0)) as free:
            environment.update(TESSERA_MASTER=f"127.0.0.1:{free.getsockname()[1]}", TESSERA_TOKEN=secrets.token_hex(16))
    if arguments.device:
        environment.update(TESSERA_DEVICE_IPC=str(int(arguments.device == "ipc")))
    try:
        done = subprocess.run(launcher + [str(arguments.ranks), *(["--"] if backend not in LAUNCHERS else []), *program],
                              env=environment, text=True, capture_output=True, timeout=arguments.limit, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"not done within {arguments.limit} s"
    cells = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            cell = json.loads(line)
            cells[cell["what"]] = cell
    problem = ""
    if done.returncode != 0:
        problem = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
    return cells, problem


def print_table(results):
    columns = list(dict.fromkeys(what for cells, _ in results.values() for what in cells))
    widths = [max(len(c), 9) for c in columns]
    print("  ".join([f"{'backend':12}"] + [f"{c:>{w}}" for c, w in zip(columns, widths)]))
    for backend, (cells, _) in results.items():
        texts = []
        for column in columns:
            cell = cells.get(column)
            texts.append("-" if cell is None else
                         str(cell["cases"]) if cell["wrong"] == 0 else f"{cell['wrong']}/{cell['cases']} BAD")
        print("  ".join([f"{backend:12}"] + [f"{t:>{w}}" for t, w in zip(texts, widths)]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--backends", default="shm,tcp,ucx,mpi-openmpi,mpi-mpich")
    parser.add_argument("--ranks", type=int, default=0, help="default: 8, with --huge 2")
    parser.add_argument("--device", choices=["ipc", "staged"])
    parser.add_argument("--hosts", type=int, default=1)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true")
    size.add_argument("--huge", action="store_true")
    parser.add_argument("--limit", type=int, default=0, help="seconds for one backend (default: 280, with --full a day)")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.ranks = arguments.ranks or (2 if arguments.huge else 8)
    arguments.limit = arguments.limit or (86400 if arguments.full else 280)
    arguments.build = arguments.build.resolve()

    results = {}
    for backend in arguments.backends.split(","):
        print(f"conformance: {backend}, {arguments.ranks} ranks", file=sys.stderr, flush=True)
        results[backend] = run(arguments.build, backend, arguments)
    print_table(results)
    columns = {what for cells, _ in results.values() for what in cells}
    good = bool(columns)
    for backend, (cells, problem) in results.items():
        if problem or set(cells) != columns or any(c["wrong"] for c in cells.values()):
            good = False
            print(f"{backend}: {problem or 'cells are missing or wrong'}")
    if arguments.json:
        arguments.json.write_text(json.dumps({b: {"cells": list(c.values()), "problem": p} for b, (c, p) in results.items()},
                                             indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
