"""scripts/gpu-check without a GPU: it reports that, one failed part fails the run, and every part detects what it looks for.

The tools that it calls are stubs in the test's own PATH, or their results are made up.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tarfile
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
        self.stand_in("nvcc")
        self.stand_in("python3", f"echo {self.folder}")
        (self.folder / "include").mkdir()
        (self.folder / "include/nccl.h").touch()
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

    def test_a_signal_leaves_a_summary_and_an_archive(self):
        self.stand_in("nvidia-smi", "echo 'Stand-in, 1, 1 MiB, 9.0'")
        self.stand_in("nvcc")
        self.stand_in("python3", f"echo {self.folder}")
        self.stand_in("cmake", "/bin/kill -TERM $PPID", "exec /bin/sleep 20")
        self.stand_in("dpkg-deb")
        (self.folder / "include").mkdir()
        (self.folder / "include/nccl.h").touch()
        done, steps = self.run_it()
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertEqual((steps[-1]["step"], steps[-1]["result"]), ("build", "STOPPED"))
        with tarfile.open(self.folder / "out/logs.tar.gz") as archive:
            self.assertIn("gpu.log", archive.getnames())


def load_script():
    sys.dont_write_bytecode = True
    loader = SourceFileLoader("gpu_check", str(SCRIPT))
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    loader.exec_module(script)
    return script


class Machine:
    """Stands in for a Check: each command writes what the part expects, unless `faults` says otherwise. A fault is a function of the
    command's name that returns a changed value, or None for the right one."""

    def __init__(self, out, **faults):
        self.out, self.faults, self.figures, self.torch, self.commands = out, faults, {}, "python3", {}

    def fault(self, kind, name, right):
        changed = self.faults[kind](name) if kind in self.faults else None
        return right if changed is None else changed

    def command(self, name, command, limit=0, **settings):
        command = self.commands[name] = [str(part) for part in command]
        path = pathlib.Path(command[command.index("--json") + 1]) if "--json" in command[:-1] else None
        value = self.fault("json", name, None)
        if "train" in command:
            steps = int(command[command.index("--steps") + 1])
            speed = self.fault("speed", name, 1000.0)
            end = "compressed" if "powersgd" in name else "plain"
            losses = [{"loss": self.fault("loss", name, 2.0), "tokens_per_second": speed}] * self.fault("steps", name, steps)
            hashed = {"final_parameters_hash": self.fault("hash", name, f"{end} of {command[command.index('--ranks') + 1]}"),
                      "graphs": self.fault("graphs", name, "--no-graphs" not in command)}
            path.write_text("".join(json.dumps(line) + "\n" for line in [*losses, hashed]))
            text = self.fault("log", name, "memory moves by IPC")
            (self.out / f"{name}.log").write_text(text)
            return text
        if path is not None:
            path.write_text(json.dumps(value))
        return self.fault("text", name, "[  PASSED  ] 3 tests.\n======== ERROR SUMMARY: 0 errors")


