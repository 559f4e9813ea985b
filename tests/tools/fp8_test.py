"""Products in 8-bit floating point (--precision fp8) as a user trains, compares, plans, saves and exports with them."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = None
TEXT = pathlib.Path(__file__).resolve().parents[2] / "README.md"
# The calm part of the curve, as docs/mixed_precision.md says: with this warm-up, runs of bf16 whose sums have another order stay
# within NOISE of each other, and fp8 within DISTANCE of bf16.
CURVE = ["--model", "gpt-nano", "--strategy", "fsdp", "--steps", 150, "--lr", "1e-3", "--warmup", 50]  # on the default text
LAST, SEEDS = 50, (0, 1)  # losses of a run that are averaged, and the runs
NOISE, DISTANCE = 0.001, 0.005


def tool(*arguments):
    done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=280, env=os.environ)
    return done.returncode, done.stdout, done.stderr


class Fp8Test(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_tool(self, command, *arguments):
        text = [] if arguments[: len(CURVE)] == tuple(CURVE) else ["--data", TEXT]
        code, out, err = tool(command, *text, "--threads", "1", "--json", self.folder / "j", *arguments)
        self.assertEqual(code, 0, err)
        self.err = err
        text = (self.folder / "j").read_text()
        return json.loads(text) if command == "compare" else [json.loads(line) for line in text.splitlines()]

    def small(self, *arguments, ranks=2):
        lines = self.run_tool("train", "--ranks", ranks, "--global-batch", "12", "--seq-len", "16", *arguments)
        return next(line["final_parameters_hash"] for line in lines if "final_parameters_hash" in line)

    def test_strategies_are_bitwise_equal_and_cost_formulas(self):
        ends = set()
        for scaling in ("current", "delayed", "none"):
            runs = self.run_tool("compare", "--model", "gpt-nano", "--ranks", "4", "--global-batch", "12", "--seq-len", "16", "--steps", "4",
                                 "--precision", "fp8", "--fp8-scaling", scaling, "--reduce-dtype", "f32")["runs"]
            self.assertEqual(len(runs), 5)
            self.assertEqual(len({run["final_parameters_hash"] for run in runs}), 1)
            ends.add(runs[0]["final_parameters_hash"])
            for run in runs:
                self.assertEqual(run["wire_bytes_per_step"], run["formula_bytes_per_step"], run["strategy"])
        self.assertEqual(len(ends), 3, "the scalings differ")

    def test_loss_is_close_to_that_of_bf16_unless_scales_are_missing(self):
        def final(seed, precision, *options, ranks=2):
            lines = self.run_tool("train", *CURVE, "--ranks", ranks, "--seed", seed, "--precision", precision, *options)
            losses = [line["loss"] for line in lines if "loss" in line]
            self.assertEqual(len(losses), 150)
            return sum(losses[-LAST:]) / LAST

        bf16 = {seed: final(seed, "bf16") for seed in SEEDS}

        def distance(*precision, **ranks):
            return abs(sum(final(seed, *precision, **ranks) - bf16[seed] for seed in SEEDS) / len(SEEDS))

        self.assertLess(distance("bf16", ranks=1), NOISE, "sums in another order")
        for scaling in ("current", "delayed"):
            self.assertLess(distance("fp8", "--fp8-scaling", scaling), DISTANCE, scaling)
        self.assertGreater(distance("fp8", "--fp8-scaling", "none"), 3 * DISTANCE, "the control")

    def test_resumes_and_changes_its_scaling(self):
        options = ["--precision", "fp8", "--fp8-scaling", "delayed"]
        whole = self.small("--model", "gpt-nano", *options, "--steps", "4")
        self.small("--model", "gpt-nano", *options, "--steps", "2", "--save", self.folder / "c")
        self.assertEqual(self.small(*options, "--steps", "4", "--resume", self.folder / "c"), whole)
        self.assertNotIn("history", self.err)
        self.small("--precision", "bf16", "--steps", "4", "--resume", self.folder / "c", ranks=3)
        self.small("--model", "gpt-nano", "--precision", "bf16", "--steps", "2", "--save", self.folder / "d")
        self.assertNotEqual(self.small(*options, "--steps", "4", "--resume", self.folder / "d"), whole)
        self.assertIn("has no history for --fp8-scaling delayed, which starts anew", self.err)

    def test_exports_the_model_without_histories(self):
        out = self.folder / "hf"
        self.small("--model", "gpt-nano", "--precision", "fp8", "--fp8-scaling", "delayed", "--steps", "2", "--export", out)
        self.assertNotIn(b"fp8_amax", (out / "model.safetensors").read_bytes())
        code, _, err = tool("train", "--init", out, "--lora", "4", "--quantize", "nf4", "--precision", "fp8", "--ranks", "1", "--steps", "1")
        self.assertEqual(code, 2)
        self.assertIn("--precision fp8 with --quantize nf4", err)
        again = self.small("--init", out, "--precision", "fp8", "--fp8-scaling", "delayed", "--steps", "1")
        self.assertNotEqual(again, self.small("--init", out, "--precision", "bf16", "--steps", "1"), "the control: fp8 is used")

    def test_plans_with_the_peak_of_the_cluster(self):
        def plan(cluster, precision):
            return tool("plan", "--model", "gpt2", "--cluster", cluster, "--ranks", "8", "--strategy", "fsdp", "--global-batch", "64", "--seq-len", "1024",
                        "--precision", precision, "--json", self.folder / "p")

        times = {}
        for precision in ("bf16", "fp8"):
            code, _, err = plan("h100-400g", precision)
            self.assertEqual(code, 0, err)
            times[precision] = json.loads((self.folder / "p").read_text())
        self.assertNotEqual(times["bf16"], times["fp8"])
        code, out, err = plan("a100-200g", "fp8")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("no peak for products of fp8; add compute.peak_flops.fp8", err)

    def test_wrong_combinations_are_one_line(self):
        small = ["--model", "gpt-nano", "--ranks", "2", "--steps", "1"]
        for arguments, text in (
            (["--fp8-scaling", "delayed"], "--fp8-scaling needs --precision fp8"),
            (["--precision", "fp8", "--fp8-scaling", "late"], "late not in {current,delayed,none}"),
            (["--precision", "fp8", "--fp8-scaling", "delayed", "--strategy", "local_sgd"], "replicas would scale by different histories"),
            (["--precision", "fp8", "--reduce-dtype", "f16"], "--reduce-dtype f16 with --precision fp8"),
            (["--precision", "fp8", "--f32-modules", "type:Gpt2Block"], "leaves no linear layer"),
        ):
            code, out, err = tool("train", *small, *arguments)
            self.assertEqual((code, out), (2, ""), arguments)
            self.assertIn(text, err)
            self.assertEqual(len(err.strip().splitlines()), 1, err)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
