"""One binary under every launcher: bitwise equal parameters, output from one rank only, and errors of failed ranks."""

import functools
import json
import os
import shlex
import signal
import tempfile
import unittest

import jobs
import slurm
from jobs import RANKS, TOOL

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp", "hsdp"]
SAID_ONCE = "bitwise equal"  # in the last output of compare


@functools.lru_cache(None)
def backends():
    return {one["name"]: one for one in json.loads(jobs.run([TOOL, "info", "--json"]).out)["backends"]}


class Case(jobs.Case):
    reference = None  # the hash of plain --ranks 4 over the default backend

    def setUp(self):
        super().setUp()
        if Case.reference is None:
            Case.reference = self.compare(jobs.Plain())

    def need(self, backend):
        if not backends()[backend]["available"]:
            self.fail(f"{backend}: {backends()[backend]['reason']}")

    def compare(self, launcher, *arguments):
        """The hash that all strategies share."""
        with launcher.start(self.training("compare", "--json", self.path("c.json"), *arguments)) as job:
            ended = job.finish()
        self.assert_good(ended)
        self.assertEqual(ended.out.count(SAID_ONCE), 1, ended.out)
        comparison = self.read_json("c.json")
        self.assertEqual(comparison["ranks"], RANKS)
        if "--backend" in arguments:
            self.assertEqual(comparison["backend"], arguments[arguments.index("--backend") + 1])
        self.assertEqual([one["strategy"] for one in comparison["runs"]], STRATEGIES)
        hashes = {one["final_parameters_hash"] for one in comparison["runs"]}
        self.assertEqual(len(hashes), 1)
        return hashes.pop()


class Controls(Case):
    """Negative controls of the checks below."""

    def test_another_seed_gives_another_hash(self):
        self.assertNotEqual(self.compare(jobs.Plain(), "--seed", 1), self.reference)

    def test_ranks_without_launcher_all_print(self):
        with jobs.Mpirun("mpich").start(self.training("compare"), TESSERA_LAUNCHER="none") as job:
            self.assertEqual(job.finish().out.count(SAID_ONCE), RANKS)


class PlainTest(Case):
    launcher = jobs.Plain()

    def test_over_tcp(self):
        self.assertEqual(self.compare(self.launcher, "--backend", "tcp"), self.reference)

    def test_over_ucx(self):
        self.need("ucx")
        self.assertEqual(self.compare(self.launcher, "--backend", "ucx"), self.reference)

    def test_over_mpi(self):
        self.need("mpi")
        self.assertEqual(self.compare(self.launcher, "--backend", "mpi"), self.reference)


class Launched:
    """Requirements on every launcher; only `launcher` differs."""

    kills_all = False  # the launcher kills the other ranks before they can print errors

    def test_over_shm_and_tcp(self):
        for backend in ("shm", "tcp"):
            self.assertEqual(self.compare(self.launcher, "--backend", backend), self.reference, backend)

    def test_over_ucx(self):
        self.need("ucx")
        self.assertEqual(self.compare(self.launcher, "--backend", "ucx"), self.reference)

    def test_over_mpi(self):
        self.need("mpi")
        for launcher in self.for_mpi:
            self.assertEqual(self.compare(launcher, "--backend", "mpi"), self.reference)

    def assert_mpi_is_refused(self):
        """A launcher that starts no MPI ranks gives an error, never a world of one rank each."""
        self.need("mpi")
        with self.launcher.start(self.training("compare", "--backend", "mpi")) as job:
            ended = job.finish()
        self.assertEqual(ended.code, 2, ended)
        self.assertEqual(ended.out, "")
        for line in jobs.last_words(ended.err):
            self.assertRegex(line, r"mpi: these 4 ranks were started by '\w+', which is not a launcher of .*; start them with mpirun -n 4")

    def test_only_rank_0_of_train_and_bench_prints(self):
        # As compare multiplies by itself.
        with self.launcher.start(self.training("train", "--json", self.path("t.json")), TESSERA_PRODUCTS="own") as job:
            ended = job.finish()
        self.assert_good(ended)
        self.assertEqual([line.split()[1] for line in ended.out.splitlines() if line.startswith("step ")], ["1", "2", "3"])
        with open(self.path("t.json"), encoding="utf-8") as file:
            self.assertEqual(json.loads(file.readlines()[-1])["final_parameters_hash"], self.reference)

        with self.launcher.start([TOOL, "bench", "all_reduce,all_gather", "--min-bytes", "1K", "--max-bytes", "4K", "--iterations", "5",
                                  "--check", "--json", self.path("b.json")]) as job:
            self.assert_good(job.finish())
        results = self.read_json("b.json")
        self.assertEqual(results["ranks"], RANKS)
        self.assertEqual([one["wrong"] for one in results["results"]], [0] * 12)

    def test_contradicting_rank_options_are_invalid_usage(self):
        for command in (self.training("compare"), self.training("train"), [TOOL, "bench", "all_reduce"]):
            with self.launcher.start([*command, "--ranks", "3"]) as job:
                ended = job.finish()
            self.assertEqual(ended.code, 2, ended)
            self.assertEqual(ended.out.count("step 1"), 0)
            words = set(jobs.last_words(ended.err))
            self.assertEqual(len(words), 1, ended.err)
            self.assertRegex(words.pop(), r"^tessera: --ranks 3 contradicts \w+, which started 4 ranks")

    def test_a_dead_rank_is_named_by_the_others(self):
        for backend in ("shm", "tcp"):
            mark = self.mark()
            with self.launcher.start(self.training("train", "--backend", backend, steps=100000), MARK=mark) as job:
                for line in job.processes[0].stdout:
                    if line.startswith("step 2 "):
                        break
                os.kill(jobs.pids_by_rank(mark)[2], signal.SIGKILL)
                ended = job.finish(90)
            self.assertNotEqual(ended.code, 0)
            words = jobs.last_words(ended.err)
            for line in words:
                self.assertRegex(line, r"^tessera: (rank [013]: (all_gather|reduce_scatter|all_reduce) #\d+ .*)?rank 2 died")
            self.assertTrue(words or self.kills_all)
            self.assert_nobody_is_left(mark)


