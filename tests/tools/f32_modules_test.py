"""Modules that stay in f32 (--f32-modules) as a user trains, saves, resumes and exports them."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60
NORMS = ["--precision", "bf16", "--f32-modules", "type:LayerNorm"]


def tool(*arguments):
    done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=100, env=os.environ)
    return done.returncode, done.stdout, done.stderr


class F32ModulesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.text = self.folder / "text.txt"
        self.text.write_text(TEXT)

    def run_tool(self, command, *arguments, ranks=2, model="gpt-nano"):
        common = ["--ranks", ranks, "--global-batch", "12", "--seq-len", "16", "--threads", "1", "--data", self.text, "--json", self.folder / "j"]
        named = [] if "--init" in arguments else ["--model", model]
        code, out, err = tool(command, *common, *named, *arguments)
        self.assertEqual(code, 0, err)
        text = (self.folder / "j").read_text()
        return json.loads(text) if command == "compare" else [json.loads(line) for line in text.splitlines()]

    def hash_of(self, *arguments, **keywords):
        return next(line["final_parameters_hash"] for line in self.run_tool("train", *arguments, **keywords) if "final_parameters_hash" in line)

    def test_strategies_agree_and_cost_formulas(self):
        for arguments, alike in ((["--reduce-dtype", "f32"], 1), (["--strategies", "ddp,zero1,zero2,fsdp"], 1)):
            runs = self.run_tool("compare", *NORMS, "--steps", "4", "--clip-norm", "0.5", *arguments, ranks=4)["runs"]
            self.assertEqual(len({run["final_parameters_hash"] for run in runs}), alike)
            for run in runs:
                self.assertEqual(run["wire_bytes_per_step"], run["formula_bytes_per_step"], run["strategy"])
            plain = self.run_tool("compare", "--precision", "bf16", "--steps", "4", "--clip-norm", "0.5", *arguments, ranks=4)["runs"]
            for mixed, narrow in zip(runs, plain, strict=True):
                self.assertNotEqual(mixed["final_parameters_hash"], narrow["final_parameters_hash"])
                self.assertGreater(mixed["model_state_bytes"]["parameter"], narrow["model_state_bytes"]["parameter"])
                self.assertLess(mixed["model_state_bytes"]["optimizer"], narrow["model_state_bytes"]["optimizer"], "no masters beside f32")

    def test_resumes_with_same_or_other_selection(self):
        whole = self.hash_of(*NORMS, "--steps", "4")
        self.run_tool("train", *NORMS, "--steps", "2", "--save", self.folder / "c")
        self.assertEqual(self.hash_of(*NORMS, "--steps", "4", "--resume", self.folder / "c"), whole)
        others = (["--precision", "bf16"], ["--precision", "bf16", "--f32-modules", "h.0,ln_f"], ["--precision", "f32"])
        ends = {self.hash_of(*other, "--steps", "4", "--resume", self.folder / "c") for other in others}
        self.assertEqual(len(ends | {whole}), 4)
        # Saving loses no precision: the saved values are f32.
        read = {self.hash_of(*other, "--steps", "2", "--resume", self.folder / "c") for other in (NORMS, *others)}
        self.assertEqual(len(read), 1)

    def test_exports_evaluates_and_initializes(self):
        out = self.folder / "hf"
        end = self.hash_of(*NORMS, "--steps", "3", "--export", out)
        losses = {}
        for choice in (NORMS, ["--precision", "bf16"], []):
            lines = self.run_tool("train", "--init", out, *choice, "--steps", "0", "--eval", self.text)
            losses[tuple(choice)] = next(line["eval_loss"] for line in lines if "eval_loss" in line)
            self.assertEqual(lines[-1].get("final_parameters_hash", end), end)
        self.assertEqual(len(set(losses.values())), 3)
        self.assertLess(max(losses.values()) - min(losses.values()), 0.02)

    def test_f16_scales_loss_and_skips_equally(self):
        arguments = ["--precision", "f16", "--f32-modules", "type:RMSNorm,lm_head", "--reduce-dtype", "f32", "--steps", "4"]
        ends = {self.hash_of(*arguments, "--strategy", strategy, model="llama-nano") for strategy in ("ddp", "zero2", "fsdp")}
        self.assertEqual(len(ends), 1)

    def test_info_shows_bytes_of_units(self):
        def root(*arguments):
            code, out, err = tool("info", "--units", "--model", "llama-nano", *arguments)
            self.assertEqual(code, 0, err)
            return next(float(line.split()[3]) for line in out.splitlines() if line.startswith("root"))
        wide, narrow = root(), root("--precision", "bf16")
        self.assertAlmostEqual(narrow, wide / 2, delta=0.01)
        mixed = root("--precision", "bf16", "--f32-modules", "lm_head")
        self.assertAlmostEqual(mixed, narrow + 256 * 64 * 2 / 1e6, delta=0.01)

    def test_invalid_usage_is_one_line_and_code_2(self):
        for command in ("train", "compare"):
            for arguments, hint in (
                (["--f32-modules", "ln_f"], "needs --precision bf16, f16 or fp8"),
                (["--precision", "bf16", "--f32-modules", "type:RMSNorm"], "has no module of that class; it has Dropout Embedding"),
                (["--precision", "bf16", "--f32-modules", "ln_g"], "no module 'ln_g'; known: wte"),
                (["--precision", "bf16", "--f32-modules", "lm_head"], "wte is of bf16, and its parameter wte.weight"),
                (["--precision", "bf16", "--f32-modules", "ln_f", "--collectives", "all_gather=int8"] + (["--strategies", "zero1"] if command == "compare" else ["--strategy", "zero1"]),
                 "it rounds"),
            ):
                code, out, err = tool(command, "--model", "gpt-nano", "--data", self.text, *arguments)
                self.assertEqual((code, err.count("\n")), (2, 1), (arguments, out, err))
                self.assertIn(hint, err)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
