"""MPI in programs that also use it themselves, with and without its launchers: which side initializes and finalizes it,
and the messages.

    mpi_test.py VARIANT PROGRAM MPIRUN...     VARIANT is openmpi or mpich; PROGRAM is mpi_program, linked with that MPI
"""

import os
import signal
import subprocess
import sys
import time

from ranks import KEEP_GOING, pid_of

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "harness"))
from processes import end_with_parent  # noqa: E402

VARIANT, PROGRAM, *MPIRUN = sys.argv[1:]
NAME = {"openmpi": "Open MPI", "mpich": "MPICH"}[VARIANT]
ENVIRONMENT = dict(os.environ, TESSERA_BACKEND="mpi", TESSERA_TIMEOUT="20s")


def run(command, patience=60, **changes):
    done = subprocess.run(command, env=dict(ENVIRONMENT, **changes), capture_output=True, text=True, timeout=patience,
                          preexec_fn=end_with_parent)
    return done.returncode, done.stdout + done.stderr


def under_mpirun(mode, *options, ranks=3):
    return run([*MPIRUN, *options, "-n", str(ranks), PROGRAM, mode])


def expect(code, output, wanted_code, *texts):
    assert (code == 0) == (wanted_code == 0), (code, output)
    for text in texts:
        assert text in output, (text, output)


def stopped_rank(program):
    """After the timeout the error names the stopped rank; neither MPI nor its finalization at exit blocks others."""
    marker = str(os.getpid())
    env = dict(ENVIRONMENT, TEST_MARKER=marker, TESSERA_TIMEOUT="3s")
    ranks = subprocess.Popen([*MPIRUN, "-n", "3", program, "forever"], env=env, stdout=subprocess.PIPE, text=True,
                             stderr=subprocess.DEVNULL, preexec_fn=end_with_parent)
    try:
        said = ""
        while said.count("ready") < 3:  # MPICH may join lines of different ranks
            line = ranks.stdout.readline()
            assert "ready" in line or line == "\n", line
            said += line
        os.kill(pid_of(VARIANT, marker, 1), signal.SIGSTOP)
        begin = time.monotonic()
        said = ranks.stdout.readline() or ""
        while said == "\n":
            said = ranks.stdout.readline()
        assert said.startswith("Timeout: ") and "rank 1" in said, said
        print(f"stopped rank named after {time.monotonic() - begin:.1f} s")
        ranks.communicate(timeout=20)
        assert ranks.returncode != 0
    finally:
        ranks.kill()
        ranks.communicate()


def out_of_communicators():
    """Without communicators left, MPI behaves in its own way; the library reports one line on every rank at once."""
    for mode in {"openmpi": ["exhausted", "exhausted-split"], "mpich": ["exhausted", "exhausted-one"]}[VARIANT]:
        begin = time.monotonic()
        _, output = under_mpirun(mode, ranks=2)  # Open MPI's launcher fails because no rank finalizes MPI
        assert output.count("all right") == 2, (mode, output)
        assert time.monotonic() - begin < 10, mode


def programs_of_every_backend(program):
    """The launcher takes a rank that exits without MPI_Finalize for a failed one, whoever owns its communicators."""
    for mode in ("abandon", "fork", "signal"):
        code, output = run([*MPIRUN, "-n", "2", program, mode])
        assert (code, output.count("right")) == (0, 2), (mode, code, output)


def main():
    out_of_communicators()
    programs_of_every_backend(os.environ["TESSERA_RANK_PROGRAM"])
    expect(*under_mpirun("once"), 0, "all right")
    expect(*under_mpirun("twice"), 0, "all right")
    expect(*under_mpirun("recovers"), 0, "all right")
    expect(*under_mpirun("multiple"), 0, "all right")
    expect(*under_mpirun("single"), 1, "InvalidUsage", "MPI_THREAD_SINGLE", "MPI_THREAD_MULTIPLE")
    expect(*under_mpirun("finalized"), 1, "InvalidUsage", "has been finalized")
    expect(*under_mpirun("once", ranks=1), 0, "all right")
    expect(*run([PROGRAM, "once"]), 0, "all right")  # alone, without a launcher
    expect(*run([PROGRAM, "threads"]), 1, "InvalidUsage", "threads")
    code, output = under_mpirun("refuses", *KEEP_GOING[VARIANT])
    assert "BackendError: mpi: no new communicator in this process" in output, output

    # Two ranks that torchrun starts: MPI does not know them.
    torchrun = [dict(RANK=str(r), WORLD_SIZE="2", LOCAL_RANK=str(r), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                     MASTER_PORT="29511", TORCHELASTIC_RUN_ID=f"mpi-{os.getpid()}") for r in range(2)]
    # Two launchers of one rank each: MPI's world is smaller than ours, as under a bare srun.
    alone = [dict(TESSERA_RANK=str(r), TESSERA_WORLD_SIZE="2", TESSERA_RUN_ID=f"mpi-{os.getpid()}") for r in range(2)]
    for places, prefix, texts in [(torchrun, [], ("'torchrun'", NAME, "mpirun")),
                                  (alone, [*MPIRUN, "-n", "1"], ("has 1 ranks, this one has 2", "'tessera'", NAME))]:
        ranks = [subprocess.Popen([*prefix, PROGRAM, "once"], env=dict(ENVIRONMENT, **place), text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for place in places]
        for rank in ranks:
            output, _ = rank.communicate(timeout=60)
            expect(rank.returncode, output, 1, "InvalidUsage", *texts)
    stopped_rank(os.environ["TESSERA_RANK_PROGRAM"])
    print("all right")


main()
