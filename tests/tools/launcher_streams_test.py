"""The launcher's streams, files and signals: none of them blocks the launcher, and no output or signal is lost.

    launcher_streams_test.py TOOL
"""

import fcntl
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "harness"))
import processes  # noqa: E402

TOOL = None
FLOOD = ("-n", "2", "--", "sh", "-c", "if [ $TESSERA_RANK = 0 ]; then exec yes 0123456789; fi; echo $$ >$PIDS; exec sleep 60")


def caught(pid):
    """The signals that a process catches, as a mask."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return int(line.split()[1], 16)
    return 0


class FullPipe:
    """A launcher with an unread standard output, started until it can't write any more."""

    def __init__(self, folder, shared=False):
        self.pids = os.path.join(folder, "pids")
        self.reader, writer = os.pipe()
        self.process = subprocess.Popen([TOOL, "run", *FLOOD], stdout=writer, stderr=writer if shared else subprocess.PIPE, text=True,
                                        env={**os.environ, "PIDS": self.pids}, preexec_fn=processes.end_with_parent)
        os.close(writer)
        deadline = time.monotonic() + 20
        while not (self.is_full() and self.sleeper()):
            assert time.monotonic() < deadline, "the pipe does not fill"
            time.sleep(0.01)

    def is_full(self):
        waiting = fcntl.ioctl(self.reader, 0x541B, b"\0" * 4)  # FIONREAD
        return int.from_bytes(waiting, sys.byteorder) > 60_000

    def sleeper(self):
        text = pathlib.Path(self.pids).read_text() if os.path.exists(self.pids) else ""
        return int(text) if text.endswith("\n") else None

    def finish(self, seconds):
        begin = time.monotonic()
        _, err = self.process.communicate(timeout=seconds)
        os.close(self.reader)
        return self.process.returncode, err, time.monotonic() - begin


class StreamsTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = scratch.name

    def test_handles_signal_without_reader(self):
        run = FullPipe(self.folder)
        run.process.send_signal(signal.SIGTERM)
        code, err, _ = run.finish(10)
        self.assertEqual((code, err.splitlines()[-1]), (1, "tessera: stopped by signal 15 (SIGTERM)"))

    def test_detects_dead_rank_without_reader(self):
        run = FullPipe(self.folder)
        os.kill(run.sleeper(), signal.SIGKILL)
        code, err, _ = run.finish(15)
        self.assertEqual((code, err.splitlines()[-1]), (1, "tessera: rank 1 was killed by signal 9 (SIGKILL)"))

    def test_exits_without_reader_of_last_line(self):
        run = FullPipe(self.folder, shared=True)
        run.process.send_signal(signal.SIGINT)
        self.assertEqual(run.finish(15)[0], 1)

    def test_slow_reader_receives_all_output(self):
        program = "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done; printf '%01000000d\\n' 0; echo last"
        run = subprocess.Popen([TOOL, "run", "-n", "1", "--", "sh", "-c", program], stdout=subprocess.PIPE, text=True)
        with self.assertRaises(subprocess.TimeoutExpired):  # it blocks until its reader reads
            run.wait(2)
        with run.stdout:
            lines = run.stdout.read().splitlines()
        self.assertEqual((run.wait(10), len(lines), lines[0], lines[-1]), (0, 3002, "[0] 0", "[0] last"))

    def test_output_that_can_not_be_written_is_an_error(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([TOOL, "run", "-n", "2", "--", "echo", "x"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=20)
        self.assertEqual((done.returncode, done.stderr), (1, "tessera: can't write standard output: No space left on device\n"))

    def test_a_log_that_can_not_be_written_is_an_error(self):
        logs = os.path.join(self.folder, "logs")
        done = subprocess.run([TOOL, "run", "-n", "2", "--log-dir", logs, "--", "sh", "-c", "echo x; [ $TESSERA_RANK = 0 ] || echo y"],
                              capture_output=True, text=True, timeout=20, restore_signals=False,  # SIGXFSZ stays ignored
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2, 2)))
        self.assertEqual((done.returncode, sorted(done.stdout.split())), (1, ["[0]", "[1]", "[1]", "x", "x", "y"]))
        problem = f"--log-dir: can't write '{logs}/rank-1.log': File too large"
        self.assertEqual(done.stderr.splitlines(), [f"tessera: warning: {problem}; later output is missing from it", f"tessera: {problem}"])
        self.assertEqual(pathlib.Path(logs, "rank-0.log").read_text(), "x\n")  # negative control: the other log is complete

    def test_a_link_in_the_place_of_a_log_is_not_followed(self):
        logs, other = os.path.join(self.folder, "linked"), pathlib.Path(self.folder, "other")
        os.mkdir(logs)
        other.write_text("kept")
        os.symlink(other, os.path.join(logs, "rank-0.log"))
        done = subprocess.run([TOOL, "run", "-n", "1", "--log-dir", logs, "--", "echo", "x"], capture_output=True, text=True, timeout=20)
        self.assertEqual((done.returncode, other.read_text()), (2, "kept"))
        self.assertIn("rank-0.log': a symbolic link;", done.stderr)
        os.unlink(os.path.join(logs, "rank-0.log"))  # negative control
        subprocess.run([TOOL, "run", "-n", "1", "--log-dir", logs, "--", "echo", "x"], check=True, capture_output=True, timeout=20)
        self.assertEqual(pathlib.Path(logs, "rank-0.log").read_text(), "x\n")

    def test_does_not_reuse_closed_standard_streams(self):
        text = os.path.join(self.folder, "text")
        pathlib.Path(text).write_text("the quick brown fox " * 100)
        out = os.path.join(self.folder, "out.json")
        for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
            command = f"exec '{TOOL}' train --model gpt-nano --ranks 1 --steps 2 --seq-len 16 --data '{text}' --json '{out}' {closed}"
            done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
            self.assertEqual(done.returncode, 0, (closed, done))
            lines = [json.loads(line) for line in pathlib.Path(out).read_text().splitlines()]
            self.assertEqual([line.get("step") for line in lines], [1, 2, None], closed)

    def test_a_signal_that_comes_early_is_named(self):
        """From the beginning of main(), where the handler is installed."""
        for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")):
            for delay in range(0, 50, 5):
                run = subprocess.Popen([TOOL, "run", "-n", "2", "--", "sleep", "60"], stderr=subprocess.PIPE, text=True)
                while not caught(run.pid) >> (number - 1) & 1:
                    pass
                end = time.monotonic() + delay / 1000  # the launcher's progress by then is random
                while time.monotonic() < end:
                    pass
                run.send_signal(number)
                _, err = run.communicate(timeout=10)
                self.assertEqual((run.returncode, err), (1, f"tessera: stopped by signal {number.value} ({name})\n"), delay)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
