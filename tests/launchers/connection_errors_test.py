"""Ranks that can't connect to each other: one clear line from each, the right code, in time."""

import os
import signal
import socket

import jobs
from jobs import TOOL


class Case(jobs.Case):
    def start(self, *places, backend="tcp", steps=1, **common):
        return jobs.start_each(self.training("train", "--backend", backend, steps=steps), [{**common, **place} for place in places])

    def ends(self, job, seconds=20):
        with job:
            return [jobs.finish(process, seconds) for process in job.processes]

    def assert_one_line(self, ended, code, pattern):
        self.assertEqual((ended.code, ended.out), (code, ""), ended)
        self.assertEqual(len(ended.err.splitlines()), 1, ended.err)
        self.assertRegex(ended.err, pattern)


class VariablesTest(Case):
    def test_half_set_variables_are_listed(self):
        for half, words in ((dict(TESSERA_RANK=0), "tessera launcher: TESSERA_RANK=0, TESSERA_WORLD_SIZE is not set"),
                            (dict(WORLD_SIZE=2), "torchrun launcher: RANK is not set, WORLD_SIZE=2"),
                            (dict(OMPI_COMM_WORLD_RANK=0), "openmpi launcher: OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE is not set"),
                            (dict(PMI_SIZE=2), "pmi launcher: PMI_RANK is not set, .*PMI_SIZE=2"),
                            (dict(SLURM_STEP_ID=0, SLURM_PROCID=1), "slurm launcher: SLURM_PROCID=1, SLURM_STEP_NUM_TASKS is not set"),
                            (dict(RANK=4, WORLD_SIZE=4), "torchrun launcher: RANK=4, WORLD_SIZE=4, .*the rank must be below")):
            for ended in self.ends(self.start(half)):
                self.assert_one_line(ended, 2, f"^tessera: {words}.*\n$")

    def test_one_of_several_is_no_world_of_one(self):
        for told, words in ((dict(PMIX_RANK=1), "launcher: PMIX_RANK=1 tells that this process is one of several"),
                            (dict(LOCAL_RANK=0), "launcher: LOCAL_RANK=0 tells"),
                            (dict(SLURM_JOB_ID=7, SLURM_PROCID=1), "launcher: SLURM_PROCID=1 tells"),
                            (dict(MV2_COMM_WORLD_RANK=0), "mvapich launcher: MV2_COMM_WORLD_RANK=0, MV2_COMM_WORLD_SIZE is not set"),
                            (dict(RANK=0, WORLD_SIZE=1, PMI_RANK=0, PMI_SIZE=2),
                             "torchrun launcher: RANK=0, WORLD_SIZE=1, .*: a world of one process, but PMI_SIZE=2 tells")):
            for ended in self.ends(self.start(told)):
                self.assert_one_line(ended, 2, f"^tessera: {words}.*; set TESSERA_RANK and TESSERA_WORLD_SIZE, or TESSERA_LAUNCHER")

    def test_by_request_it_is_one(self):
        for ended in self.ends(self.start(dict(PMIX_RANK=1, TESSERA_LAUNCHER="none"))):
            self.assertEqual((ended.code, ended.err), (0, ""), ended)

    def test_each_rank_may_spell_the_master_its_own_way(self):
        # As under Kubernetes, where the first pod's own name for itself is localhost.
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        spelled = [dict(RANK=r, WORLD_SIZE=2, MASTER_PORT=23456, MASTER_ADDR=name) for r, name in enumerate(("localhost", "job-0.jobs.svc"))]
        for master in ({}, dict(TESSERA_MASTER=f"127.0.0.1:{port}", TESSERA_TOKEN="swordfish")):
            ended = self.ends(self.start(*spelled, **master))
            self.assertEqual([(one.code, one.err) for one in ended], [(0, "")] * 2, ended)

    def test_the_run_has_the_users_name(self):
        places = [dict(RANK=r, WORLD_SIZE=2, MASTER_PORT=port, TESSERA_RUN_ID="mine") for r, port in enumerate((1, 2))]
        ended = self.ends(self.start(*places))
        self.assertEqual([(one.code, one.err) for one in ended], [(0, "")] * 2, ended)
        for place, name in zip(places, ("mine", "yours")):  # the control: another name is another run
            place.update(TESSERA_RUN_ID=name, TESSERA_TIMEOUT="2s")
        self.assertEqual([one.code for one in self.ends(self.start(*places))], [1, 1])

    def test_a_batch_script_is_no_rank(self):
        # Slurm also sets these for the commands of a batch script, each of which is a world of its own.
        job = jobs.start_each(self.training("train", "--ranks", 2, steps=1), [dict(SLURM_JOB_ID=7, SLURM_PROCID=0, SLURM_NTASKS=4)])
        self.assert_good(job.finish())

    def test_an_unknown_launcher_is_named(self):
        for ended in self.ends(self.start(dict(TESSERA_LAUNCHER="pbs"))):
            self.assert_one_line(ended, 2, "^tessera: TESSERA_LAUNCHER: unknown launcher 'pbs'; known: none tessera torchrun openmpi mvapich pmi slurm")