class Parts(unittest.TestCase):
    """Each part passes with right results, and fails with one that is wrong in the way that it looks for."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.script = load_script()
        self.script.BUILD = self.folder

    def passes(self, part, **faults):
        return self.script.STEPS[part](Machine(self.folder, **faults))

    def fails(self, part, expected, **faults):
        with self.assertRaises(self.script.Failed) as caught:
            self.script.STEPS[part](Machine(self.folder, **faults))
        self.assertIn(expected, str(caught.exception))

    def only(self, name, value):
        """A fault of one command."""
        return lambda asked: value if asked == name else None

    def test_info(self):
        def found(cuda, nccl):
            return lambda _: json.dumps({"devices": [{"name": "cuda", "available": cuda, "reason": "no driver"}],
                                         "backends": [{"name": "nccl", "available": nccl, "reason": "no library"}]})
        self.assertEqual(self.passes("info", text=found(True, True)), "cuda and nccl available")
        self.fails("info", "cuda: no driver", text=found(False, True))
        self.fails("info", "nccl: no library", text=found(True, False))

    def test_kernels_and_sanitizers(self):
        self.assertEqual(self.passes("kernels"), "3 tests")
        self.assertIn("0 errors", self.passes("memcheck"))
        for part in ("kernels", "memcheck", "racecheck"):
            self.fails(part, "no test ran", text=lambda _: "[  PASSED  ] 0 tests.")
            self.fails(part, "some were skipped", text=lambda _: "[  PASSED  ] 3 tests.\n[  SKIPPED ] 1 test")

    def test_a_program_that_reports_an_error_fails(self):
        options = types.SimpleNamespace(out=self.folder, torch="python3", limit=60)
        check = self.script.Check(options)
        self.assertRaises(self.script.Failed, check.command, "sanitizer", ["/bin/sh", "-c", "echo 1 error; exit 9"])
        with self.assertRaises(self.script.Failed) as caught:
            check.command("late", ["/bin/sleep", "20"], limit=1)
        self.assertIn("not done within 1 s", str(caught.exception))

    def test_losses(self):
        self.assertIn("0.0e+00", self.passes("losses"))
        self.fails("losses", "losses differ by 1.0e-03", loss=self.only("llama-nano-cuda", 2.002))
        self.fails("losses", "gpt-nano: 19 losses", steps=lambda name: 19 if name.startswith("gpt-nano") else None)

    def test_processor(self):
        def differs(name):
            raise self.script.Failed("code 1: FAILED (failures=1)")
        self.assertIn("own products have their hashes on ", self.passes("processor"))
        self.fails("processor", "code 1", text=differs)

    def test_four_bits(self):
        self.passes("four bits")
        self.fails("four bits", "differ by", loss=self.only("four-bits-cuda", 2.002))

    def test_several_ranks(self):
        self.assertIn("nccl", self.passes("several ranks"))
        for way in ("shm-ipc", "shm", "tcp", "nccl"):
            self.fails("several ranks", "differ", hash=self.only(f"ranks-{way}-4-fsdp", "other"))
        self.fails("several ranks", "did not use IPC", log=lambda _: "staged")
        self.fails("several ranks", "took nothing off", hash=lambda name: "2 ranks" if "-2-" in name else "4 ranks")

    def test_strategies(self):
        def runs(*hashes):
            return {"json": lambda _: {"runs": [{"final_parameters_hash": one} for one in hashes]}}
        self.passes("strategies", **runs("a", "a", "a", "a"))
        self.fails("strategies", "2 different ends", **runs("a", "a", "a", "b"))
        self.fails("strategies", "of 3 runs", **runs("a", "a", "a"))

    def test_offload(self):
        self.assertIn("2.00 times as long", self.passes("offload", speed=self.only("offload-host", 500.0)))
        self.fails("offload", "other bits", hash=self.only("offload-host", "other"))
        self.fails("offload", "other bits", loss=self.only("offload-host", 3.0))

    def test_graphs(self):
        self.passes("graphs", speed=self.only("graphs-with", 1500.0))
        self.fails("graphs", "0.90 times", speed=self.only("graphs-with", 900.0))
        self.fails("graphs", "not replayed by default", speed=self.only("graphs-with", 1500.0), graphs=self.only("graphs-with", False))
        self.fails("graphs", "other bits", speed=self.only("graphs-with", 1500.0), hash=self.only("graphs-with", "other"))

    def test_attention(self):
        def measured(own=(100.0, 250.0), cudnn=(80.0, 200.0), libraries="attention by cuDNN 9.26.0", **more):
            def table(name):
                if name == "attention-info":
                    return None
                forward, backward = own if name.endswith("own") else cudnn
                return {"kernels": [{"name": "attention forward", "us": forward}, {"name": "attention backward", "us": backward},
                                    {"name": "norm", "us": 900.0}]}
            state = json.dumps({"devices": [{"name": "cuda", "libraries": libraries}]})
            more.setdefault("text", self.only("attention-info", state))
            return {"json": table, **more}
        self.assertEqual(self.passes("attention", **measured()),
                         "attention forward 80%, attention backward 80% of the speed of cuDNN 9.26.0")
        self.fails("attention", "attention forward 40%", **measured(own=(100.0, 250.0), cudnn=(40.0, 200.0)))
        self.fails("attention", "attention backward 60%", **measured(own=(100.0, 250.0), cudnn=(80.0, 150.0)))
        self.fails("attention", "other bits", **measured(hash=self.only("attention-bits-1", "other")))
        info = json.dumps({"devices": [{"name": "cuda", "libraries": "attention by cuDNN 9.26.0"}]})
        self.fails("attention", "no test ran", **measured(
            text=lambda name: {"attention-info": info, "attention-cudnn": "[  PASSED  ] 0 tests."}.get(name)))
        with self.assertRaisesRegex(self.script.Skipped, "no cuDNN"):
            self.passes("attention", **measured(libraries="attention by this library: cuda: no cuDNN: not found"))

    def test_limits(self):
        def shares(gbps=3000, **kernels):
            table = {"limits": {"tflops": 1, "gbps": gbps}, "kernels": [{"name": name, "of_limit": share} for name, share in kernels.items()]}
            return {"json": lambda _: table, "text": lambda _: "the largest gaps: ..."}
        for name, floor in (("adamw", 0.76), ("sum and layer norm", 0.76), ("qkv forward", 0.63), ("up dw and dbias", 0.4), ("up dbias", 0.54),
                            ("attention backward", 0.21), ("cross-entropy forward", 0.8)):
            self.assertIn("gaps", self.passes("limits", **shares(**{name: floor + 0.01})))
            self.fails("limits", f"{name} {100 * floor - 1:.0f}%", **shares(**{name: floor - 0.01}))
        self.fails("limits", "no kernel", **shares())
        self.assertIn("gaps", self.passes("limits", **shares(4260, **{"up dbias": 0.45, "layer norm backward": 0.4})))
        self.fails("limits", "up dbias 39%", **shares(4260, **{"up dbias": 0.39, "layer norm backward": 0.4}))
        self.fails("limits", "adamw 75%", **shares(4260, adamw=0.75))

    def test_speed(self):
        # Half of the 16.384 s that 16 x 1024 tokens take at 1000 tokens a second.
        counts = json.dumps({"calls": 2, "columns": 0, "reads": 3.35e12 * 3.096, "writes": 3.35e12, "operations": 1})
        def torch(speed):
            texts = {"torch": json.dumps({"tokens_per_second": speed, "fastest": "compiled"}), "kernel-counts": counts}
            return texts.get
        self.script.shutil.which = lambda name: name
        text = self.passes("speed", text=torch(800))
        self.assertIn("1.25 of PyTorch's", text)
        self.assertIn("50% of an H100's peaks", text)
        self.fails("speed", "0.80 of PyTorch's", text=torch(1250))

    def test_engine_cost(self):
        def cost(alone, gpus=1):
            texts = {"gpus": "0\n" * gpus, "alone-0": json.dumps({"tokens_per_second": alone}), "alone-1": json.dumps({"tokens_per_second": alone})}
            return {"text": texts.get}
        self.assertIn("+4.0% by fsdp on 1 of", self.passes("engine cost", **cost(1040)))
        self.fails("engine cost", "+6.0% by fsdp", **cost(1060))
        self.assertIn("+10.0% by fsdp on 2 of", self.passes("engine cost", **cost(550, 2)))
        self.fails("engine cost", "+20.0% by fsdp", **cost(600, 2))

    def test_libtorch(self):
        self.script.find_torch = lambda _: "here"
        two = "[  PASSED  ] 3 tests.\n" * 2
        def found(plain, fsdp, hashes=("same", "same"), **texts):
            lines = {f"libtorch-{name}-{turn}": json.dumps({"tokens_per_second": speed})
                     for name, speed in (("plain", plain), ("fsdp", fsdp)) for turn in range(3)}
            lines |= {f"libtorch-2-{backend}": two for backend in ("shm", "tcp", "nccl")} | texts
            return {"text": lines.get, "json": lambda _: {"runs": [{"final_parameters_hash": end} for end in hashes]}}
        self.assertEqual(self.passes("libtorch", **found(100, 99)),
                         "3 tests with 1 and 2 ranks; fsdp on one rank has 0.990 of the plain program's tokens/s (100)")
        self.fails("libtorch", "0.970 of the plain", **found(100, 97))
        self.fails("libtorch", "two ranks over tcp", **found(100, 99, **{"libtorch-2-tcp": "[  PASSED  ] 3 tests."}))
        self.fails("libtorch", "different bits", **found(100, 99, ("same", "other")))
        self.fails("libtorch", "no test ran", **found(100, 99, **{"libtorch-1": "[  PASSED  ] 0 tests."}))
        self.script.find_torch = lambda _: None
        with self.assertRaisesRegex(self.script.Skipped, "^no PyTorch 2.11 or newer here$"):
            self.passes("libtorch")

    def test_nccl_overhead(self):
        def overhead(gpus=2, **other):
            row = {"alone_us": 12.0, "direct_alone_us": 10.0, "in_a_row_us": 101.0, "direct_in_a_row_us": 100.0}
            return {"json": lambda _: [dict(row, bytes=1024, **other), dict(row, bytes=1 << 20, **other), dict(row, bytes=256 << 20)],
                    "text": lambda name: "0\n" * gpus if name == "gpus" else None}
        self.assertEqual(self.passes("nccl overhead", **overhead()), "+2.0 us at 1 KiB, +1.0% at most from 1 MiB with 2 GPUs")
        self.assertIn("the goal of 3 us is missed", self.passes("nccl overhead", **overhead(alone_us=13.5)))
        self.fails("nccl overhead", "+10.5 us", **overhead(alone_us=20.5))
        self.fails("nccl overhead", "+5.0%", **overhead(in_a_row_us=105.0))
        self.assertEqual(self.passes("nccl overhead", **overhead(1, in_a_row_us=105.0)), "+2.0 us at 1 KiB, +1.0% at most from 256 MiB with 1 GPU")
        machine = Machine(self.folder, **overhead())
        self.script.STEPS["nccl overhead"](machine)
        self.assertIn("run --ranks 2 -- ", " ".join(machine.commands["nccl-overhead"]), "one rank's collectives are copies")

    def test_nccl_windows(self):
        rows = [{"bytes": 8 << 20, "plain_us": 50.0, "symmetric_us": 45.0}]
        two = {"text": lambda name: "0\n1\n" if name == "gpus" else None, "json": lambda _: rows}
        self.assertEqual(self.passes("nccl windows", **two), "time of all_gather with windows: -10.0% at 8 MiB")
        with self.assertRaisesRegex(self.script.Skipped, "^1 GPU; gathers between windows need two$"):
            self.passes("nccl windows", **dict(two, text=lambda name: "0\n" if name == "gpus" else None))

    def test_build_needs_the_compiler_and_nccl(self):
        self.script.find_nvcc = lambda: None
        self.fails("build", "no nvcc")
        self.script.find_nvcc = lambda: "/usr/local/cuda/bin/nvcc"
        self.script.find_nccl = lambda _: (None, None)
        self.fails("build", "no nccl.h")

    def test_a_part_without_time_is_a_failure_by_name(self):
        self.script.NEEDED, self.script.STEPS = (), {"late": lambda _: self.fail("it was begun")}
        late = self.script.Check(types.SimpleNamespace(out=self.folder, torch="python3", limit=5))
        self.assertEqual(self.script.run(late, []), 1)
        self.assertEqual(late.results[0]["step"], "late")
        self.assertIn("no time was left", late.results[0]["text"])

    def test_no_part_is_without_a_control(self):
        # unpack only makes files available; the build fails without them.
        controlled = {"gpu", "build", "info", "kernels", "memcheck", "racecheck", "losses", "four bits", "processor", "several ranks", "strategies",
                      "offload", "graphs", "attention", "limits", "speed", "engine cost", "libtorch", "nccl overhead",
                      "nccl windows"}
        self.assertEqual(set(self.script.STEPS) - {"unpack"}, controlled, "a new part needs a control above")


if __name__ == "__main__":
    unittest.main()
