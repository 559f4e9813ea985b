"""Trainings that diverge to infinity or NaN: messages of compare and train, checkpoints that are kept; skipped f16 steps."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60
DIVERGES = ("--lr", "30")  # the first steps are finite


class Diverging(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "text.txt").write_text(TEXT)

    def tool(self, command, *more, ranks=2, steps=12, model="gpt-nano"):
        arguments = [TOOL, command, "--ranks", ranks, "--steps", steps, "--model", model, "--global-batch", 4, "--seq-len", 16,
                     "--threads", 1, "--data", self.folder / "text.txt", *more]
        done = subprocess.run(list(map(str, arguments)), text=True, capture_output=True, timeout=100)
        return done.returncode, done.stdout, done.stderr

    def lines(self, name):
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


class DivergenceTest(Diverging):
    def test_compare_shows_nan_and_keeps_every_row(self):
        files = ("--json", self.folder / "c.json", "--report", self.folder / "r.html")
        code, out, err = self.tool("compare", "--strategies", "ddp,fsdp", *DIVERGES, *files)
        self.assertEqual(code, 0, err)
        rows = [line.split() for line in out.splitlines()]
        self.assertEqual([row[2] for row in rows if row and row[0] in ("ddp", "fsdp") and "1x2" in row], ["nan", "nan"], out)
        self.assertIn("ddp fsdp end bitwise equal", out)
        runs = json.loads((self.folder / "c.json").read_text())["runs"]
        self.assertEqual([run["strategy"] for run in runs], ["ddp", "fsdp"])
        self.assertIsNotNone(runs[0]["losses"][0])
        self.assertIsNone(runs[0]["losses"][-1])
        self.assertEqual(len(re.findall(r"warning: (?:ddp|fsdp): step \d+: the loss is nan on (every rank|ranks? \d)", err)), 2, err)
        again = subprocess.run([TOOL, "report", self.folder / "c.json", "-o", self.folder / "again.html"], capture_output=True, timeout=30)
        self.assertEqual(again.returncode, 0, again.stderr)
        for page in ("r.html", "again.html"):
            self.assertIn("ddp and fsdp end bitwise equal", (self.folder / page).read_text())

    def test_train_warns_once_with_step_and_rank(self):
        code, out, err = self.tool("train", *DIVERGES, "--json", self.folder / "t.json")
        self.assertEqual(code, 0, err)
        lost = [line for line in self.lines("t.json") if "loss" in line and line["loss"] is None]
        self.assertGreater(len(lost), 1)
        self.assertEqual(err.count("warning"), 1, err)
        warned = re.search(r"tessera: warning: fsdp: step (\d+): (the loss|the norm of the gradients) is (-?nan|-?inf) on (every rank|ranks? [0-9])", err)
        self.assertIsNotNone(warned, err)
        self.assertLessEqual(int(warned.group(1)), lost[0]["step"])
        self.assertEqual(out.count(" loss nan "), len(lost))
        code, out, err = self.tool("train")  # the negative control
        self.assertEqual((code, err), (0, ""))

    def test_says_that_an_evaluation_is_not_finite(self):
        config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 256,
                  "intermediate_size": 64, "max_position_embeddings": 64}
        for theta, said in ((1e-300, 1), (1e4, 0)):  # and the control
            (self.folder / "model.json").write_text(json.dumps({**config, "rope_theta": theta}))
            code, out, err = self.tool("train", "--eval", __file__, steps=0, model=self.folder / "model.json")
            self.assertEqual((code, err.count("the loss of the evaluation is nan"), out.count("eval loss nan")), (0, said, said), err)

    def test_keeps_last_finite_checkpoint(self):
        saves = self.folder / "saves"
        code, _, err = self.tool("train", *DIVERGES, "--save", saves, "--save-every", 1, "--keep-last", 2)
        self.assertEqual(code, 0, err)
        steps = sorted(path.name for path in saves.glob("step-*"))
        self.assertEqual(len(steps), 3, steps)
        finite = {}
        for step in steps:
            out = self.folder / "inspect.json"
            found = subprocess.run([TOOL, "checkpoint", "inspect", saves / step, "--json", out], text=True, capture_output=True, timeout=30)
            self.assertEqual(found.returncode, 0, found.stderr)
            finite[step] = json.loads(out.read_text())["finite"]
            self.assertEqual("not finite" in found.stdout, not finite[step])
        self.assertEqual(list(finite.values()), [True, False, False])
        code, _, err = self.tool("train", "--save", saves, "--resume", saves, steps=13)
        self.assertIn("step-00000012 are not finite", err)
        self.assertIn(f"the newest that is finite is {saves / steps[0]}", err)
        # The negative control: a training that stays finite keeps only the last two checkpoints.
        good = self.folder / "good"
        code, _, err = self.tool("train", "--save", good, "--save-every", 1, "--keep-last", 2, steps=4)
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(sorted(path.name for path in good.glob("step-*")), ["step-00000003", "step-00000004"])
        code, _, err = self.tool("train", "--resume", good, steps=5)
        self.assertEqual((code, err), (0, ""))

    def test_reports_steps_that_f16_skips(self):
        """Gradients times 65536 overflow in f16 if the loss is large, as with a learning rate that is too high."""
        code, out, err = self.tool("train", "--precision", "f16", "--lr", "0.3", "--json", self.folder / "t.json", steps=20)
        self.assertEqual(code, 0, err)
        steps = [line for line in self.lines("t.json") if "step" in line and "loss" in line]
        skipped = [line["step"] for line in steps if line["skipped"]]
        self.assertTrue(skipped)
        self.assertLess(len(skipped), len(steps))
        said = re.findall(r"^step (\d+) .* skipped: gradients overflowed; the loss scale is now ([\d.]+)$", out, re.M)
        self.assertEqual([int(step) for step, _ in said], skipped)
        for step, scale in said:
            self.assertEqual(float(scale), steps[int(step) - 1]["loss_scale"])
        code, out, err = self.tool("compare", "--strategies", "ddp,fsdp", "--precision", "f16", "--lr", "0.3", "--json", self.folder / "c.json", steps=20)
        self.assertEqual(code, 0, err)
        self.assertIn("skipped steps", out)
        self.assertEqual([run["skipped_steps"] for run in json.loads((self.folder / "c.json").read_text())["runs"]], [len(skipped)] * 2)
        code, out, err = self.tool("train", "--precision", "bf16", "--json", self.folder / "t.json", steps=3)  # the negative control
        self.assertNotIn("skipped", out + (self.folder / "t.json").read_text())


class LossScaleTest(Diverging):
    """Checkpoints contain the state of the f16 loss scale, and a resumed run restores it."""

    def attributes(self, folder):
        out = self.folder / "inspect.json"
        subprocess.run([TOOL, "checkpoint", "inspect", folder, "--json", out], check=True, capture_output=True, timeout=30)
        found = json.loads(out.read_text())["attributes"]
        return tuple(float(found[name]) for name in ("loss-scale", "loss-scale-good-steps", "loss-scale-skipped-steps"))

    def run_f16(self, steps, *more):
        code, out, err = self.tool("train", "--precision", "f16", "--lr", "0.3", "--json", self.folder / "t.json", *more, steps=steps)
        self.assertEqual((code, err), (0, ""))
        return [line for line in self.lines("t.json") if "loss" in line], out.split()[-1]

    def test_resumed_f16_run_equals_uninterrupted(self):
        whole, saves = self.folder / "whole", self.folder / "saves"
        steps, end = self.run_f16(16, "--save", whole, "--save-every", 1)
        skipped = [line["step"] for line in steps if line["skipped"]]
        self.assertGreater(len(skipped), 1)
        last = max(step for step in skipped if step < 14)
        stops = (last - 1, last, last + 2)  # before a skipped step, after one, and after some good steps following it
        for step in range(1, 17):
            before = [one for one in skipped if one <= step]
            expected = (steps[step - 1]["loss_scale"], step - max(before, default=0), len(before))
            self.assertEqual(self.attributes(whole / f"step-{step:08}"), expected)
        for stop in stops:
            shutil.rmtree(saves, ignore_errors=True)
            more, same_end = self.run_f16(16, "--resume", whole / f"step-{stop:08}", "--save", saves, "--save-every", 1)

            def shown(lines):
                return [{key: line[key] for key in ("step", "loss", "grad_norm", "loss_scale", "skipped")} for line in lines]
            self.assertEqual(shown(more), shown(steps[stop:]), stop)
            self.assertEqual(same_end, end, stop)
            for step in range(stop + 1, 17):
                self.assertEqual(self.attributes(saves / f"step-{step:08}"), self.attributes(whole / f"step-{step:08}"), (stop, step))
        # The control: another step has another state.
        self.assertNotEqual(self.attributes(whole / "step-00000001"), self.attributes(whole))


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