class MasterTest(Case):
    def setUp(self):
        super().setUp()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def pair(self, *changes, **common):
        places = [dict(TESSERA_RANK=r, **(changes[r] if r < len(changes) else {})) for r in range(2)]
        return self.start(*places, **{**dict(TESSERA_WORLD_SIZE=2, TESSERA_MASTER=f"127.0.0.1:{self.port}", TESSERA_TOKEN="swordfish",
                                             TESSERA_TIMEOUT="3s", TESSERA_RUN_ID="one"), **common})

    def test_complete_variables_work(self):
        ended = self.ends(self.pair())
        self.assertEqual([one.code for one in ended], [0, 0], ended)

    def test_a_backend_of_one_host_across_hosts_is_wrong_usage_on_every_rank(self):
        for ended in self.ends(self.pair(dict(TESSERA_HOST_ID="east"), dict(TESSERA_HOST_ID="west"), backend="shm")):
            self.assert_one_line(ended, 2, "^tessera: shm needs all ranks on one host: rank 1 is on host west, rank 0 on east; use backend auto\n$")

    def test_it_needs_a_token(self):
        for ended in self.ends(self.pair(TESSERA_TOKEN="")):
            self.assert_one_line(ended, 2, r"^tessera: init: TESSERA_MASTER=\S+ needs TESSERA_TOKEN, the same secret text for all ranks")

    def assert_waited(self, one, reason):
        """What is not proven may come from a stranger: rank 1 warns, and goes on until its deadline."""
        self.assertEqual(one.code, 1, one)
        warning, error = one.err.splitlines()
        self.assertRegex(warning, f"rank 1 of 2 waits for rank 0 within 3s .*: {reason}$")
        self.assertRegex(error, f"^tessera: rank 1: init: rank 1 of 2 found no rank 0 within 3s .*: {reason}")

    def test_other_token_is_reported_on_both_ranks(self):
        zero, one = self.ends(self.pair({}, dict(TESSERA_TOKEN="marlin")))
        self.assert_waited(one, "authentication failed; use the same TESSERA_TOKEN on all ranks")
        self.assert_one_line(zero, 1, "rank 1 did not connect .*; refused: rank 1 has a different TESSERA_TOKEN than rank 0\n$")

    def test_tls_needs_a_token_or_certificates(self):
        for ended in self.ends(self.pair(TESSERA_TLS=1, TESSERA_TOKEN="")):
            self.assert_one_line(ended, 2, r"^tessera: init: TESSERA_TLS=1 needs TESSERA_TOKEN, .* or TESSERA_TLS_CERT, TESSERA_TLS_KEY and TESSERA_TLS_CA\n$")

    def test_tls_on_one_rank_alone_is_reported_on_both_ranks(self):
        for places in (({}, dict(TESSERA_TLS=1)), (dict(TESSERA_TLS=1), {})):
            tls = [place.get("TESSERA_TLS", 0) for place in places]
            for ended in self.ends(self.pair(*places)):
                self.assert_one_line(ended, 2, rf"rank 1 has TESSERA_TLS={tls[1]}.*, rank 0 TESSERA_TLS={tls[0]}.*; set it alike on all ranks\n$")
                self.assertLess(ended.seconds, 3)

    def test_other_token_with_tls_is_reported_on_both_ranks(self):
        zero, one = self.ends(self.pair({}, dict(TESSERA_TOKEN="marlin"), TESSERA_TLS=1))
        self.assert_waited(one, "TLS: .*; use the same TESSERA_TOKEN on all ranks")
        self.assert_one_line(zero, 1, "rank 1 did not connect .*; refused: a process, since TLS: .*; use the same TESSERA_TOKEN on all ranks\n$")

    def test_a_backend_that_does_not_encrypt_is_wrong_usage_with_tls(self):
        for backend in ("ucx", "mpi"):
            ended = jobs.run(self.training("train", "--backend", backend, "--ranks", 1, steps=1), jobs.environment(TESSERA_TLS=1, TESSERA_TOKEN="t"))
            if "is not available" not in ended.err and "was not built" not in ended.err:
                self.assert_one_line(ended, 2, rf"backend '{backend}' does not encrypt its data, but TESSERA_TLS=1: use tcp, or set TESSERA_TLS=0")

    def certificates(self, authority, name):
        """The variables of a rank; the authority is made when first named."""
        def openssl(*arguments):
            done = jobs.run([jobs.program("openssl"), *arguments])
            self.assertEqual(done.code, 0, done)

        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        ca = self.path(authority)
        if not os.path.exists(ca):
            openssl("req", "-x509", *new, "-keyout", ca + ".key", "-out", ca, "-days", "2", "-subj", "/CN=" + authority)
        own = self.path(name)
        openssl("req", *new, "-keyout", own + ".key", "-out", own + ".csr", "-subj", "/CN=" + name)
        openssl("x509", "-req", "-in", own + ".csr", "-CA", ca, "-CAkey", ca + ".key", "-CAcreateserial", "-out", own, "-days", "2")
        return dict(TESSERA_TLS=1, TESSERA_TLS_CERT=own, TESSERA_TLS_KEY=own + ".key", TESSERA_TLS_CA=self.path("ca"))

    def test_certificates(self):
        zero, one = self.certificates("ca", "zero"), self.certificates("ca", "one")
        for token in ("swordfish", ""):
            ended = self.ends(self.pair(zero, one, TESSERA_TOKEN=token))
            self.assertEqual([each.code for each in ended], [0, 0], ended)
        stranger = self.certificates("other", "stranger")
        ended = self.ends(self.pair(zero, stranger))
        self.assert_waited(ended[1], r"TLS: it refuses this rank's certificate \(TESSERA_TLS_CERT\): unknown CA")
        self.assert_one_line(ended[0], 1, "refused: a process, since TLS: its certificate is not accepted: ")
        for ended in self.ends(self.pair(zero, dict(TESSERA_TLS=1))):
            self.assert_one_line(ended, ended.code, r"rank 1 has TESSERA_TLS=1 by the token, rank 0 TESSERA_TLS=1 by certificates")

    def test_errors_of_files_name_variable_and_file(self):
        good, other = self.certificates("ca", "zero"), self.certificates("ca", "one")
        os.mkfifo(self.path("fifo"))
        for variable, file, why in (("CERT", self.path("nope"), "No such file or directory"), ("CA", self.path("fifo"), "not a regular file"),
                                    ("CERT", self.text, "has no certificate in PEM format"), ("CA", self.text, "has no certificate in PEM format"),
                                    ("KEY", self.text, "has no private key in PEM format without a passphrase"),
                                    ("KEY", other["TESSERA_TLS_KEY"], "is not the key of the certificate in TESSERA_TLS_CERT=")):
            for ended in self.ends(self.pair(**{**good, "TESSERA_TLS_" + variable: file})):
                self.assert_one_line(ended, 2, f"^tessera: init: TESSERA_TLS_{variable}={file}: {why}")
        for ended in self.ends(self.pair(**{**good, "TESSERA_TLS_KEY": ""})):
            self.assert_one_line(ended, 2, "set all of TESSERA_TLS_CERT, TESSERA_TLS_KEY and TESSERA_TLS_CA, or none")

    def test_a_port_in_use_is_said_by_rank_0(self):
        with socket.create_server(("127.0.0.1", self.port)):
            zero, one = self.ends(self.pair())
        self.assert_one_line(zero, 2, f"port {self.port} is in use on the host of rank 0; choose another port, or end the run that uses it\n$")
        self.assert_one_line(one, 1, f"^tessera: rank 1: init: rank 1 of 2 found no rank 0 within 3s .*127.0.0.1:{self.port}: ")

    def test_error_lists_available_interfaces(self):
        for ended in self.ends(self.pair(TESSERA_IFNAME="nope0")):
            self.assert_one_line(ended, 2, r"^tessera: tcp: TESSERA_IFNAME=nope0: no interface of that name or network is up and has an address; "
                                           r"this host has: .*lo \(127.0.0.1\)")

    def test_late_rank_is_rejected_and_disturbs_no_other(self):
        common = dict(TESSERA_WORLD_SIZE=2, TESSERA_MASTER=f"127.0.0.1:{self.port}", TESSERA_TOKEN="swordfish", TESSERA_RUN_ID="two",
                      TESSERA_TIMEOUT="20s")
        with self.start(dict(TESSERA_RANK=0), dict(TESSERA_RANK=1), steps=400, **common) as job:
            for line in job.processes[0].stdout:
                if line.startswith("step 2 "):
                    break
            for late in self.ends(self.start(dict(TESSERA_RANK=1), **common)):
                self.assert_one_line(late, 2, "refuses rank 1: the world of 2 ranks is already complete; rank 1 can't join\n$")
            ended = [jobs.finish(process) for process in job.processes]
        self.assertEqual([one.code for one in ended], [0, 0], ended)
        self.assertIn("step 400 ", ended[0].out)

    def test_a_rank_whose_peer_dies_ends_with_1_and_says_so(self):
        mark = self.mark()
        with self.start(dict(TESSERA_RANK=0), dict(TESSERA_RANK=1), steps=100000, MARK=mark, TESSERA_WORLD_SIZE=2, TESSERA_RUN_ID=mark) as job:
            for line in job.processes[0].stdout:
                if line.startswith("step 2 "):
                    break
            os.kill(jobs.pids_by_rank(mark)[1], signal.SIGKILL)
            zero = jobs.finish(job.processes[0], 20)
        self.assertEqual(zero.code, 1)
        self.assertRegex(zero.err, r"^tessera: rank 0: .*rank 1 died\n$")

    def test_names_missing_rank(self):
        common = dict(TESSERA_WORLD_SIZE=3, TESSERA_MASTER=f"127.0.0.1:{self.port}", TESSERA_TOKEN="swordfish", TESSERA_TIMEOUT="2s")
        job = self.start(dict(TESSERA_RANK=0), dict(TESSERA_RANK=2), **common)
        for ended in self.ends(job):
            self.assert_one_line(ended, 1, r"^tessera: rank [02]: init: of 3 ranks, rank 1 did not connect at TESSERA_MASTER=\S+ within 2s")

    def test_compare_creates_worlds_at_one_port(self):
        # Ranks don't end a world simultaneously: the first one connects for the next world and must not disturb the current one.
        places = [dict(TESSERA_RANK=r, TESSERA_WORLD_SIZE=4, TESSERA_MASTER=f"127.0.0.1:{self.port}", TESSERA_TOKEN="swordfish") for r in range(4)]
        ended = jobs.start_each(self.training("compare"), places).finish()
        self.assert_good(ended)
        self.assertEqual(ended.out.count("bitwise equal"), 1)


if __name__ == "__main__":
    jobs.main()