class OpenMpiTest(Launched, Case):
    launcher = jobs.Mpirun("openmpi")
    for_mpi = [launcher]


class MpichTest(Launched, Case):
    launcher = jobs.Mpirun("mpich")
    for_mpi = [launcher]
    kills_all = True


class WorldOfOneTest(Case):
    def test_starts_requested_ranks_with_note(self):
        for kind in jobs.Mpirun.OPTIONS:
            for subcommand in ("compare", "train"):
                with jobs.Mpirun(kind, ranks=1).start(self.training(subcommand, "--ranks", RANKS), TESSERA_PRODUCTS="own") as job:
                    ended = job.finish()
                self.assertEqual(ended.code, 0, ended)
                self.assertRegex(ended.err, r"tessera: note: \w+ started one rank; starting 4 here\n")
                self.assertIn(self.reference[:8], ended.out)


class TorchrunTest(Launched, Case):
    launcher = jobs.Torchrun()

    def test_over_mpi(self):
        self.assert_mpi_is_refused()

    def test_later_start_is_independent_run(self):
        self.assertEqual(self.compare(jobs.Torchrun(restart=1), "--backend", "tcp"), self.reference)


class SlurmTest(Launched, Case):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="tessera-slurm-")
        cls.addClassCleanup(folder.cleanup)
        cls.cluster = slurm.Slurm(folder.name).start()
        cls.addClassCleanup(cls.cluster.stop)
        cls.launcher = cls.cluster.srun()
        cls.for_mpi = [cls.cluster.srun("--mpi=pmix"), cls.cluster.srun("--mpi=pmi2")]  # for Open MPI, for MPICH

    def test_mpi_without_its_plugin(self):
        self.assert_mpi_is_refused()

    def test_the_tool_starts_mpi_ranks_inside_a_step(self):
        # By the launcher of MPI, which must not ask Slurm for the resources that this step holds.
        for plugin in ("none", "pmi2", "pmix"):
            step = self.cluster.srun("--mpi=" + plugin, ranks=1)
            with step.start(self.training("train", "--ranks", RANKS, "--backend", "mpi"), TESSERA_PRODUCTS="own") as job:
                ended = job.finish(60)
            self.assertEqual(ended.code, 0, (plugin, ended))
            self.assertIn(self.reference[:8], ended.out, plugin)

    def test_the_local_rank_is_slurms_where_pmi_tells_none(self):
        script = 'test "$PMI_SIZE" = 4 && test -z "$MPI_LOCALRANKID" && env SLURM_LOCALID=7 "$@"'
        with self.cluster.srun("--mpi=pmi2").start(["sh", "-c", script, "sh", *self.training("train")]) as job:
            ended = job.finish()
        self.assertEqual(ended.code, 2, ended)
        for line in jobs.last_words(ended.err):
            self.assertRegex(line, "pmi launcher: PMI_RANK=., .*; slurm launcher: .*SLURM_LOCALID=7.*the local rank must be below")

    def test_a_batch_script_and_the_shell_of_an_allocation_start_ranks(self):
        command = shlex.join(self.training("train", "--ranks", RANKS))
        script = self.path("batch")
        with open(script, "w", encoding="ascii") as file:
            file.write(f"#!/bin/sh\n{command}\n")
        env = self.cluster.environment(TESSERA_PRODUCTS="own")
        ended = jobs.run([jobs.program("sbatch"), "--wait", "-n", "2", "-o", self.path("out"), script], env)
        with open(self.path("out"), encoding="utf-8") as file:
            out = file.read()
        self.assertEqual(ended.code, 0, (ended, out))
        self.assertIn(self.reference[:8], out)
        ended = jobs.run([jobs.program("salloc"), "-n", "2", "sh", "-c", command], env)
        self.assertEqual(ended.code, 0, ended)
        self.assertIn(self.reference[:8], ended.out)


if __name__ == "__main__":
    jobs.main()
