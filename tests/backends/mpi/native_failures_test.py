"""Ranks that die or stop while MPI carries out a collective: the others say so in time, and their memory stays as it is.

    native_failures_test.py VARIANT PROGRAM MPIRUN...     VARIANT is openmpi or mpich; PROGRAM is mpi_native
"""

import os
import re
import signal
import subprocess
import sys
import time

VARIANT, PROGRAM, *MPIRUN = sys.argv[1:]
RANKS = 3
# The launcher is not to end the ranks that are left.
KEEP_GOING = {"openmpi": ["--mca", "orte_abort_on_non_zero_status", "0", "--enable-recovery"],
              "mpich": ["-disable-auto-cleanup"]}[VARIANT]
# MPICH's launcher ends the others after a rank was killed, whatever it was told, but not where one just goes.
DEATH = {"openmpi": signal.SIGKILL, "mpich": signal.SIGUSR2}[VARIANT]


def pid_of(marker, rank):
    wanted = {b"TEST_MARKER=" + marker, (b"OMPI_COMM_WORLD_RANK=%d" if VARIANT == "openmpi" else b"PMI_RANK=%d") % rank}
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                if wanted <= set(file.read().split(b"\0")):
                    return int(process)
        except OSError:
            pass
    raise AssertionError(f"no rank {rank}")


def fail_mid_way(victim, sent, timeout):
    """What the ranks printed, where `victim` gets the signal while sums are under way; seconds until the first error."""
    marker = b"%d.%s" % (os.getpid(), sent.name.encode())
    # Without CMA: UCX, on which MPICH stands, ends a process that reads the memory of one that has just died.
    env = dict(os.environ, TESSERA_BACKEND="mpi", TEST_MARKER=marker.decode(), TESSERA_TIMEOUT=timeout, UCX_TLS="^cma")
    ranks = subprocess.Popen([*MPIRUN, *KEEP_GOING, "-n", str(RANKS), PROGRAM, "failing"], env=env, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    said = ""
    try:
        while said.count("ready") < RANKS:
            said += ranks.stdout.readline()
        time.sleep(0.3)
        pid = pid_of(marker, victim)
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


def expect(said, count, pattern):
    found = re.findall(pattern, said)
    assert len(found) >= count, (count, pattern, said)


def main():
    for victim in (0, 1):
        said, took = fail_mid_way(victim, signal.SIGSTOP, "3s")
        expect(said, 1, rf"Timeout: all_reduce #\d+: not done within 3s; rank {victim} is not responding")
        expect(said, RANKS - 1, r"other: (BackendError: mpi: an operation failed while MPI was carrying it out|Timeout: |PeerLost: )")
        expect(said, RANKS, "untouched")
        assert took < 6, took
        print(f"rank {victim} stopped: named after {took:.1f} s")

        said, took = fail_mid_way(victim, DEATH, "30s")
        expect(said, RANKS - 1, rf"(?m)PeerLost: all_reduce #\d+: rank {victim} died")
        expect(said, RANKS - 1, "untouched")
        assert took < 5, took
        print(f"rank {victim} dead: named after {took:.2f} s")
    print("all right")


main()
