"""scripts/gpu-check without a GPU: it reports that, and one failed step fails the run regardless of the others.

The tools that it calls are stubs in the test's own PATH; the steps themselves can be tested only on a GPU.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest
from importlib.machinery import SourceFileLoader

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

    def test_reports_missing_gpu_and_stops(self):
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

    def test_compares_measurements_with_limits(self):
        loader = SourceFileLoader("gpu_check", str(SCRIPT))
        sys.dont_write_bytecode = True
        script = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
        loader.exec_module(script)
        script.BUILD = self.folder
        (self.folder / "bench_nccl_overhead").touch()
        row = {"alone_us": 12.0, "direct_alone_us": 10.0, "in_a_row_us": 101.0, "direct_in_a_row_us": 100.0}

        def overhead(**other):
            rows = [dict(row, bytes=1024, **other), dict(row, bytes=1 << 20, **other)]
            check = types.SimpleNamespace(out=self.folder, figures={}, command=lambda *_, **__: "")
            (self.folder / "nccl-overhead.json").write_text(json.dumps(rows))
            return script.nccl_overhead(check)

        self.assertEqual(overhead(), "+2.0 us at 1 KiB, +1.0% at most from 1 MiB")
        self.assertRaises(script.Failed, overhead, alone_us=13.5)
        self.assertRaises(script.Failed, overhead, in_a_row_us=103.0)

        def cost(fsdp):
            step = [{"loss": 1, "tokens_per_second": fsdp}] * 8
            script.training = lambda *_, **__: step
            check = types.SimpleNamespace(out=self.folder, figures={}, command=lambda *_, **__: '{"tokens_per_second": 1000}')
            return script.engine_cost(check)

        self.assertIn("+1.0% by fsdp", cost(990))
        self.assertRaises(script.Failed, cost, 970)
        script.NEEDED, script.STEPS = (), {"late": lambda _: self.fail("it was begun")}
        late = types.SimpleNamespace(out=self.folder, figures={}, results=[], begin=0, left=lambda: 5)
        self.assertEqual(script.run(late, ""), 1)
        self.assertIn("no time was left", late.results[0]["text"])
        self.assertRaises(script.Failed, script.passed_tests, "[  PASSED  ] 0 tests.")
        self.assertRaises(script.Failed, script.passed_tests, "[  PASSED  ] 3 tests.\n[  SKIPPED ] 1 test")
        self.assertEqual(script.passed_tests("[  PASSED  ] 3 tests."), 3)


if __name__ == "__main__":
    unittest.main()
