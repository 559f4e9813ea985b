"""A backend whose ranks must be started by another program: every subcommand starts its ranks through that program.

    launch_prefix_test.py TOOL MODULES PROGRAMS     folders of the module with that backend, and of `parcelrun`
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
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
