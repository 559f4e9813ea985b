"""scripts/gpu-check where there is no GPU: it says so, and a step that fails is a failure whatever the others do.

Its tools are stand-ins in a PATH of the test's own: what a GPU does with the rest is seen only where there is one.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(sys.argv.pop(1)) / "scripts/gpu-check"


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "bin").mkdir()

    def stand_in(self, name, *lines):
        path = self.folder / "bin" / name
        path.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
        path.chmod(0o755)

    def run_it(self, *arguments):
        out = self.folder / "out"
        done = subprocess.run([sys.executable, SCRIPT, "--out", out, *arguments], env={"PATH": str(self.folder / "bin")},
                              text=True, capture_output=True, timeout=60, check=False)
        report = out / "gpu-check.json"
        return done, json.loads(report.read_text())["steps"] if report.exists() else []

    def test_no_gpu_is_said_and_nothing_follows(self):
        done, steps = self.run_it()
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertEqual([(step["step"], step["result"]) for step in steps], [("gpu", "FAILED")])
        self.assertIn("nvidia-smi: not here", done.stdout)

    def test_a_build_that_fails_ends_it_with_its_last_line(self):
        self.stand_in("nvidia-smi", "echo 'Stand-in, 1, 1 MiB, 9.0'")
        self.stand_in("cmake", "echo configured badly", "exit 4")
        self.stand_in("dpkg-deb")
        done, steps = self.run_it()
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertEqual(steps[-1]["step"], "build")
        self.assertIn("code 4: configured badly", steps[-1]["text"])

    def test_an_unknown_step_is_refused(self):
        done, _ = self.run_it("--only", "nonsense")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--list names them", done.stderr)

    def test_every_step_is_listed(self):
        done, _ = self.run_it("--list")
        self.assertEqual(done.returncode, 0)
        self.assertEqual(done.stdout.split("\n")[:3], ["gpu", "unpack", "build"])


if __name__ == "__main__":
    unittest.main()
