"""Real processes under `tessera run`: after any failure no process is left, and the last line names the first cause."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

TOOL = None


def marked(mark):
    """Processes whose environment holds the mark (zombies have none)."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass
    return found


class Running:
    """A launcher with a mark in its environment, which its ranks inherit."""

    def __init__(self, *arguments, stdin=None):
        self.mark = f"MARK_{uuid.uuid4().hex}"
        self.started = time.monotonic()
        self.process = subprocess.Popen([TOOL, "run", *arguments], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, self.mark: "1"})

    def ranks(self, count):
        """The pids by rank, as soon as each has printed `pid N`."""
        pids = {}
        while len(pids) < count:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            tag, word, pid = line.split()[:3]
            assert word == "pid", line
            pids[int(tag.strip("[]"))] = int(pid)
        return pids

    def finish(self):
        out, err = self.process.communicate(timeout=20)
        self.seconds = time.monotonic() - self.started
        return self.process.returncode, out, err

    def nothing_left(self):
        deadline = time.monotonic() + 5
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left == []


SLEEPERS = ("-n", "4", "--", "sh", "-c", "echo pid $$; exec sleep 60")


class LauncherTest(unittest.TestCase):
    def test_detects_remaining_process(self):  # negative control of nothing_left()
        mark = f"MARK_{uuid.uuid4().hex}"
        with subprocess.Popen(["sleep", "60"], env={**os.environ, mark: "1"}) as process:
            deadline = time.monotonic() + 5
            while marked(mark) != [process.pid] and time.monotonic() < deadline:  # until it has executed that program
                time.sleep(0.01)
            self.assertEqual(marked(mark), [process.pid])
            process.kill()

    def test_a_killed_rank_ends_all(self):
        run = Running(*SLEEPERS)
        os.kill(run.ranks(4)[2], signal.SIGKILL)
        killed = time.monotonic()
        code, _, err = run.finish()
        self.assertEqual((code, err.splitlines()[-1]), (1, "tessera: rank 2 was killed by signal 9 (SIGKILL)"))
        self.assertLess(time.monotonic() - killed, 5)
        self.assertTrue(run.nothing_left())

    def test_killed_launcher_leaves_no_rank(self):
        run = Running(*SLEEPERS)
        run.ranks(4)
        self.assertGreaterEqual(len(marked(run.mark)), 5)
        run.process.kill()
        run.process.wait()
        self.assertTrue(run.nothing_left())

    def test_a_killed_launcher_leaves_no_grandchild(self):
        run = Running("-n", "2", "--", "sh", "-c", "sleep 60 & setsid sleep 60 & echo pid $$; wait")
        run.ranks(2)
        run.process.kill()
        run.process.wait()
        self.assertTrue(run.nothing_left())

    def test_ends_processes_that_ranks_leave(self):
        run = Running("-n", "2", "--", "sh", "-c", "sleep 60 & setsid sleep 60 & echo done")
        code, out, _ = run.finish()
        self.assertEqual((code, sorted(out.split("\n"))), (0, ["", "[0] done", "[1] done"]))
        self.assertLess(run.seconds, 5)
        self.assertTrue(run.nothing_left())

    def test_signals_to_the_launcher_stop_all(self):
        for number, name in ((signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")):
            run = Running(*SLEEPERS)
            run.ranks(4)
            run.process.send_signal(number)
            code, _, err = run.finish()
            self.assertEqual((code, err.splitlines()[-1]), (1, f"tessera: stopped by signal {number.value} ({name})"))
            self.assertLess(run.seconds, 4)
            self.assertTrue(run.nothing_left())

    def test_ranks_that_ignore_the_interrupt(self):
        run = Running("-n", "2", "--", "sh", "-c", "trap '' INT TERM; echo pid $$; while :; do sleep 1; done")
        run.ranks(2)
        run.process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        self.assertEqual(run.finish()[0], 1)
        self.assertLess(time.monotonic() - sent, 5)
        self.assertTrue(run.nothing_left())

    def test_a_second_interrupt_ends_ranks_at_once(self):
        run = Running("-n", "2", "--", "sh", "-c", "trap 'echo asked' INT; trap '' TERM; echo pid $$; while :; do sleep 0.05; done")
        run.ranks(2)
        run.process.send_signal(signal.SIGINT)
        asked = ""
        while asked.count("asked") < 2:
            line = run.process.stdout.readline()
            self.assertTrue(line, asked)
            asked += line
        run.process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        code, _, err = run.finish()
        self.assertEqual((code, err.splitlines()[-1]), (1, "tessera: stopped by signal 2 (SIGINT)"))
        self.assertLess(time.monotonic() - sent, 1.5)  # a single signal is followed by SIGTERM after a second, and by SIGKILL later
        self.assertTrue(run.nothing_left())

    def test_stopped_rank_ends_when_another_fails(self):
        run = Running("-n", "3", "--", "sh", "-c",
                      "echo pid $$; if [ $TESSERA_RANK = 1 ]; then kill -STOP $$; fi; if [ $TESSERA_RANK = 0 ]; then read go;"
                      " echo broken >&2; exit 1; fi; exec sleep 60", stdin=subprocess.PIPE)
        stat = pathlib.Path(f"/proc/{run.ranks(3)[1]}/stat")
        deadline = time.monotonic() + 10
        while stat.read_text().rsplit(")", 1)[1].split()[0] != "T":
            self.assertLess(time.monotonic(), deadline, "rank 1 has not stopped")
            time.sleep(0.01)
        run.process.stdin.write("go\n")
        run.process.stdin.flush()
        told = time.monotonic()
        code, _, err = run.finish()
        self.assertEqual((code, err.splitlines()[-1]), (1, "tessera: rank 0 ended with code 1: broken"))
        self.assertLess(time.monotonic() - told, 5)
        self.assertTrue(run.nothing_left())

    def test_successful_rank_ends_no_other(self):
        with tempfile.TemporaryDirectory() as scratch:
            script = (f"if [ $TESSERA_RANK = 0 ]; then echo $$ >{scratch}/pid; exit 0; fi;"
                      f" until [ -s {scratch}/pid ] && ! kill -0 $(cat {scratch}/pid) 2>/dev/null; do sleep 0.01; done; echo late")
            self.assertEqual(Running("-n", "2", "--", "sh", "-c", script).finish(), (0, "[1] late\n", ""))

    def test_sixteen_ranks_have_their_variables(self):
        run = Running("-n", "16", "--", "sh", "-c",
                      "echo $TESSERA_RANK $TESSERA_WORLD_SIZE $TESSERA_LOCAL_RANK $TESSERA_LOCAL_WORLD_SIZE $TESSERA_RUN_ID"
                      " $TESSERA_TOKEN")
        code, out, err = run.finish()
        self.assertEqual((code, err), (0, ""))
        rows = sorted((line.split() for line in out.splitlines()), key=lambda row: int(row[1]))
        self.assertEqual([row[:5] for row in rows], [[f"[{r}]", str(r), "16", str(r), "16"] for r in range(16)])
        self.assertEqual(len({(row[5], row[6]) for row in rows}), 1)
        self.assertRegex(rows[0][6], "^[0-9a-f]{64}$")
        again = Running("-n", "1", "--", "sh", "-c", "echo $TESSERA_RUN_ID $TESSERA_TOKEN").finish()[1].split()
        self.assertNotEqual(again[1:], rows[0][5:], "each run has its own name and secret")

    def test_long_lines_stay_whole(self):
        program = ("import os, sys\nr = os.environ['TESSERA_RANK']\n"
                   "for i in range(20):\n    sys.stdout.write(r * 50000 + '\\n'); sys.stdout.flush()\n"
                   "sys.stdout.write('end' + r * 300000)")
        code, out, _ = Running("-n", "4", "--", sys.executable, "-c", program).finish()
        self.assertEqual(code, 0)
        lines = out.splitlines()
        expected = [f"[{r}] {str(r) * 50000}" for r in range(4)] * 20 + [f"[{r}] end{str(r) * 300000}" for r in range(4)]
        self.assertEqual(sorted(lines), sorted(expected))

    def test_log_files_and_untagged_output(self):
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch) / "new" / "logs"
            run = Running("-n", "2", "--no-tag", "--log-dir", str(folder), "--", "sh", "-c",
                          "echo out $TESSERA_RANK; echo err $TESSERA_RANK >&2")
            code, out, err = run.finish()
            self.assertEqual((code, sorted(out.splitlines()), sorted(err.splitlines())),
                             (0, ["out 0", "out 1"], ["err 0", "err 1"]))
            for rank in range(2):
                self.assertEqual(sorted((folder / f"rank-{rank}.log").read_text().splitlines()), [f"err {rank}", f"out {rank}"])

    def test_binding_gives_equal_shares(self):
        allowed = sorted(os.sched_getaffinity(0))
        program = "import os; print(sorted(os.sched_getaffinity(0)))"
        ranks = len(allowed)
        code, out, _ = Running("-n", str(ranks), "--bind", "core", "--", sys.executable, "-c", program).finish()
        self.assertEqual(code, 0)
        self.assertEqual(sorted(out.splitlines()), sorted(f"[{r}] [{allowed[r]}]" for r in range(ranks)))
        out = Running("-n", "1", "--", sys.executable, "-c", program).finish()[1]
        self.assertEqual(out, f"[0] {allowed}\n")

    def test_only_rank_0_reads_standard_input(self):
        done = subprocess.run([TOOL, "run", "-n", "3", "--", "cat"], input="typed\n", text=True, capture_output=True, timeout=20)
        self.assertEqual((done.returncode, done.stdout), (0, "[0] typed\n"))


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main(verbosity=2)
