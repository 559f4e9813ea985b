"""MPI starts and ends under every launcher and over every transport, many times, without a hang.

TESSERA_ENDINGS=50 repeats each combination 50 times (default 1; 50 takes a quarter of an hour).
"""

import os
import random
import re
import signal
import subprocess
import tempfile
import time
import unittest

import jobs
import slurm

START = 30  # seconds, until a rank must have begun
ROUNDS = int(os.environ.get("TESSERA_ENDINGS", "1"))
TRANSPORTS = {  # settings of the two MPIs; CMA belongs to vader in Open MPI 4, to smsc in 5
    "shared memory": {},
    "shared memory without CMA": {"UCX_TLS": "^cma", "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_smsc": "^cma"},
    # Open MPI 5 leaves lo out by default, and may find no other way between the addresses of one host.
    "tcp": {"UCX_TLS": "tcp,self", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"},
}


class ShutdownTest(jobs.Case):
    def loop(self, launcher, *arguments):
        for name, settings in TRANSPORTS.items():
            slowest = 0
            for _ in range(ROUNDS):
                command = self.training("compare", "--strategies", "fsdp", "--backend", "mpi", *arguments)
                ended = launcher.start(command, **settings).finish(30)
                self.assert_good(ended)
                slowest = max(slowest, ended.seconds)
            print(f"{self.id()}: {name}: {ROUNDS} runs ended well, the slowest after {slowest:.1f} s", flush=True)

    def test_the_tool(self):
        self.loop(jobs.Plain())

    def test_mpich(self):
        self.loop(jobs.Mpirun("mpich"))

    def test_open_mpi(self):
        self.loop(jobs.Mpirun("openmpi"))


class SlurmTest(ShutdownTest):
    test_the_tool = test_mpich = test_open_mpi = None

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="tessera-slurm-")
        cls.addClassCleanup(folder.cleanup)
        cls.cluster = slurm.Slurm(folder.name).start()
        cls.addClassCleanup(cls.cluster.stop)

    def test_srun_with_pmi2(self):
        self.loop(self.cluster.srun("--mpi=pmi2"))

    def test_srun_with_pmix(self):
        self.loop(self.cluster.srun("--mpi=pmix"))


class FinalizeThatHangsTest(jobs.Case):
    """With UCX's original function, the MPI_Finalize of MPICH 4.0 hangs in half of the runs: negative control of the tests
    above, and a test of such a run: it completes its work, warns what it waits for, and ends. MPICH 4.2 ends."""

    @staticmethod
    def mpich_version():
        said = subprocess.run([jobs.program("mpichversion")], capture_output=True, text=True, timeout=60, check=True).stdout
        return tuple(int(number) for number in re.search(r"Version:\s+(\d+)\.(\d+)", said).groups())

    def test_finalize_has_deadline(self):
        for _ in range(20):
            ended = jobs.Plain().start(self.training("compare", "--strategies", "fsdp", "--backend", "mpi"), UCX_TLS="tcp,self",
                                       LD_PRELOAD="libucp.so.0", TESSERA_TIMEOUT="2s").finish(30)
            self.assertIn("ends alone", ended.out)
            self.assertLess(ended.seconds, 10)
            if "MPI_Finalize" in ended.err:
                self.assertRegex(ended.err, r"warning: rank \d: mpi: MPI_Finalize waits for other ranks and has not returned within 2s")
                return
        if self.mpich_version() < (4, 2):
            self.fail("MPICH has ended well 20 times: is what backends/mpi/disconnect.cpp replaces still needed?")


