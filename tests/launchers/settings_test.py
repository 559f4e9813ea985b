"""Command lines that differ between the ranks of a launcher: one error on all ranks that names the option, its values and their ranks."""

import re
import time

import jobs


class SettingsTest(jobs.Case):
    def run_ranks(self, *commands, backend="tcp"):
        """How the ranks end, each with a command of its own."""
        run = f"settings-{time.monotonic_ns()}"
        ranks = [jobs.start(list(map(str, command)), jobs.environment(
            TESSERA_RANK=rank, TESSERA_WORLD_SIZE=len(commands), TESSERA_RUN_ID=run, TESSERA_BACKEND=backend)) for rank, command in enumerate(commands)]
        with jobs.Job(ranks):
            return [jobs.finish(rank, 60) for rank in ranks]

    def refused(self, first, second, name, values=r".+ on rank \d; .+ on rank \d"):
        ends = self.run_ranks(first, second)
        pattern = rf"^tessera: rank \d: \w+: {re.escape(name)} differs between the ranks: it is {values}; choose the same on all ranks$"
        for end in ends:
            self.assertEqual(end.code, 1, (second, end))
            self.assertRegex(end.err.splitlines()[-1], pattern)
            self.assertNotIn("step 1 ", end.out)

    def train(self, *arguments):
        """A training with these options, each in the place of its usual value."""
        options = {"--model": "gpt-nano", "--data": self.text, "--threads": "1", "--steps": "2", "--global-batch": "4", "--seq-len": "16",
                   **dict(zip(arguments[::2], arguments[1::2]))}
        return [jobs.TOOL, "train", *(word for option in options.items() for word in option)]

    def test_trainings(self):
        other = self.path("other.txt")
        with open(other, "w", encoding="ascii") as file:
            file.write(jobs.TEXT.replace("April", "March"))
        self.assert_good(jobs.run(self.train("--ranks", "1", "--export", self.path("model")), seconds=60))
        cases = [
            ("--lr", ["0.001"], ["0.01"], r"0\.001 on rank 0; 0\.01 on rank 1"),
            ("--seed", ["1"], ["2"], "1 on rank 0; 2 on rank 1"),
            ("--data", [self.text], [other], None),
            ("--global-batch", ["4"], ["8"], "4 on rank 0; 8 on rank 1"),
            ("--schedule", ["constant"], ["cosine"], "constant on rank 0; cosine on rank 1"),
            ("--warmup", ["0"], ["1"], "0 on rank 0; 1 on rank 1"),
            ("--precision", ["bf16"], ["fp8"], "bf16 on rank 0; fp8 on rank 1"),
            ("--steps", ["2"], ["3"], "2 on rank 0; 3 on rank 1"),
            ("--save", None, [self.path("run")], "given on rank 1; not given on rank 0"),
            ("--export", None, [self.path("out")], "given on rank 1; not given on rank 0"),
            ("--trace", None, [self.path("trace")], "given on rank 1; not given on rank 0"),
            ("--eval", None, [self.text], None),
            ("--init", None, [self.path("model")], None),
            ("--clip-norm", ["1"], ["2"], None),
        ]
        for name, first, second, values in cases:
            with self.subTest(name):
                words = [self.train(*((name, *given) if given else ())) for given in (first, second)]
                self.refused(*words, name.lstrip("-").replace("-", "_") if name == "--clip-norm" else name, *((values,) if values else ()))

    def test_adapters(self):
        self.refused(self.train("--lora", "2", "--lora-alpha", "8"), self.train("--lora", "2", "--lora-alpha", "80"), "--lora")

    def test_equal_settings_train(self):
        """The control, with the text at another path and defaults written out."""
        copy = self.path("copy.txt")
        with open(copy, "w", encoding="ascii") as file:
            file.write(jobs.TEXT)
        ends = self.run_ranks(self.train(), self.train("--data", copy, "--lr", "1e-3", "--schedule", "constant", "--seed", "0"))
        for end in ends:
            self.assertEqual(end.code, 0, end)
        self.assertIn("step 2 ", ends[0].out)

    def test_comparisons(self):
        compare = [jobs.TOOL, "compare", *self.train("--steps", "1")[2:]]
        two = [*compare, "--strategies", "ddp,fsdp"]
        self.refused(two, [*compare, "--strategies", "ddp"], "--strategies", "ddp on rank 1; ddp,fsdp on rank 0")
        self.refused(two, [*two, "--repeat", "2"], "--repeat", "1 on rank 0; 2 on rank 1")
        for end in self.run_ranks(two, [*two, "--repeat", "1"]):  # the control
            self.assertEqual(end.code, 0, end)

    def test_benchmarks(self):
        bench = [jobs.TOOL, "bench", "broadcast", "-e", "64", "-n", "2"]
        self.refused([*bench, "--root", "0"], [*bench, "--root", "1"], "--root", "0 on rank 0; 1 on rank 1")
        self.refused(bench, [jobs.TOOL, "bench", "broadcast", "-e", "32", "-n", "2"], "--max-bytes", "32 on rank 1; 64 on rank 0")
        for end in self.run_ranks(bench, [*bench, "--json", self.path("b.json")]):  # the control
            self.assertEqual(end.code, 0, end)


if __name__ == "__main__":
    jobs.main()
