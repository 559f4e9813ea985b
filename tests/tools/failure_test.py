"""Ranks that die, stop or are interrupted during training: named errors, in time, and no leftover processes or files."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

TOOL = None


class Run:
    """A training on three ranks, with its ranks found by their environment."""

    def __init__(self, folder, *arguments, env=None):
        text = os.path.join(folder, "text.txt")
        with open(text, "w") as file:
            file.write("the quick brown fox jumps over the lazy dog; " * 500)
        self.mark = f"TESSERA_TEST_MARK_{os.getpid()}_{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            [TOOL, "train", "--model", "gpt-mini", "--ranks", "3", "--seq-len", "32", "--global-batch", "3", "--steps", "100000", "--data", text,
             "--threads", "1", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "MARK": self.mark, **(env or {})})
        for line in self.process.stdout:  # until training is in progress
            if line.startswith("step 2 "):
                break

    def pids(self):
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    entries = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
            except OSError:
                continue
            if entries.get(b"MARK") == self.mark.encode():
                found[int(pid)] = entries.get(b"TESSERA_RANK", b"launcher").decode()
        return found

    def pid_of(self, rank):
        return next(pid for pid, of in self.pids().items() if of == str(rank))

    def finish(self, seconds):
        start = time.monotonic()
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, err, time.monotonic() - start


def segments():
    """Shared memory segments, except those of MPI and UCX, whose tests may run concurrently."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("vader_segment", "sm_segment", "mpich_shar", "ucx_shm"))}


class FailureTest(unittest.TestCase):
    backend = "shm"

    def start(self, *arguments, env=None):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.segments = segments()
        return Run(folder.name, "--backend", self.backend, *arguments, env=env)

    def nothing_is_left(self, run):
        deadline = time.monotonic() + 5
        while (run.pids() or segments() - self.segments) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertEqual(run.pids(), {})
        self.assertEqual(segments() - self.segments, set())

    def test_a_killed_rank_is_named_within_five_seconds(self):
        for rank in (0, 1):
            run = self.start()
            os.kill(run.pid_of(rank), signal.SIGKILL)
            code, err, seconds = run.finish(20)
            self.assertEqual(code, 1)
            self.assertLess(seconds, 5)
            self.assertIn(f"rank {rank} was killed by signal 9", err.splitlines()[-1])
            self.nothing_is_left(run)

    def test_a_stopped_rank_gives_a_timeout_that_names_it(self):
        for rank in (0, 2):
            run = self.start(env={"TESSERA_TIMEOUT": "2s"})
            os.kill(run.pid_of(rank), signal.SIGSTOP)
            code, err, seconds = run.finish(30)
            last = err.splitlines()[-1]
            self.assertEqual(code, 1, err)
            self.assertLess(seconds, 12)
            self.assertIn(f"rank {rank}", last)
            self.assertRegex(last, r"(all_reduce|all_gather|reduce_scatter|barrier) #[1-9]\d* \([\w.]+\): not done within 2s; ")
            self.assertRegex(last, rf"rank {rank} is (not responding|behind at operation #\d+)")
            self.nothing_is_left(run)

    def test_an_interrupt_stops_all(self):
        run = self.start()
        run.process.send_signal(signal.SIGINT)
        code, err, seconds = run.finish(20)
        self.assertEqual(code, 1)
        self.assertLess(seconds, 5)
        self.assertIn("SIGINT", err.splitlines()[-1])
        self.nothing_is_left(run)

    def test_killed_launcher_ends_its_ranks(self):
        run = self.start()
        run.process.kill()
        run.process.wait()
        self.nothing_is_left(run)


class FailureOverTcpTest(FailureTest):
    backend = "tcp"


class SmallSharedMemoryTest(unittest.TestCase):
    """UCX has the buffers in which it receives in /dev/shm, 1 MiB of which is too little. Newer versions do without."""

    @staticmethod
    def ucx_version():
        said = subprocess.run(["ucx_info", "-v"], capture_output=True, text=True, timeout=60, check=True).stdout
        return tuple(int(number) for number in re.search(r"ersion:? (\d+)\.(\d+)", said).groups())

    def train(self, **settings):
        with tempfile.TemporaryDirectory() as folder:
            text = os.path.join(folder, "text.txt")
            with open(text, "w") as file:
                file.write("the quick brown fox jumps over the lazy dog; " * 500)
            command = f"mount -t tmpfs -o size=1M tmpfs /dev/shm && exec {TOOL} train --model gpt-nano --ranks 4 --backend ucx --steps 2 --data {text}"
            return subprocess.run(["unshare", "--map-root-user", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=60,
                                  env={**os.environ, **settings}, check=False)

    def test_error_says_what_to_do(self):
        done = self.train()
        if self.ucx_version() >= (1, 18):
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            return
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("ucx: creating a worker (if /dev/shm is full, make room, or use UCX_TLS=tcp,self)", done.stderr.splitlines()[-1])

    def test_what_it_says_helps(self):
        done = self.train(UCX_TLS="tcp,self")
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
