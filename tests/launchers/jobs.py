"""Runs the tool under launchers: their commands, the environment of their ranks, and results."""

import collections
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

TOOL = os.environ["TESSERA_TOOL"]
RANKS = 4
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 200

Ended = collections.namedtuple("Ended", "code out err seconds")

FOREIGN = ("TESSERA_", "OMPI_", "PMIX_", "PMI_", "PALS_", "MPI_LOCAL", "MV2_", "SLURM_", "TORCHELASTIC_")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**changes):
    """The current environment without the variables of a launcher around the test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN) and name not in TORCHRUN}
    kept.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", TESSERA_TIMEOUT="20s")
    kept.update({name: str(value) for name, value in changes.items()})
    return kept


def program(name):
    found = shutil.which(name)
    if found is None:
        raise AssertionError(f"{name} is not installed: scripts/setup --tests does that")
    return found


def start(command, env=None):
    """Starts the command in its own session, so that all its processes can be ended."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=env or environment(), start_new_session=True)


def end(process):
    """Kills the process and its children, and returns what they printed."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return process.communicate()


def finish(process, seconds=180):
    begin = time.monotonic()
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{process.args} did not end within {seconds} s: {end(process)}") from None
    return Ended(process.returncode, out, err, time.monotonic() - begin)


def run(command, env=None, seconds=180):
    return finish(start(command, env), seconds)


def wait(ready, seconds):
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.05)


class Job:
    """Started processes: one launcher, or individual ranks."""

    def __init__(self, processes, beside=None):
        self.processes = processes
        self.beside = beside  # closed with the job

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.returncode is None:
                end(process)
        if self.beside is not None:
            self.beside.close()

    def finish(self, seconds=180):
        """The exit code of the largest magnitude; outputs and errors concatenated."""
        begin = time.monotonic()
        with self:
            ended = [finish(process, max(0.1, begin + seconds - time.monotonic())) for process in self.processes]
        return Ended(max((one.code for one in ended), key=abs), "".join(one.out for one in ended), "".join(one.err for one in ended),
                     time.monotonic() - begin)


def start_each(command, places, beside=None):
    """One process per place; a place is the environment of a rank."""
    return Job([start(command, environment(**place)) for place in places], beside)


class Plain:
    """The tool itself starts the ranks."""

    def start(self, command, **env):
        return Job([start([*command, "--ranks", str(RANKS)], environment(**env))])


class Mpirun:
    OPTIONS = {"openmpi": ["--oversubscribe", "--bind-to", "none"], "mpich": []}

    def __init__(self, kind, ranks=RANKS):
        self.prefix = [program(f"mpirun.{kind}"), *self.OPTIONS[kind], "-n", str(ranks)]

    def start(self, command, **env):
        return Job([start([*self.prefix, *command], environment(**env))])


class Torchrun:
    """Sets the variables of torchrun. Rank 0 must not use MASTER_PORT: the port is in use, as by torchrun's own agent."""

    def __init__(self, restart=0):
        self.restart = restart

    def start(self, command, **env):
        agent = socket.create_server(("127.0.0.1", 0))
        common = dict(WORLD_SIZE=RANKS, LOCAL_WORLD_SIZE=RANKS, MASTER_ADDR="127.0.0.1", MASTER_PORT=agent.getsockname()[1],
                      TORCHELASTIC_RUN_ID=f"test-{os.getpid()}", TORCHELASTIC_RESTART_COUNT=self.restart, **env)
        return start_each(command, [dict(common, RANK=r, LOCAL_RANK=r) for r in range(RANKS)], agent)


def pids_by_rank(mark):
    """The live ranks with MARK=mark in their environment, regardless of their launcher."""
    names = (b"TESSERA_RANK", b"RANK", b"OMPI_COMM_WORLD_RANK", b"PMI_RANK", b"SLURM_PROCID")
    places = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                found = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
            if found.get(b"MARK") != mark.encode() or os.readlink(f"/proc/{pid}/exe") != os.path.realpath(TOOL):
                continue
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                parent = int(file.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        places.update({int(pid): (int(found[name]), parent) for name in names if found.get(name)})
    # A rank's child that has not yet called exec looks like the rank.
    return {rank: pid for pid, (rank, parent) in places.items() if places.get(parent, (None,))[0] != rank}


def last_words(err):
    """The tool's own lines, without those of a launcher."""
    return [line for line in err.splitlines() if line.startswith("tessera: ")]


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tessera-test-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.text = self.path("text.txt")
        with open(self.text, "w", encoding="ascii") as file:
            file.write(TEXT)

    def path(self, name):
        return os.path.join(self.folder, name)

    def mark(self):
        return f"{os.getpid()}-{time.monotonic_ns()}"

    def training(self, subcommand, *arguments, model="gpt-nano", steps=3):
        return [TOOL, subcommand, "--model", model, "--steps", str(steps), "--data", self.text, "--threads", "1",
                *map(str, arguments)]

    def read_json(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            content = json.load(file)
        os.unlink(self.path(name))
        return content

    def assert_good(self, ended):
        self.assertEqual(ended.code, 0, (ended.out, ended.err))
        self.assertEqual(last_words(ended.err), [])

    def assert_nobody_is_left(self, mark, seconds=30):
        deadline = time.monotonic() + seconds
        while pids_by_rank(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual(pids_by_rank(mark), {})


def main():
    """Exits with code 77, which CTest counts as skipped, only if all tests were skipped."""
    outcome = unittest.main(exit=False).result
    if not outcome.wasSuccessful():
        raise SystemExit(1)
    raise SystemExit(77 if outcome.skipped and len(outcome.skipped) == outcome.testsRun else 0)
