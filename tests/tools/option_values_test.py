"""Values of options: each invalid one gives one line and code 2, and existing files stay as they were."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 172, "vocab_size": 256,
         "max_position_embeddings": 64}


class ValuesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.text = self.folder / "text.txt"
        self.text.write_text(TEXT)

    def train(self, *more, command="train"):
        options = {"--ranks": "1", "--steps": "1", "--model": "gpt-nano", "--global-batch": "1", "--seq-len": "16", "--data": self.text}
        if command == "compare":
            options["--strategies"] = "ddp"
        given = {str(word).split("=")[0] for word in more}
        arguments = [TOOL, command, *(word for option, value in options.items() if option not in given for word in (option, value))]
        done = subprocess.run([*arguments, *more], text=True, errors="surrogateescape", capture_output=True, timeout=30)
        return done.returncode, done.stdout, done.stderr

    def wrong(self, *more, command="train"):
        code, out, err = self.train(*more, command=command)
        self.assertEqual((code, out, err.count("\n")), (2, "", 1), (more, out, err))
        self.assertNotIn("exception", err)
        return err

    def final(self, *more):
        code, out, err = self.train(*more)
        self.assertEqual(code, 0, err)
        return out.split()[-1]

    def test_seeds_are_whole_numbers_in_decimal(self):
        for seed in ("-1", "18446744073709551616", "1e23", "100000000000000000000000", "0x10", "1.5", "", "nan"):
            self.assertIn("--seed", self.wrong(f"--seed={seed}"))
        ends = {seed: self.final("--seed", seed) for seed in ("0", "1", "8", "10", "010", "18446744073709551615")}
        self.assertEqual(ends["010"], ends["10"], "octal")
        self.assertEqual(len(set(ends.values())), 5)

    def test_numbers_are_finite_and_whole_where_they_must_be(self):
        for option in ("--lr", "--clip-norm", "--weight-decay", "--eps", "--momentum"):
            for value in ("nan", "inf", "-nan", "1e999"):
                self.assertIn(option, self.wrong(f"{option}={value}"))
        self.assertIn("--clip-norm", self.wrong("--clip-norm=-1"))
        self.assertIn("--betas", self.wrong("--betas", "0.9,nan"))
        for option in ("--steps", "--accumulate", "--threads", "--prefetch", "--save-every", "--warmup"):
            for value in ("-1", "1.5", "0x2", "99999999999999999999999"):
                self.assertIn(option, self.wrong(f"{option}={value}"))
        self.assertEqual(self.final("--clip-norm", "1e3"), self.final("--clip-norm", "1000"))

    def test_a_mesh_is_checked_under_every_strategy(self):
        for mesh in ("-1x-2", "2", "0x1", "axb", "2x"):
            self.assertIn("--mesh", self.wrong("--strategy", "fsdp", f"--mesh={mesh}"))
        for strategy in ("fsdp", "hsdp"):  # its number of ranks would overflow
            self.assertIn("at most", self.wrong("--strategy", strategy, "--mesh=65536x65536"))

    def test_an_empty_value_is_refused(self):
        for option in ("--save", "--json", "--export", "--data", "--init", "--resume", "--trace", "--eval", "--wrap", "--mesh"):
            for spelling in ([option, ""], [f"{option}="]):
                self.assertIn(option, self.wrong(*spelling))
        self.assertIn("--report", self.wrong("--report", "", command="compare"))
        done = subprocess.run([TOOL, "run", "-n", "1", "--", "test", "-z", ""], timeout=30)  # the negative control: an argument of the started program
        self.assertEqual(done.returncode, 0)

    def test_results_do_not_replace_what_is_read(self):
        link = self.folder / "link"
        link.symlink_to(self.text)
        for output in (self.text, self.folder / "." / "text.txt", link):
            for command, option in (("train", "--json"), ("train", "--trace"), ("compare", "--json"), ("compare", "--report")):
                self.assertIn("which it would replace", self.wrong(option, output, command=command))
        config = self.folder / "config.json"
        config.write_text(json.dumps(LLAMA))
        code, _, err = self.train("--model", config, "--json", config)
        self.assertEqual(code, 2)
        self.assertEqual((self.text.read_text(), json.loads(config.read_text())), (TEXT, LLAMA))
        code, _, err = self.train("--json", self.folder / "run.json", command="compare")  # the negative control
        self.assertEqual(code, 0, err)
        run = (self.folder / "run.json").read_bytes()
        done = subprocess.run([TOOL, "report", self.folder / "run.json", "-o", self.folder / "run.json"], text=True, capture_output=True, timeout=30)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
        self.assertEqual((self.folder / "run.json").read_bytes(), run)

    def test_rejects_invalid_config_with_own_error(self):
        config = self.folder / "config.json"
        for scaling in ("x", 3, [1], {"type": 5}, {"rope_type": 5}, {"rope_type": "linear"}, {}):
            config.write_text(json.dumps({**LLAMA, "rope_scaling": scaling}))
            self.assertIn("rope_scaling", self.wrong("--model", config))
        for layers in (2147483647, 10**9, 70000):
            config.write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
            self.assertIn("the number of layers is", self.wrong("--model", config))
        config.write_text(json.dumps({**LLAMA, "rope_scaling": None}))  # the negative control
        self.assertEqual(self.train("--model", config)[0], 0)

    def test_names_that_are_not_utf8_reach_the_results(self):
        config = self.folder / os.fsdecode(b"model\xff.json")
        config.write_text(json.dumps(LLAMA))
        out = self.folder / os.fsdecode(b"out\xff.json")
        code, _, err = self.train("--model", config, "--json", out, "--report", self.folder / "r.html", command="compare")
        self.assertEqual(code, 0, err)
        found = json.loads(out.read_text())
        self.assertIn("model\ufffd.json", found["model"])
        self.assertEqual(len(found["runs"]), 1)

    def test_sums_that_round_twice_are_explained(self):
        shared = ("--ranks", "4", "--global-batch", "4", "--strategies", "fsdp,hsdp", "--steps", "3", "--precision")
        for precision in ("f16", "bf16"):
            code, out, err = self.train(*shared, precision, command="compare")
            self.assertEqual(code, 0, err)
            self.assertIn(f"hsdp sums over two mesh axes and rounds to {precision} after each", out)
        code, out, err = self.train(*shared, "bf16", "--reduce-dtype", "f32", command="compare")  # the negative control
        self.assertIn("fsdp hsdp end bitwise equal", out)
        self.assertNotIn("rounds", out)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