class StoppedRankTest(jobs.Case):
    """A rank that is stopped during start-up is named at the deadline, and no rank waits longer."""

    def stop_one(self, launcher, delay, *arguments):
        mark = self.mark()
        job = launcher.start(self.training("train", "--backend", "mpi", *arguments, steps=100000), MARK=mark, TESSERA_TIMEOUT="2s")
        with job:
            deadline = time.monotonic() + 10
            while len(pids := jobs.pids_by_rank(mark)) < jobs.RANKS and time.monotonic() < deadline:
                pass
            begin = time.monotonic()
            while time.monotonic() < begin + delay:  # the ranks' progress by then is random
                pass
            os.kill(pids[3], signal.SIGSTOP)
            ended = job.finish(20)
        self.assertNotEqual(ended.code, 0)
        self.assertRegex(jobs.last_words(ended.err)[-1], r"rank 3\b", (delay, ended.err))
        self.assert_nobody_is_left(mark)

    def test_under_the_tool(self):
        for delay in (0, 0.03, 0.06, 0.1, 0.15, 0.2):
            self.stop_one(jobs.Plain(), delay)

    def stop_while_training(self, launcher, backend, rank):
        """The seconds from the signal to the end of the job, whose deadline is 3 s."""
        mark = self.mark()
        with launcher.start(self.training("train", "--backend", backend, steps=100000), MARK=mark, TESSERA_TIMEOUT="3s") as job:
            for line in job.processes[0].stdout:
                if line.startswith("step 2 "):
                    break
            os.kill(jobs.pids_by_rank(mark)[rank], signal.SIGSTOP)
            ended = job.finish(40)
        self.assertNotEqual(ended.code, 0)
        self.assertRegex(jobs.last_words(ended.err)[-1], rf"not done within 3s; .*rank {rank} is not responding", (backend, ended.err))
        self.assert_nobody_is_left(mark)
        return ended.seconds

    def ends_soon(self, launcher, backend):
        for rank in (0, 1, jobs.RANKS - 1):
            self.assertLess(self.stop_while_training(launcher, backend, rank), 3 + 5, (backend, rank))

    def test_while_training_over_shm(self):
        self.ends_soon(jobs.Plain(), "shm")

    def test_while_training_over_tcp(self):
        self.ends_soon(jobs.Plain(), "tcp")

    def test_while_training_over_ucx(self):
        self.ends_soon(jobs.Plain(), "ucx")

    def test_while_training_over_mpi(self):
        self.ends_soon(jobs.Plain(), "mpi")

    def test_while_training_under_mpirun(self):
        for kind in jobs.Mpirun.OPTIONS:
            self.ends_soon(jobs.Mpirun(kind), "mpi")


class LateRankTest(jobs.Case):
    """mpirun ends a rank that has just begun because others have failed and said why."""

    RANKS = """
        export OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=late-$$
        for rank in $FAILING; do OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank "$@" --ranks 3 & done
        wait
        OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=3 "$@" &
        sleep 1
        kill -9 $!
        wait"""

    def said(self, failing):
        command = ["sh", "-c", self.RANKS, "sh", *self.training("train", "--backend", "tcp")]
        environment = {name: value for name, value in os.environ.items() if name != "TESSERA_TOOL"} | {"FAILING": failing}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return [line for line in done.stderr.splitlines() if line.startswith("tessera: ")]

    def test_it_is_not_reported_as_dead(self):
        said = self.said("0 1 2")
        self.assertEqual(len(said), 3, said)
        self.assertEqual(set(said), {"tessera: --ranks 3 contradicts openmpi, which started 4 ranks; leave --ranks out"})
        self.assertRegex(self.said("")[-1], r"or rank 3 without an error message$")  # the control: nothing failed before


class KilledRankTest(jobs.Case):
    """The last line names the killed rank, at any time of the kill, also if mpirun starts the ranks."""

    def kill_one(self, launcher, backend, delay, first_step=False):
        mark = self.mark()
        with launcher.start(self.training("train", "--backend", backend, steps=100000), MARK=mark) as job:
            if first_step:
                for line in job.processes[0].stdout:
                    if line.startswith("step 1 "):
                        break
            begin = time.monotonic()
            while time.monotonic() < begin + delay or not (pids := jobs.pids_by_rank(mark)):
                if time.monotonic() > begin + START:
                    self.fail(f"no rank began within {START} s: {job.finish(20).err}")
            rank, pid = random.choice(list(pids.items()))
            os.kill(pid, signal.SIGKILL)
            ended = job.finish(20)
        self.assertNotEqual(ended.code, 0)
        self.assertRegex(jobs.last_words(ended.err)[-1], rf"rank {rank} (was killed|died)", (backend, delay, ended.err))
        self.assertLess(ended.seconds, 5)
        self.assert_nobody_is_left(mark)
        return ended

    def test_at_any_moment(self):
        for backend in ("mpi", "tcp"):
            for _ in range(5 * ROUNDS):
                ended = self.kill_one(jobs.Plain(), backend, random.uniform(0, 0.7))
                self.assertTrue(ended.err.splitlines()[-1].startswith("tessera: "), ended.err)

    def test_under_a_launcher_of_the_users_own(self):
        for kind in ("openmpi", "mpich"):
            for _ in range(2 * ROUNDS):
                self.kill_one(jobs.Mpirun(kind), "mpi", random.uniform(0, 0.3), first_step=True)


if __name__ == "__main__":
    jobs.main()
