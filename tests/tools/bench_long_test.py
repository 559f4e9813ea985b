"""`tessera bench --duration`, `--endless` and `--time-limit`: what is recorded over time, and how a run ends early."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

TOOL = None
RUN = ("all_reduce,all_gather", "--ranks", "2", "-b", "64", "-e", "64K", "-f", "1024", "-n", "10")
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def command(*arguments):
    return [TOOL, "bench", *arguments]


def environment(**changes):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    return {**clean, "TESSERA_TIMEOUT": "60s", **changes}


def wait(ready, seconds=60):
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.05)


def rank_of(parent, rank):
    """The process of a rank that `parent` started."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                if int(file.read().rsplit(")", 1)[1].split()[1]) != parent:
                    continue
            with open(f"/proc/{pid}/environ", "rb") as file:
                if f"TESSERA_RANK={rank}".encode() in file.read().split(b"\0"):
                    return int(pid)
        except OSError:
            continue
    return None


class LongRunTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = pathlib.Path(folder.name) / "out.json"

    def start(self, *arguments, **changes):
        process = subprocess.Popen(command(*arguments, "--json", str(self.file)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=environment(**changes), start_new_session=True)
        self.addCleanup(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
        return process

    def intervals(self):
        found = json.loads(self.file.read_text()) if self.file.exists() else {}
        return found.get("long_run", {}).get("intervals", {}).get("shm", [])

    def test_a_duration_adds_a_line_per_interval(self):
        process = self.start(*RUN, "--duration", "3s", "--interval", "1s")
        out, err = process.communicate(timeout=120)
        self.assertEqual((process.returncode, err), (0, ""))
        found = json.loads(self.file.read_text())
        self.assertNotIn("complete", found)
        self.assertEqual(len(found["results"]), 8, "the tables come first")
        self.assertEqual((found["long_run"]["interval_s"], found["long_run"]["stall_ms"]), (1, 100))
        lines = [line for line in out.splitlines() if re.match("# " + STAMP + ": ", line)]
        intervals = self.intervals()
        self.assertEqual(len(lines), len(intervals))
        self.assertGreaterEqual(len(intervals), 2)
        for line, one in zip(lines, intervals):
            self.assertIn(one["time"], line)
            self.assertEqual([(p["op"], p["bytes"], p["dtype"], p["redop"]) for p in one["points"]],
                             [(op, size, "f32", redop) for op, redop in (("all_reduce", "sum"), ("all_gather", "none")) for size in (64, 65536)])
            for point, first in zip(one["points"], intervals[0]["points"]):
                self.assertTrue(0 < point["median_us"] <= point["p90_us"] <= point["p99_us"] <= point["max_us"], point)
                self.assertAlmostEqual(point["drift"], point["median_us"] / first["median_us"] - 1)
            self.assertIn(f": {sum(point['calls'] for point in one['points'])} calls, ", line)
        self.assertGreaterEqual(sum(one["seconds"] for one in intervals), 3)

    def test_a_stall_is_recorded_with_its_time_and_ctrl_c_ends_with_what_there_is(self):
        process = self.start(*RUN, "--endless", "--interval", "1s", "--stall", "700ms")
        wait(lambda: len(self.intervals()) >= 2)
        self.assertEqual(sum(one["stall_count"] for one in self.intervals()[:2]), 0, "the control: nothing stood still")
        rank = rank_of(process.pid, 1)
        os.kill(rank, signal.SIGSTOP)
        time.sleep(1)
        os.kill(rank, signal.SIGCONT)
        wait(lambda: any(one["stall_count"] for one in self.intervals()))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, err), (1, "tessera: stopped by signal 2 (SIGINT)\n"))
        found = json.loads(self.file.read_text())
        self.assertEqual((found["complete"], len(found["results"])), (False, 8))
        stalls = sum((one["stalls"] for one in self.intervals()), [])
        self.assertGreater(max(stall["us"] for stall in stalls), 0.9e6)
        for stall in stalls:
            self.assertRegex(stall["time"], "^" + STAMP + "$")
            self.assertGreater(stall["us"] - stall["median_us"], 0.7e6)
        self.assertRegex(out, r"# Fit of the time")

    def test_ctrl_c_within_a_table_keeps_its_rows(self):
        process = self.start("all_reduce", "--ranks", "2", "-b", "64", "-e", "128", "-n", "200000")
        lines = []
        for line in process.stdout:
            lines.append(line)
            if not line.startswith("#"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, err), (1, "tessera: stopped by signal 2 (SIGINT)\n"))
        found = json.loads(self.file.read_text())
        self.assertEqual(([r["bytes"] for r in found["results"]], found["complete"]), ([64, 64], False))
        self.assertIn("# Avg bus bandwidth", out)

    def test_a_time_limit_names_the_rank_that_is_behind(self):
        process = self.start(*RUN, "--endless", "--interval", "1s", "--time-limit", "4s")
        wait(lambda: len(self.intervals()) >= 1)
        stopped, begin = rank_of(process.pid, 1), time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        out, err = process.communicate(timeout=60)
        self.assertLess(time.monotonic() - begin, 20)
        self.assertEqual((process.returncode, err.count("\n")), (1, 1), err)
        self.assertRegex(err, r"rank 1\b")
        self.assertRegex(err, r"4 ?s|4000 ?ms")
        self.assertIs(json.loads(self.file.read_text())["complete"], False)

    def test_a_time_limit_shortens_large_points(self):
        times = []
        for limit in ((), ("--time-limit", "5s")):
            begin = time.monotonic()
            done = subprocess.run(command("send_recv", "--ranks", "2", "-b", "8", "-e", "8", "-n", "60", "-w", "1", "--link", "100ms,1GB/s", *limit),
                                  capture_output=True, text=True, timeout=120, env=environment(), check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            times.append(time.monotonic() - begin)
        self.assertGreater(times[0], 6)
        self.assertLess(times[1], 6)

    def test_mistakes_are_one_line_and_code_2(self):
        for arguments, says in ((("--duration", "8"), "--duration: '8' is not a duration"),
                                (("--interval", "1s"), "--interval has no effect without --duration or --endless"),
                                (("--stall", "1s"), "--stall has no effect without --duration or --endless"),
                                (("--endless", "--duration", "1h"), "--endless has no --duration"),
                                (("--endless", "--backends", "shm,tcp"), "--endless never comes to a second backend"),
                                (("--duration", "1h", "--csv"), "--csv is not for --duration"),
                                (("--duration", "1h", "--pattern", "pairs"), "--duration has no effect with --pattern"),
                                (("--time-limit", "0s"), "--time-limit")):
            done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, env=environment(), check=False)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), (arguments, done))
            self.assertIn(says, done.stderr)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
