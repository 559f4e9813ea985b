"""Ranks that die or stop while MPI runs a collective: the others report it in time, and their memory stays unchanged.

    native_failures_test.py VARIANT PROGRAM MPIRUN...     VARIANT is openmpi or mpich; PROGRAM is mpi_native
"""

import os
import re
import signal
import subprocess
import sys
import time

from ranks import KEEP_GOING, pid_of

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "harness"))
from processes import end_with_parent  # noqa: E402

VARIANT, PROGRAM, *MPIRUN = sys.argv[1:]
RANKS = 3
# MPICH's launcher ends the other ranks after one was killed, whatever its options, but not after one exits.
DEATH = {"openmpi": signal.SIGKILL, "mpich": signal.SIGUSR2}[VARIANT]


def fail_mid_way(victim, sent, timeout, mode="failing"):
    """Sends the signal to `victim` during sums; returns the ranks' output and the seconds until the first error."""
    marker = f"{os.getpid()}.{sent.name}.{mode}"
    # Without CMA: UCX, which MPICH uses, ends a process that reads the memory of one that has just died.
    env = dict(os.environ, TESSERA_BACKEND="mpi", TEST_MARKER=marker, TESSERA_TIMEOUT=timeout, UCX_TLS="^cma")
    ranks = subprocess.Popen([*MPIRUN, *KEEP_GOING[VARIANT], "-n", str(RANKS), PROGRAM, mode], env=env, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent)
    said = ""
    try:
        while said.count("ready") < RANKS:
            said += ranks.stdout.readline()
        time.sleep(0.3)
        pid = pid_of(VARIANT, marker, victim)
        begin = time.monotonic()
        os.kill(pid, sent)
        while said.count("Timeout: ") + said.count("PeerLost: ") == 0:
            line = ranks.stdout.readline()
            assert line, said
            said += line
        took = time.monotonic() - begin
        if sent == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        wanted = RANKS if sent == signal.SIGSTOP else RANKS - 1
        while said.count("untouched") + said.count("written") < wanted:
            line = ranks.stdout.readline()
            assert line, said
            said += line
        return said, took
    finally:
        ranks.kill()
        ranks.communicate()


def stopped(victim):
    """The error that names a stopped rank; another one may be an operation behind, because it waits for that rank."""
    return rf"Timeout: all_reduce #\d+: not done within 3s; (?:rank \d is behind at operation #\d+; )?rank {victim} is not responding"


def expect(said, count, pattern):
    found = re.findall(pattern, said)
    assert len(found) >= count, (count, pattern, said)


def main():
    for victim in (0, 1):
        said, took = fail_mid_way(victim, signal.SIGSTOP, "3s")
        expect(said, 1, stopped(victim))
        expect(said, RANKS - 1, r"other: (BackendError: mpi: an operation failed in MPI|Timeout: |PeerLost: )")
        expect(said, RANKS, "untouched")
        assert took < 6, took
        print(f"rank {victim} stopped: named after {took:.1f} s")

        said, took = fail_mid_way(victim, DEATH, "30s")
        expect(said, RANKS - 1, rf"(?m)PeerLost: all_reduce #\d+: rank {victim} died")
        expect(said, RANKS - 1, "untouched")
        assert took < 5, took
        print(f"rank {victim} dead: named after {took:.2f} s")
    # Negative control: if MPI continues canceled operations, the same check of the buffers detects it.
    for _ in range(4):  # a rank may have been stopped while none of its data was in flight to the others
        said, _ = fail_mid_way(1, signal.SIGSTOP, "3s", "unstopped")
        expect(said, 1, stopped(1))
        if said.count("written") >= RANKS:
            break
    expect(said, RANKS, "written")
    print("MPI goes on: " + ", ".join(re.findall("untouched|written", said)))
    print("all right")


main()
