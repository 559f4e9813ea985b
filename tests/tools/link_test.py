"""--link, --link-intra and --hosts as a user slows down links: times, equal results, mistakes, and a rank that dies."""

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
import uuid

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60
SLOW = ("--link", "20us,2MB/s")


def tool(*arguments):
    done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


class LinkTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "text.txt").write_text(TEXT)
        self.json = self.folder / "out.json"

    def options(self, ranks=4):
        return ["--model", "gpt-nano", "--ranks", ranks, "--threads", 1, "--seq-len", 16, "--data", self.folder / "text.txt"]

    def compare(self, *arguments, ranks=4):
        code, out, err = tool("compare", *self.options(ranks), "--steps", 4, "--json", self.json, *arguments)
        self.assertEqual(code, 0, err)
        return {run["strategy"]: run for run in json.loads(self.json.read_text())["runs"]}, out

    def test_steps_take_what_their_bytes_need_and_end_with_the_same_bits(self):
        slow, out = self.compare("--strategies", "ddp,fsdp", *SLOW)
        plain, plain_out = self.compare("--strategies", "ddp,fsdp")
        self.assertRegex(out, r"(?m)^link: woke \d+ us late, \d+\.\d % of a transfer$")
        self.assertNotIn("link:", plain_out)
        for strategy, run in slow.items():
            for key in ("losses", "final_parameters_hash", "calls_per_step", "wire_bytes_per_step"):
                self.assertEqual(run[key], plain[strategy][key])
            wire = sum(run["wire_bytes_per_step"][kind] for kind in ("all_gather", "reduce_scatter", "all_reduce"))
            needs = wire / 2e6 * 1e3
            self.assertGreater(run["step_ms"]["median"], needs)
            self.assertTrue(run["link"]["shared_calls"])
            # Control: a link that is ignored would be seen.
            self.assertLess(plain[strategy]["step_ms"]["median"], needs)
            self.assertNotIn("link", plain[strategy])

    def test_hosts_have_a_slow_link_between_them_and_give_hsdp_its_mesh(self):
        hosts, _ = self.compare("--strategies", "fsdp,hsdp", *SLOW, "--hosts", 4)
        self.assertEqual(hosts["hsdp"]["mesh"], [4, 1])
        pairs, _ = self.compare("--strategies", "fsdp,hsdp", *SLOW, "--hosts", 2, "--link-intra", "5us,5GB/s")
        self.assertEqual(pairs["hsdp"]["mesh"], [2, 2])
        # Between two hosts fsdp sends two thirds of its bytes, hsdp one part of its gradients.
        between = {strategy: run["wire_bytes_per_step"] for strategy, run in pairs.items()}
        needs = (between["fsdp"]["all_gather"] + between["fsdp"]["reduce_scatter"]) * 2 / 3 / 2e6 * 1e3
        self.assertGreater(pairs["fsdp"]["step_ms"]["median"], needs)
        self.assertGreater(pairs["hsdp"]["step_ms"]["median"], between["hsdp"]["all_reduce"] / 2e6 * 1e3)
        self.assertLess(pairs["hsdp"]["step_ms"]["median"], needs)
        self.assertLess(needs, hosts["fsdp"]["step_ms"]["median"])

    def test_train_and_plan_agree_where_the_link_decides(self):
        slow, _ = self.compare("--strategies", "fsdp", *SLOW)
        code, _, err = tool("plan", *self.options()[:4], "--seq-len", 16, "--strategies", "fsdp", *SLOW, "--json", self.json)
        self.assertEqual(code, 0, err)
        planned = json.loads(self.json.read_text())["runs"][0]["step_ms"]
        planned = planned["median"] if isinstance(planned, dict) else planned
        self.assertGreater(slow["fsdp"]["step_ms"]["median"], planned * 0.97)
        code, out, err = tool("train", *self.options(), "--steps", 2, *SLOW)
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"(?m)^link: woke \d+ us late")

    def test_bench_times_a_lone_transfer(self):
        code, out, err = tool("bench", "all_gather,all_reduce", "--ranks", 2, "--min-bytes", "64K", "--max-bytes", "64K", "--iterations", 9,
                              "--warmup", 1, "--link", "1ms,10MB/s", "--json", self.json)
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"(?m)^# link: woke \d+ us late")
        times = {row["op"]: row["time_us"] for row in json.loads(self.json.read_text())["results"] if not row["in_place"]}
        for op, least in (("all_gather", 1000 + 32768 / 10), ("all_reduce", 2000 + 65536 / 10)):
            self.assertGreaterEqual(times[op]["min"], least - 1)
            self.assertLess(times[op]["min"], least + 3000)

    def test_mistakes_are_refused_before_anything_runs(self):
        for options, words in (
                (("--link", "fast"), "--link: 'fast' is not a link"),
                (("--link", "20us,0MB/s"), "is not a rate of 1kB/s or more"),
                (("--link-intra", "5us,5GB/s"), "--link-intra has no effect without --link"),
                (("--hosts", "2"), "--hosts has no effect without --link"),
                ((*SLOW, "--hosts", "3"), "--hosts 3: 4 ranks don't divide into hosts of equal size; use a divisor of 4"),
                ((*SLOW, "--hosts", "0"), "--hosts"),
                ((*SLOW, "--link-intra", "5us,5GB/s"), "with one host all links are those of --link"),
                ((*SLOW, "--hosts", "2", "--link-intra", "near"), "--link-intra: 'near' is not a link")):
            for command in (("train", *self.options(), "--steps", 1), ("compare", *self.options(), "--steps", 1), ("bench", "--ranks", 4)):
                code, out, err = tool(*command, *options)
                self.assertEqual(code, 2, (command, options))
                self.assertEqual(out, "")
                self.assertIn(words, err)
        code, _, err = tool("bench", "--cluster", self.json, *SLOW)
        self.assertEqual(code, 2)
        self.assertIn("--link has no effect with --cluster", err)

    def test_a_rank_that_dies_while_transfers_are_slept_for_ends_the_run(self):
        mark = f"MARK_{uuid.uuid4().hex}"
        command = [TOOL, "train", *map(str, self.options(2)), "--steps", "2", "--link", "1s,2kB/s"]
        run = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, mark: "1"})
        try:
            victim, until = None, time.monotonic() + 30
            while victim is None and time.monotonic() < until:
                for folder in pathlib.Path("/proc").glob("[0-9]*"):
                    try:
                        words = (folder / "environ").read_bytes().split(b"\0")
                    except OSError:
                        continue
                    if f"{mark}=1".encode() in words and b"TESSERA_RANK=1" in words:
                        victim = int(folder.name)
                time.sleep(0.05)
            self.assertIsNotNone(victim)
            time.sleep(2)  # it sleeps: the first gather needs a minute
            os.kill(victim, signal.SIGKILL)
            _, err = run.communicate(timeout=30)
        finally:
            run.kill()
        self.assertEqual(run.returncode, 1, err)
        self.assertTrue(re.search(r"rank 1 .*(died|killed|signal)", err.splitlines()[-1]), err)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
