"""Every option of train has its documented effect on the optimizer, the LR schedule, the engine and the files."""

import json
import math
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import unittest

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60
MODEL = {"model_type": "gpt2", "n_layer": 3, "n_head": 2, "n_embd": 8, "vocab_size": 256, "n_positions": 64,
         "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
ONE_WINDOW = "the only sequence."  # nine tenths of it hold exactly one sequence of 15 tokens and its targets


def tool(*arguments, timeout=60):
    done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def tensors(folder):
    """The f32 tensors of an exported folder, as lists."""
    data = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    def values(begin, end):
        return list(struct.unpack(f"<{(end - begin) // 4}f", data[8 + length + begin:8 + length + end]))
    return {name: values(*entry["data_offsets"]) for name, entry in header.items()}


class Training(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.files = {}
        for name, text in (("text", TEXT), ("other", TEXT[::-1]), ("wide", "\0".join(TEXT) + "\0"), ("one", ONE_WINDOW), ("model.json", json.dumps(MODEL)),
                           ("dropout.json", json.dumps({**MODEL, "resid_pdrop": 0.5}))):
            self.files[name] = self.folder / name
            self.files[name].write_text(text)

    def train(self, *more, command="train"):
        """The lines of --json and the final hash."""
        options = {"--ranks": 2, "--steps": 3, "--model": self.files["model.json"], "--global-batch": 4, "--seq-len": 15, "--threads": 1,
                   "--data": self.files["text"]}
        words = [str(word) for word in more]
        if "--init" in words or "--resume" in words:
            options.pop("--model")
        arguments = [word for option, value in options.items() if option not in words for word in (option, value)]
        code, out, err = tool(command, *arguments, "--json", self.folder / "j", *words)
        self.assertEqual(code, 0, (words, err))
        return [json.loads(line) for line in (self.folder / "j").read_text().splitlines()], out.split()[-1]

    def end(self, *more):
        return self.train(*more)[1]


class OptionsTest(Training):
    def exported(self, *more):
        folder = self.folder / "exported"
        self.train("--ranks", 1, "--global-batch", 1, "--data", self.files["one"], *more, "--export", folder)
        return folder

    def gradient(self, folder):
        """The gradient at the weights of a folder, from a step of plain SGD. There is one sequence, so all batches are equal."""
        before = tensors(folder)
        after = tensors(self.exported("--init", folder, "--steps", 1, "--optimizer", "sgd", "--lr", 1, "--weight-decay", 0))
        return {name: [b - a for b, a in zip(before[name], after[name])] for name in before}

    def check_optimizer(self, rule, *options):
        """Three steps give the values of `rule`: from the gradients so far and the values before, an element's value after."""
        start = self.folder / "start"
        self.exported("--steps", 0).rename(start)
        values, gradients = [tensors(start)], []
        for step in range(3):
            here = start
            if step > 0:
                here = self.folder / f"after-{step}"
                self.exported("--init", start, "--steps", step, *options).rename(here)
                values.append(tensors(here))
            gradients.append(self.gradient(here))
        last = tensors(self.exported("--init", start, "--steps", 3, *options))
        moved = 0
        for name in ("h.1.mlp.c_fc.weight", "h.2.ln_1.weight", "h.0.attn.c_attn.bias"):
            decays = len(values[0][name]) > 24  # norms and biases don't decay
            for i, value in enumerate(values[2][name]):
                history = [gradient[name][i] for gradient in gradients]
                expected = rule(history, value, decays)
                if max(map(abs, history)) > 1e-4:  # below it the gradients' own rounding dominates
                    self.assertAlmostEqual(last[name][i], expected, delta=1e-5 + 0.02 * abs(expected - value), msg=(options, name, i))
                    moved += abs(expected - value) > 1e-5
        self.assertGreater(moved, 100, options)
        for folder in (start, self.folder / "after-1", self.folder / "after-2"):
            subprocess.run(["rm", "-r", folder], check=True)

    def test_optimizer_options_follow_formula(self):
        def sgd(lr, momentum=0.0, nesterov=False, decay=0.0, sign=1.0):
            def rule(history, value, decays):
                gradients = [sign * g for g in history]
                self.assertEqual(decay, 0)
                buffer = gradients[0]
                for g in gradients[1:]:
                    buffer = momentum * buffer + g
                return value - lr * (gradients[-1] + momentum * buffer if nesterov else buffer)
            return rule

        def adam(lr, betas=(0.9, 0.999), eps=1e-8, decay=0.01, amsgrad=False, sign=1.0):
            def rule(history, value, decays):
                m = v = most = 0.0
                for g in (sign * g for g in history):
                    m = betas[0] * m + (1 - betas[0]) * g
                    v = betas[1] * v + (1 - betas[1]) * g * g
                    most = max(most, v)
                step = len(history)
                divisor = math.sqrt((most if amsgrad else v) / (1 - betas[1] ** step)) + eps
                return value - (lr * decay * value if decays else 0) - lr * m / (1 - betas[0] ** step) / divisor
            return rule

        lr = 0.1
        plain = ("--optimizer", "sgd", "--lr", lr, "--weight-decay", 0)
        self.check_optimizer(sgd(lr, 0.5), *plain, "--momentum", 0.5)
        self.check_optimizer(sgd(lr, 0.5, True), *plain, "--momentum", 0.5, "--nesterov")
        self.check_optimizer(sgd(lr, sign=-1), *plain, "--maximize")
        lr = 0.01
        self.check_optimizer(adam(lr, (0.5, 0.8)), "--lr", lr, "--betas", "0.5,0.8", "--weight-decay", 0.01)
        self.check_optimizer(adam(lr, eps=0.05, decay=0.5), "--lr", lr, "--eps", 0.05, "--weight-decay", 0.5)
        self.check_optimizer(adam(lr, (0.5, 0.1), 1e-3, 0, True, -1), "--lr", lr, "--betas", "0.5,0.1", "--eps", 1e-3, "--weight-decay", 0,
                             "--amsgrad", "--maximize")
        # The negative control: a value that is off by a tenth is detected.
        with self.assertRaises(AssertionError):
            self.check_optimizer(adam(lr, eps=0.055, decay=0), "--lr", lr, "--eps", 0.05, "--weight-decay", 0)

    def test_weight_decay_is_pytorchs_where_it_is_not_given(self):
        for optimizer, default, other in (("sgd", 0, 0.01), ("adam", 0, 0.01), ("adamw", 0.01, 0)):
            left_out = self.end("--optimizer", optimizer)
            self.assertEqual(left_out, self.end("--optimizer", optimizer, "--weight-decay", default), optimizer)
            self.assertNotEqual(left_out, self.end("--optimizer", optimizer, "--weight-decay", other), optimizer)  # the control

    def test_the_learning_rate_follows_its_schedule(self):
        for schedule in ("constant", "cosine"):
            lines, _ = self.train("--steps", 10, "--lr", 0.5e-2, "--warmup", 4, "--schedule", schedule)
            for line in lines[:10]:
                step = line["step"]
                factor = 0.5 * (1 + math.cos(math.pi * (step - 4) / 6)) if schedule == "cosine" else 1.0
                self.assertAlmostEqual(line["learning_rate"], 0.5e-2 * (step / 4 if step <= 4 else factor), delta=1e-9, msg=(schedule, step))

    def test_clips_by_configured_norm(self):
        start = self.folder / "start"
        self.exported("--steps", 0).rename(start)
        gradient = [abs(g) for values in self.gradient(start).values() for g in values]
        norms = {"1": sum(gradient), "2": sum(g ** 2 for g in gradient) ** 0.5, "3": sum(g ** 3 for g in gradient) ** (1 / 3), "inf": max(gradient)}
        for kind, norm in norms.items():
            lines, _ = self.train("--ranks", 1, "--global-batch", 1, "--data", self.files["one"], "--init", start, "--steps", 1, "--norm-type", kind)
            self.assertAlmostEqual(lines[0]["grad_norm"], norm, delta=1e-3 * norm, msg=kind)

    def gathers(self, *more):
        """Gathers and computations of rank 0's last step, in order: "h.0" is a gather, "(h.0)" forward, "[h.0]" backward."""
        self.train(*more, "--trace", self.folder / "trace")
        events = [event for event in json.loads((self.folder / "trace").read_text())["traceEvents"] if event["ph"] != "M" and event["pid"] == 0]
        shown = {"unshard_issue": "{}", "forward": "({})", "backward": "[{}]"}
        return " ".join(shown[event["cat"]].format(event["args"]["unit"]) for event in sorted(events, key=lambda event: event["ts"])
                        if event["cat"] in shown)

    def test_gathers_follow_configured_order(self):
        at_once = "root (root) h.0 (h.0) h.1 (h.1) h.2 (h.2) [root] [h.2] h.1 [h.1] h.0 [h.0]"
        self.assertEqual(self.gathers("--prefetch", 0), at_once)
        self.assertEqual(self.gathers("--prefetch", 2, "--limit-all-gathers", 1), "root h.0 (root)" + at_once.removeprefix("root (root) h.0"))  # besides the root
        self.assertEqual(self.gathers(), "root h.0 (root) h.1 (h.0) h.2 (h.1) (h.2) [root] h.1 [h.2] h.0 [h.1] [h.0]")
        self.assertEqual(self.gathers("--prefetch", 2), "root h.0 h.1 (root) h.2 (h.0) (h.1) (h.2) [root] h.1 h.0 [h.2] [h.1] [h.0]")
        self.assertEqual(self.gathers("--backward-prefetch", "post"), "root h.0 (root) h.1 (h.0) h.2 (h.1) (h.2) [root] [h.2] h.1 [h.1] h.0 [h.0]")
        self.assertEqual(self.gathers("--prefetch", 0, "--reshard-after-forward", "false"), "root (root) h.0 (h.0) h.1 (h.1) h.2 (h.2) [root] [h.2] [h.1] [h.0]")
        self.assertEqual(self.gathers("--prefetch", 0, "--reshard-after-forward", "true"), at_once.replace("[h.2]", "h.2 [h.2]"))
        twice = ("--prefetch", 0, "--accumulate", 2)
        self.assertEqual(self.gathers(*twice), f"{at_once} {at_once}")
        kept = self.gathers(*twice, "--reshard-after-backward", "false")
        self.assertEqual([kept.split().count(unit) for unit in ("root", "h.0", "h.1", "h.2")], [1, 3, 3, 1], kept)  # not gathered for the second forward
        self.assertEqual(self.gathers("--wrap", "none"), "root (root) [root]")

    def test_every_option_has_effect(self):
        init, adapter, saves = self.folder / "init", self.folder / "adapter", self.folder / "saves"
        self.train("--steps", 0, "--export", init)
        self.train("--init", init, "--lora", 2, "--steps", 1, "--export-adapter", adapter, "--save", saves)
        lora, replicas, f16 = ("--init", init, "--lora", 2), ("--strategy", "local_sgd"), ("--precision", "bf16")
        dropout = ("--model", self.files["dropout.json"], "--data", self.files["one"], "--seed", 3)
        link = ("--link", "20us,1GB/s")
        twice, clipped, sgd = ("--accumulate", 2), ("--clip-norm", 0.1), ("--optimizer", "sgd", "--lr", 0.1)
        other_end = {  # option: (other options, values): with it a run ends with another hash than with the others alone
            "--model": ((), ("gpt-nano",)), "--data": ((), (self.files["other"],)), "--data-format": None,
            "--init": (("--seed", 1), (init,)), "--lora": (("--init", init), (2,)), "--lora-alpha": (lora, (3,)), "--lora-targets": (lora, ("c_attn,c_fc",)),
            "--quantize": (lora, ("nf4",)), "--init-adapter": (("--init", init, "--lora", 2), (adapter,)), "--steps": ((), (4,)),
            "--global-batch": ((), (8,)), "--seq-len": ((), (16,)), "--lr": ((), (0.5,)), "--schedule": ((), ("cosine",)), "--warmup": ((), (2,)),
            "--seed": (("--init", init), (1,)), "--precision": ((), ("bf16",)), "--fp8-scaling": (("--model", "gpt-nano", "--precision", "fp8"), ("none",)), "--f32-modules": (f16, ("type:LayerNorm",)), "--reduce-dtype": (f16, ("f32",)),
            "--accumulate": ((*sgd, *clipped, "--precision", "bf16"), (2,)), "--reduce-when": ((*twice, "--strategy", "fsdp"), ("last",)),
            "--norm-type": (clipped, ("1",)), "--clip-norm": (sgd, (0.1,)), "--optimizer": ((), ("adam",)), "--betas": ((), ("0.5,0.9",)), "--eps": ((), (0.1,)),
            "--weight-decay": ((), (0.5,)), "--momentum": (sgd, (0.5,)), "--nesterov": ((*sgd, "--momentum", 0.5), ()), "--amsgrad": (("--betas", "0.9,0.1", "--lr", 0.1), ()),
            "--maximize": ((), ()), "--collectives": ((), ("int8",)), "--sync-every": (replicas, (2,)), "--outer-lr": (("--sync-every", 2, *replicas), (0.5,)),
            "--outer-momentum": (("--sync-every", 1, *replicas), (0.5,)), "--strategy": ((), ("diloco",)),
        }
        same_end = {  # options that change time, bytes or memory: other tests check them
            "--ranks": None, "--backend": ((), ("tcp",)), "--device": ((), ("cpu",)), "--mesh": (("--strategy", "hsdp", "--ranks", 4), ("4x1",)),
            "--wrap": ((), ("none",)), "--prefetch": ((), (2,)), "--backward-prefetch": ((), ("post",)), "--limit-all-gathers": ((), (1,)),
            "--reshard-after-forward": ((), ("false",)), "--reshard-after-backward": (twice, ("false",)), "--checkpoint-activations": ((), ()), "--recompute": ((), ("activation,norm",)),
            "--cpu-offload": ((), ()), "--threads": ((), (2,)), "--eval": ((), (self.files["text"],)), "--json": None, "--trace": ((), (self.folder / "t",)),
            "--save": ((), (self.folder / "s",)), "--save-every": (("--save", self.folder / "s1"), (2,)), "--keep-last": (("--save", self.folder / "s2"), (1,)),
            "--export": ((), (self.folder / "e",)), "--export-adapter": (lora, (self.folder / "a",)), "--graphs": None, "--no-graphs": ((), ()), "--help": None,
            "--flight-recorder": ((), (self.folder / "f",)), "--log-csv": ((), (self.folder / "l",)), "--peak-flops": ((), ("1TFLOP/s",)), "--resume": None, "--link": ((), link[1:]), "--hosts": (link, (2,)), "--link-intra": ((*link, "--hosts", 2), ("1us,5GB/s",)),
        }
        _, text, _ = tool("train", "--help")
        known = set(re.findall(r"^ +(?:-\w,)?(--[a-z][a-z0-9-]*)", text, re.M))
        self.assertGreater(len(known), 50)
        self.assertEqual(known - other_end.keys() - same_end.keys(), set(), "an option that no test looks at")
        for expected, table in ((False, other_end), (True, same_end)):
            for option, runs in table.items():
                if runs is None:
                    continue
                without, value = runs
                self.assertEqual(self.end(*without) == self.end(*without, option, *value), expected, option)
        self.assertEqual(self.end("--data", self.files["wide"], "--data-format", "u16"), self.end())  # the same ids, twice as wide
        self.assertEqual(self.end("--resume", saves), self.end(*lora))
        self.assertNotEqual(self.end("--resume", saves, "--steps", 1), self.end(*lora))
        # --seed also determines the order of batches (above, with given values) and dropout.
        self.train(*dropout, "--steps", 0, "--export", self.folder / "dropped")
        drops = ("--init", self.folder / "dropped", "--data", self.files["one"])
        self.assertNotEqual(self.end(*drops, "--seed", 0), self.end(*drops, "--seed", 1))
        self.assertEqual(self.end("--init", init, "--data", self.files["one"], "--seed", 0), self.end("--init", init, "--data", self.files["one"], "--seed", 1))


class FiguresTest(Training):
    def compare(self, *more):
        options = ("--ranks", 2, "--model", self.files["model.json"], "--global-batch", 4, "--seq-len", 15, "--threads", 1, "--data", self.files["text"])
        code, _, err = tool("compare", *options, "--strategies", "fsdp", "--json", self.folder / "c", *more)
        self.assertEqual(code, 0, err)
        return json.loads((self.folder / "c").read_text())["runs"][0]

    def test_times_exclude_first_two_steps(self):
        run = self.compare("--steps", 3)  # so only the third is measured
        self.assertEqual(run["step_ms"]["median"], run["step_ms"]["p95"])
        self.assertAlmostEqual(run["tokens_per_second"] * run["step_ms"]["median"] / 1e3, 4 * 15, delta=1e-6 * 60)
        run = self.compare("--steps", 30)
        self.assertLess(run["step_ms"]["median"], run["step_ms"]["p95"])

    def test_the_loss_is_the_mean_over_microbatches(self):
        whole, _ = self.train("--steps", 1)
        parts, _ = self.train("--steps", 1, "--accumulate", 2)
        self.assertAlmostEqual(parts[0]["loss"], whole[0]["loss"], delta=1e-5)
        half, _ = self.train("--steps", 1, "--global-batch", 2)  # the control: half of the batch has another loss
        self.assertGreater(abs(half[0]["loss"] - whole[0]["loss"]), 1e-4)

    def test_an_evaluation_has_no_dropout(self):
        losses = set()
        for model in ("model.json", "dropout.json"):
            lines, _ = self.train("--model", self.files[model], "--steps", 0, "--eval", self.files["text"])
            losses.add(lines[0]["eval_loss"])
        self.assertEqual(len(losses), 1)
        steps = [self.train("--model", self.files[model], "--steps", 1)[0][0]["loss"] for model in ("model.json", "dropout.json")]
        self.assertNotEqual(*steps)  # the control: training has dropout

    def test_replicas_sync_before_export(self):
        ends = [self.end("--strategy", "local_sgd", "--sync-every", every, "--export", self.folder / str(every)) for every in (3, 10)]
        self.assertEqual(*ends)
        self.assertTrue(tensors(self.folder / "3") == tensors(self.folder / "10"))
        self.assertNotEqual(self.end("--strategy", "local_sgd", "--sync-every", 2), ends[0])  # the control

    def test_results_that_cannot_be_written_are_an_error(self):
        options = ("--ranks", 1, "--model", self.files["model.json"], "--global-batch", 1, "--seq-len", 15, "--steps", 1, "--data", self.files["text"])
        code, _, err = tool("train", *options, "--json", "/dev/full")
        self.assertEqual((code, err.count("\n")), (1, 1), err)
        self.assertIn("--json: writing failed; is the disk full?", err)
        for command in ("train", "compare"):
            with open("/dev/full", "w") as full:
                more = ("--strategies", "ddp") if command == "compare" else ()
                done = subprocess.run([TOOL, command, *map(str, options), *more], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("can't write standard output", done.stderr)


if __name__ == "__main__":
    TOOL = os.path.abspath(sys.argv.pop(1))
    unittest.main()
