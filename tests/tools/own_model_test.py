"""Models of plug-in files in the tool's commands: own_model_test.py TOOL MODEL.so LAB.so [TORCH.so]."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

TOOL, MODEL, LAB, TORCH = None, None, None, None


def tool(*arguments, cwd=None):
    done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=200, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


class OwnModelTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_tool(self, *arguments):
        code, out, err = tool(*arguments, cwd=self.folder)
        self.assertEqual(code, 0, err)
        return out

    def compare(self, model, *arguments, strategies="ddp,zero1,zero2,fsdp,hsdp", ranks=4):
        self.run_tool("compare", "--model", model, "--ranks", ranks, "--global-batch", 8, "--steps", 6, "--lr", 3e-3, "--strategies",
                      strategies, "--json", "c.json", *arguments)
        return json.loads((self.folder / "c.json").read_text())["runs"]

    def train(self, model, *arguments, ranks=2, strategy="fsdp"):
        return self.run_tool("train", "--model", model, "--ranks", ranks, "--global-batch", 8, "--lr", 3e-3, "--strategy", strategy,
                             *arguments)

    def refusal(self, *arguments):
        code, out, err = tool(*arguments, cwd=self.folder)
        self.assertEqual((code, out), (2, ""), (arguments, err))
        self.assertEqual(len(err.splitlines()), 1, err)
        return err

    def expect_equal_strategies(self, model, *arguments, strategies="ddp,zero1,zero2,fsdp,hsdp"):
        runs = self.compare(model, *arguments, strategies=strategies)
        self.assertEqual(len({run["final_parameters_hash"] for run in runs}), 1)
        for run in runs:
            self.assertEqual(run["wire_bytes_per_step"], run["formula_bytes_per_step"], run["strategy"])
        ddp, fsdp = runs[0], runs[3]
        self.assertEqual(4 * fsdp["model_state_bytes"]["optimizer"], ddp["model_state_bytes"]["optimizer"])
        return runs

    def test_strategies_end_with_the_same_bits_and_the_bytes_of_the_formulas(self):
        f32 = self.expect_equal_strategies(MODEL + ":counter")
        alone = self.compare(MODEL + ":counter", strategies="ddp", ranks=1)[0]
        for one, four in zip(alone["losses"], f32[0]["losses"]):
            self.assertAlmostEqual(one, four, delta=1e-6 * abs(one))
        self.assertLess(alone["losses"][-1], alone["losses"][0])
        # In bf16 hsdp rounds between its two reductions.
        bf16 = self.expect_equal_strategies(MODEL + ":counter", "--precision", "bf16", strategies="ddp,zero1,zero2,fsdp")
        self.assertNotEqual(bf16[0]["final_parameters_hash"], f32[0]["final_parameters_hash"])
        again = self.compare(MODEL + ":counter", "--checkpoint-activations", strategies="fsdp")
        self.assertEqual(again[0]["final_parameters_hash"], f32[0]["final_parameters_hash"])
        other = self.compare(MODEL + ":counter,blocks=2", strategies="fsdp")  # control
        self.assertNotEqual(other[0]["final_parameters_hash"], f32[0]["final_parameters_hash"])

    def test_info_lists_their_units(self):
        listed = self.run_tool("info", "--units", "--model", MODEL + ":counter,blocks=3", "--precision", "bf16")
        self.assertEqual(len(re.findall(r"^blocks\.\d", listed, re.MULTILINE)), 3, listed)
        self.assertNotIn("blocks.2", self.run_tool("info", "--units", "--model", MODEL + ":counter,blocks=2"))  # control
        self.assertIn("option blocks: 'x'", self.refusal("info", "--units", "--model", MODEL + ":counter,blocks=x"))

    def expect_resumable(self, model, *more):
        last = lambda out: out.splitlines()[-1]
        whole = last(self.train(model, "--steps", 6, *more))
        self.train(model, "--steps", 3, "--save", "saved", *more)
        for strategy in ("fsdp", "zero1"):
            self.assertEqual(last(self.train(model, "--steps", 6, "--resume", "saved", *more, strategy=strategy)), whole)
        self.assertNotEqual(last(self.train(model, "--steps", 5, "--resume", "saved", *more)), whole)  # control
        self.train(model, "--steps", 4, "--resume", "saved", *more, ranks=4)  # another world

    def test_training_resumes_from_its_checkpoint(self):
        self.expect_resumable(MODEL + ":counter")
        resume = ("--ranks", 2, "--steps", 6, "--resume", "saved")
        self.assertIn("by --resume with --model FILE.so:counter", self.refusal("train", *resume))
        self.assertIn("this run has", self.refusal("train", "--model", MODEL + ":counter,blocks=2", *resume))
        self.assertIn("--global-batch", self.refusal("train", "--model", MODEL + ":counter", *resume, "--global-batch", 4))

    def expect_evaluation(self, model, tokens, *more):
        losses = set()
        for ranks in (1, 2, 3):  # 64 samples leave some ranks without one in the last round
            out = self.run_tool("train", "--model", model, "--ranks", ranks, "--global-batch", 6, "--steps", 2, "--eval", "64", *more)
            found = re.search(r"eval loss ([\d.]+) over (\d+) tokens", out)
            self.assertEqual(found[2], str(64 * tokens))
            losses.add(round(float(found[1]), 4))
        self.assertEqual(len(losses), 1, losses)

    def test_training_evaluates_the_tasks_samples(self):
        self.expect_evaluation(MODEL + ":counter", 24)
        self.assertIn("no samples for an evaluation", self.refusal("train", "--model", MODEL + ":counter", "--ranks", 1, "--eval", "0"))

    def test_planning_needs_no_data(self):
        common = ("--model", MODEL + ":counter", "--ranks", 4, "--global-batch", 8)
        self.run_tool("plan", *common, "--strategies", "ddp,fsdp", "--json", "p.json")
        planned = {run["strategy"]: run for run in json.loads((self.folder / "p.json").read_text())["runs"]}
        for run in self.compare(MODEL + ":counter", strategies="ddp,fsdp"):
            for field in ("wire_bytes_per_step", "model_state_bytes", "calls_per_step"):
                before, now = dict(planned[run["strategy"]][field]), dict(run[field])
                before.pop("control", None), now.pop("control", None)
                self.assertEqual(before, now, field)
        self.assertIn("blocks.0", self.run_tool("explain", *common, "--strategy", "fsdp"))
        ran = self.run_tool("explain", *common, "--strategy", "fsdp", "--run")
        self.assertIn("blocks.0", ran)
        self.run_tool("bench", "--of-step", *common, "--strategy", "fsdp", "--backends", "shm", "--json", "b.json")
        self.assertGreater(len(json.loads((self.folder / "b.json").read_text())), 0)
        self.run_tool("compare", *common, "--steps", 3, "--strategies", "ddp,fsdp", "--why", "ddp,fsdp", "--report", "r.html")
        self.assertIn("blocks.0", (self.folder / "r.html").read_text())

    def test_invalid_models_are_one_line_before_start(self):
        (self.folder / "text.txt").write_text("text " * 100)
        mistakes = {
            (MODEL + ":gone",): "provides no model 'gone'; it provides model counter",
            (MODEL,): f"write {MODEL}:NAME; it provides model counter",
            ("./none.so:counter",): "./none.so: no such file",
            (LAB + ":counter",): "provides no model 'counter'; it provides strategy hfsdp",
            (MODEL + ":counter,widht=4",): ":counter has no option 'widht'; it has blocks, ",
            (MODEL + ":counter,width",): "'width' is no option; write KEY=VALUE",
            (MODEL + ":counter,width=48,width=4",): "option width is given twice",
            (MODEL + ":counter,width=wide",): ":counter: option width: ",
            (MODEL + ":counter,width=0",): ":counter: option width: ",
            (MODEL + ":counter,blocks=99999999999999999999",): ":counter: option blocks: ",
            (MODEL + ":counter", "--lora", 4): "--lora with --model",
            (MODEL + ":counter", "--seq-len", 4): "--seq-len with --model",
            (MODEL + ":counter", "--data-format", "u16"): "--data-format with --model",
            (MODEL + ":counter", "--data", "text.txt"): "has no option 'data'",
            (MODEL + ":counter", "--peak-flops", "1TFLOP/s"): "--peak-flops with --model",
            (MODEL + ":counter", "--wrap", "nothing"): "nothing",
        }
        for (model, *options), reason in mistakes.items():
            for command in ("train", "compare"):
                self.assertIn(reason, self.refusal(command, "--model", model, "--ranks", 2, "--steps", 1, *options))
        for model, reason in ((MODEL + ":counter,depth=2", "has no option 'depth'"), ("./none.so:counter", "no such file")):
            for command in ("plan", "explain"):
                self.assertIn(reason, self.refusal(command, "--model", model, "--ranks", 2))

    def test_libtorch_models_train_as_others(self):
        self.expect_equal_strategies(TORCH + ":spiral")
        self.expect_equal_strategies(TORCH + ":spiral", "--precision", "bf16", strategies="ddp,zero1,zero2,fsdp")
        self.expect_resumable(TORCH + ":spiral")
        self.expect_evaluation(TORCH + ":spiral", 1, "--lr", "1e-9")  # dropout, which differs over ranks, is off
        self.run_tool("compare", "--model", TORCH + ":spiral", "--ranks", 2, "--global-batch", 8, "--steps", 3, "--why", "ddp,fsdp",
                      "--strategies", "ddp,fsdp", "--report", "r.html")
        for command in ("plan", "explain"):
            self.assertIn("can only be measured: use train, compare", self.refusal(command, "--model", TORCH + ":spiral", "--ranks", 2))
        plain, again = (self.compare(TORCH + ":spiral", *more, strategies="fsdp")[0] for more in ((), ("--checkpoint-activations",)))
        self.assertEqual(again["final_parameters_hash"], plain["final_parameters_hash"])
        self.assertIn("--precision fp8 with --model", self.refusal("train", "--model", TORCH + ":spiral", "--ranks", 2, "--steps", 1,
                                                                   "--precision", "fp8"))

    def test_libtorch_steps_are_told_and_their_calls_timed(self):
        model = TORCH + ":spiral"
        compared = {run["strategy"]: run for run in self.compare(model)}
        norms = []
        for strategy in ("ddp", "zero2", "fsdp", "hsdp"):
            common = ("--model", model, "--ranks", 4, "--global-batch", 8, "--strategy", strategy)
            self.run_tool("explain", "--run", *common, "--json", "e.json", "--html", "e.html")
            told = json.loads((self.folder / "e.json").read_text())
            run = compared[strategy]
            moved = {name: bytes for name, bytes in run["wire_bytes_per_step"].items() if name != "control"}
            self.assertEqual(told["cost"]["bytes_sent"], sum(moved.values()), strategy)
            self.assertEqual(told["cost"]["formula_bytes"], sum(moved.values()), strategy)
            self.assertEqual(told["model_state_bytes"], run["model_state_bytes"], strategy)
            self.assertNotIn("link_ms", told["cost"])  # nobody knows how long it computes on the simulated machine
            ranks = told["values"]["ranks"]
            self.assertEqual(len({json.dumps([unit["weights_hash"] for unit in rank["units"]]) for rank in ranks}), 1)
            self.assertGreater(len({json.dumps([unit["gradient_norm"] for unit in rank["units"]]) for rank in ranks}), 1)
            self.assertAlmostEqual(sum(rank["loss"] for rank in ranks) / 4, run["losses"][0], delta=1e-6)
            norms.append([f"{norm:.9f}" for norm in told["values"]["norms"].values()])
            self.assertIn("blocks.0", (self.folder / "e.html").read_text())
            self.run_tool("bench", "--of-step", *common, "--backends", "shm", "--json", "b.json")
            calls = json.loads((self.folder / "b.json").read_text())["of_step"]["backends"][0]["calls"]
            for operation in ("all_gather", "reduce_scatter"):
                more = sum(call["op"] == operation for call in calls) - run["calls_per_step"][operation]
                self.assertIn(more, (0, 1) if operation == "all_gather" else (0,), (strategy, operation))  # one compares the units' order
        self.assertEqual(len({json.dumps(one) for one in norms}), 1, norms)


if __name__ == "__main__":
    TOOL, MODEL, LAB = (os.path.abspath(path) for path in sys.argv[1:4])
    if len(sys.argv) > 4:
        TORCH = os.path.abspath(sys.argv[4])
    else:  # a build without libtorch has none of its tests
        del OwnModelTest.test_libtorch_models_train_as_others
        del OwnModelTest.test_libtorch_steps_are_told_and_their_calls_timed
    unittest.main(argv=sys.argv[:1])
