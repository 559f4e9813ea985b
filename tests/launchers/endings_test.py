"""MPI starts and ends under every launcher and over every transport, many times, and no run hangs.

TESSERA_ENDINGS=50 repeats each combination so often (default 2; 50 takes a quarter of an hour).
"""

import os
import tempfile
import unittest

import jobs
import slurm

ROUNDS = int(os.environ.get("TESSERA_ENDINGS", "2"))
TRANSPORTS = {  # what the two MPIs read
    "shared memory": {},
    "shared memory without CMA": {"UCX_TLS": "^cma", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"},
    "tcp": {"UCX_TLS": "tcp,self", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"},
}


class EndingsTest(jobs.Case):
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


class SlurmTest(EndingsTest):
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
    """With UCX's own function in its place again, MPICH's MPI_Finalize hangs in half of the runs: negative control of the
    tests above, and what a run does then: its work is done, it says what it waits for, and it ends."""

    def test_it_has_a_deadline(self):
        for _ in range(20):
            ended = jobs.Plain().start(self.training("compare", "--strategies", "fsdp", "--backend", "mpi"), UCX_TLS="tcp,self",
                                       LD_PRELOAD="libucp.so.0", TESSERA_TIMEOUT="2s").finish(30)
            self.assertIn("ends alone", ended.out)
            self.assertLess(ended.seconds, 10)
            if "MPI_Finalize" in ended.err:
                self.assertRegex(ended.err, r"warning: rank \d: mpi: MPI_Finalize waits for other ranks and has not returned within 2s")
                return
        self.fail("MPICH has ended well 20 times: is what backends/mpi/disconnect.cpp replaces still needed?")


if __name__ == "__main__":
    jobs.main()
