"""A backend whose ranks must be started by another program: every subcommand starts its ranks through that program.

    launch_prefix_test.py TOOL MODULES PROGRAMS     folders of the module with that backend, and of `parcelrun`
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree as xml

TOOL, MODULES, PROGRAMS = None, None, None


def tessera(*arguments, path=True, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    clean.update(environment, TESSERA_PLUGIN_PATH=MODULES)
    if path:
        clean["PATH"] = PROGRAMS + os.pathsep + clean["PATH"]
    return subprocess.run([TOOL, *arguments], text=True, capture_output=True, timeout=120, env=clean)


class LaunchPrefixTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def test_bench_measures_each_backend(self):
        file = self.folder / "out.json"
        done = tessera("bench", "all_reduce", "--backends", "shm,parcel", "--ranks", "2", "--max-bytes", "512", "--factor", "8",
                       "--iterations", "3", "--check", "--json", str(file), "--plot", str(self.folder / "out.svg"))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        found = json.loads(file.read_text())
        self.assertEqual([r["backend"] for r in found["results"]], ["shm"] * 6 + ["parcel"] * 6)
        self.assertEqual([fit["backend"] for fit in found["fits"]], ["shm", "parcel"])
        self.assertEqual(len([line for line in done.stdout.splitlines() if not line.startswith("#")]), 6)
        beside = done.stdout[done.stdout.index("# Side by side"):].splitlines()
        self.assertEqual(beside[2].split(), ["#", "op", "size", "shm", "parcel"])
        self.assertEqual(len(beside), 3 + 3)
        curves = [p for p in xml.parse(self.folder / "out.svg").iter("{http://www.w3.org/2000/svg}path")]
        self.assertEqual([(p.get("data-measure"), p.get("data-backend")) for p in curves],
                         [(measure, backend) for measure in ("latency", "busbw") for backend in ("shm", "parcel")])
        self.assertEqual(len({p.get("stroke") for p in curves}), 2, "a colour each")
        for line in beside[3:]:
            self.assertRegex(line, r"^# all_reduce +\d+ .*\d+\.\d\d \*")

    def test_train_compare_and_run(self):
        data = self.folder / "text"
        data.write_text("the quick brown fox jumps over the lazy dog. " * 200)
        options = ["--model", "gpt-nano", "--steps", "2", "--global-batch", "4", "--seq-len", "16", "--ranks", "2", "--data", str(data)]
        done = tessera("train", *options, "--backend", "parcel")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len([line for line in done.stdout.splitlines() if line.startswith("step ")]), 2, done.stdout)
        plain = tessera("train", *options, "--backend", "shm")
        last = [text.splitlines()[-1] for text in (done.stdout, plain.stdout)]
        self.assertEqual(last[0], last[1], "the same parameters, whoever started the ranks")
        done = tessera("compare", *options, "--strategies", "ddp,fsdp", TESSERA_BACKEND="parcel")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("ddp fsdp end bitwise equal", done.stdout)
        done = tessera("run", "-n", "3", "--no-tag", "--", "/bin/sh", "-c", "echo $OMPI_COMM_WORLD_RANK.$TESSERA_RANK", TESSERA_BACKEND="parcel")
        self.assertEqual((done.returncode, sorted(done.stdout.split())), (0, ["0.", "1.", "2."]), done.stderr)

    def test_the_place_in_a_world_around_the_tool_is_not_passed_on(self):
        around = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", PMIX_RANK="0", PMI_RANK="0", PMI_SIZE="1")
        done = tessera("bench", "all_reduce", "--backend", "parcel", "--ranks", "2", "--max-bytes", "64", "--iterations", "2", "--check",
                       **around)
        self.assertEqual((done.returncode, done.stdout.count("# all_reduce")), (0, 1), done.stderr)
        done = tessera("run", "-n", "2", "--no-tag", "--", "/bin/sh", "-c", "echo .$RANK.$PMI_SIZE.$PMIX_RANK.", TESSERA_BACKEND="parcel", **around)
        self.assertEqual(done.stdout.split(), ["...."] * 2, done.stderr)
        # The control: without a launcher of its own, a program keeps what is around.
        done = tessera("run", "-n", "2", "--no-tag", "--", "/bin/sh", "-c", "echo .$RANK.$PMI_SIZE.$PMIX_RANK.", **around)
        self.assertEqual(done.stdout.split(), [".0.1.0."] * 2, done.stderr)

    def test_a_program_that_starts_no_rank_is_ended_at_the_deadline(self):
        begin = time.monotonic()
        done = tessera("bench", "all_reduce", "--backend", "parcel", "--ranks", "2", TESSERA_TIMEOUT="1s", PARCEL_WAITS_FOR="the resources of a job")
        self.assertLess(time.monotonic() - begin, 1 + 5)
        self.assertEqual((done.returncode, done.stderr.splitlines()[-1]),
                         (1, "tessera: parcelrun has started none of the 2 ranks within 1s (TESSERA_TIMEOUT): "
                             "parcelrun: waiting for the resources of a job"))
        # The control: ranks that have started may take longer.
        done = tessera("run", "-n", "2", "--no-tag", "--", "/bin/sh", "-c", "sleep 2; echo $OMPI_COMM_WORLD_RANK", TESSERA_BACKEND="parcel",
                       TESSERA_TIMEOUT="1s")
        self.assertEqual((done.returncode, sorted(done.stdout.split())), (0, ["0", "1"]), done.stderr)

    def test_failures_return_code_1_and_end_with_cause(self):
        script = "if [ $OMPI_COMM_WORLD_RANK = 1 ]; then exit 9; fi"
        done = tessera("run", "-n", "2", "--no-tag", "--", "/bin/sh", "-c", script, TESSERA_BACKEND="parcel")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.splitlines()[-1],
                         "tessera: parcelrun ended with code 9: parcelrun noticed that a rank ended with 9.")

    def test_invalid_usage(self):
        done = tessera("run", "-n", "2", "--", "/bin/true", TESSERA_BACKEND="parcel")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
        self.assertIn("--no-tag", done.stderr)
        done = tessera("bench", "all_reduce", "--backend", "parcel", "--ranks", "2", path=False)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("can't start 'parcelrun'", done.stderr)


if __name__ == "__main__":
    PROGRAMS, MODULES, TOOL = sys.argv.pop(3), sys.argv.pop(2), sys.argv.pop(1)
    unittest.main()
