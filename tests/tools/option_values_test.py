"""Values of options: each invalid one gives one line and code 2, and existing files stay as they were."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
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

    def tool(self, *arguments, **options):
        done = subprocess.run([TOOL, *map(str, arguments)], text=True, stderr=subprocess.PIPE, stdout=options.pop("stdout", subprocess.PIPE), timeout=60, **options)
        return done.returncode, done.stdout, done.stderr

    def test_every_command_keeps_its_input(self):
        saves, flights = self.folder / "saves", self.folder / "flights"
        self.assertEqual(self.train("--save", saves, "--flight-recorder", flights)[0], 0)
        step = next(saves.glob("step-*"))
        explain = ("explain", "--model", "gpt-nano", "--ranks", "2", "--seq-len", "16", "--threads", "1", "--data", self.text, "--run")
        for arguments, said in (((*explain, "--json", self.text), "is the input"), ((*explain, "--html", self.text), "is the input"),
                                (("checkpoint", "inspect", saves, "--json", saves / "latest"), "is the input"),
                                (("checkpoint", "inspect", saves, "--json", step / "index.json"), "is in the checkpoint of a step"),
                                (("report", "--postmortem", flights, "--json", flights / "rank-0.flight"), "is the input")):
            code, _, err = self.tool(*arguments)
            self.assertEqual((code, err.count("\n"), said in err), (2, 1, True), err)
        self.assertEqual(self.text.read_text(), TEXT)
        for arguments in (("checkpoint", "verify", saves), ("checkpoint", "inspect", saves, "--json", saves / "inspect.json"),
                          ("report", "--postmortem", flights, "--json", flights / "verdict.json")):  # the negative control
            self.assertEqual(self.tool(*arguments)[0], 0, arguments)

    def test_each_result_has_its_own_file(self):
        one = self.folder / "one"
        plan, bench = ("plan", "--model", "gpt-nano"), ("bench", "all_reduce", "--ranks", "2", "-e", "1K")
        for arguments in ((*plan, "--json", one, "--trace", self.folder / "." / "one"), (*plan, "--json", one, "--report", one), (*bench, "--json", one, "--plot", one),
                          ("explain", "--model", "gpt-nano", "--json", one, "--html", one)):
            code, _, err = self.tool(*arguments)
            self.assertEqual((code, "file; name another one" in err), (2, True), err)
        self.assertIn("is also --log-csv's file", self.wrong("--log-csv", one, "--trace", one))
        self.assertEqual(self.tool(*plan, "--json", "/dev/null", "--trace", "/dev/null")[0], 0)  # the negative control

    def test_a_link_is_followed_and_standard_output_shared(self):
        target, link, out = self.folder / "target", self.folder / "link", self.folder / "out"
        target.write_text("old")
        link.symlink_to(target)
        self.assertEqual(self.tool("plan", "--model", "gpt-nano", "--json", link)[0], 0)
        self.assertTrue(link.is_symlink())
        self.assertIn("runs", json.loads(target.read_text()))
        with open(out, "w", encoding="utf-8") as file:
            self.assertEqual(self.tool("plan", "--model", "gpt-nano", "--json", "/dev/stdout", stdout=file)[0], 0)
        self.assertTrue(os.path.islink("/dev/stdout"))
        text, _, rest = out.read_text().partition("{\n")
        self.assertIn("strategy", text)
        self.assertIn("runs", json.loads("{" + rest))
        with open(out, "w", encoding="utf-8") as file:
            self.assertEqual(self.tool("train", "--model", "gpt-nano", "--ranks", "1", "--steps", "3", "--seq-len", "16", "--data", self.text, "--log-csv", "/dev/stdout",
                                       stdout=file)[0], 0)
        lines = out.read_text().splitlines()
        self.assertEqual([len([line for line in lines if line.startswith(begin)]) for begin in ("step,loss", "step ", "1,", "2,", "3,", "final")], [1, 3, 1, 1, 1, 1])

    def test_a_log_has_one_writer(self):
        log = self.folder / "log.csv"
        running = subprocess.Popen([TOOL, "train", "--model", "gpt-nano", "--ranks", "1", "--steps", "100000", "--seq-len", "16", "--data", self.text, "--log-csv", log],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 30
            while not log.exists() or log.read_text().count("\n") < 3:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            self.assertIn("another run writes it", self.train("--log-csv", log)[2])
            self.assertGreater(log.read_text().count("\n"), 2)
        finally:
            running.kill()
            running.wait()
        self.assertEqual(self.train("--log-csv", log)[0], 0)  # the negative control

    def test_a_run_that_is_at_its_end_says_so(self):
        saves, new = self.folder / "saves", self.folder / "new"
        self.assertEqual(self.train("--save", saves, "--steps", "2")[0], 0)
        code, _, err = self.train("--resume", saves, "--steps", "2", "--save", new)
        self.assertEqual((code, err.count("\n")), (0, 1), err)
        self.assertIn("is at step 2 already, so no step is made; nothing is written by --save", err)
        code, _, err = self.train("--resume", saves, "--steps", "3", "--save", new)  # the negative control
        self.assertEqual((code, err), (0, ""))

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
