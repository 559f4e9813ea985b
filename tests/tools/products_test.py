"""Products of matrices: own ones end with one hash on every processor, libraries are named where they round differently."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60
# Another processor's code of OpenBLAS, and OpenBLAS instead of oneDNN where the processor has AVX-512.
OLDER = "export OPENBLAS_CORETYPE=Sandybridge ONEDNN_MAX_CPU_ISA=AVX2"
DIFFERENT = "the ranks' processors or libraries round differently: "
# Hashes of two steps with own products. They are the same on every machine: one that shows another is a bug.
HASHES = {
    ("gpt-nano", "f32"): "fddb319b3ac193068f47c1c58efefbe9",
    ("gpt-nano", "bf16"): "eb8ec92cca2e137228ed62e2c7996b4e",
    ("gpt-nano", "f16"): "f1e097d0c20057d380a21e000165e796",
    ("llama-nano", "f32"): "8ce87c8dea39d3498fffafe669bef8a7",
    ("llama-nano", "bf16"): "28c492d345bcb13a90d17cfea52d8af5",
}


class ProductsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.text = os.path.join(self.folder, "text.txt")
        with open(self.text, "w") as file:
            file.write(TEXT)

    def run_tool(self, *command, **variables):
        # What chooses a library's code here is set for some ranks below.
        environment = {k: v for k, v in os.environ.items() if k not in ("TESSERA_PRODUCTS", "ONEDNN_MAX_CPU_ISA")}
        return subprocess.run(command, text=True, capture_output=True, timeout=120, env=environment | variables)

    def train(self, *options, on_rank_1="true", model="gpt-nano", **variables):
        script = f'[ "$TESSERA_RANK" != 1 ] || {on_rank_1}; exec "$@"'
        return self.run_tool(TOOL, "run", "-n", "2", "--no-tag", "--", "sh", "-c", script, "rank", TOOL, "train", "--model", model, "--steps", "2",
                             "--global-batch", "2", "--seq-len", "16", "--data", self.text, *options, **variables)

    def hash_of(self, done):
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [line for line in done.stdout.splitlines() if line.startswith("final parameters ")]
        self.assertEqual(len(lines), 1, done.stdout)
        return lines[0].split()[2]

    def test_own_products_have_one_hash(self):
        for (model, precision), expected in HASHES.items():
            with self.subTest(model=model, precision=precision):
                done = self.train("--precision", precision, model=model, on_rank_1=OLDER, TESSERA_PRODUCTS="own")
                self.assertEqual(self.hash_of(done), expected)
                self.assertNotIn(DIFFERENT, done.stderr)

    def test_threads_and_division_do_not_show(self):
        done = self.train("--threads", "3", "--strategy", "ddp", TESSERA_PRODUCTS="own")
        self.assertEqual(self.hash_of(done), HASHES["gpt-nano", "f32"])

    def test_compare_uses_own_products(self):
        options = ("--model", "gpt-nano", "--steps", "2", "--global-batch", "2", "--seq-len", "16", "--ranks", "2", "--data", self.text,
                   "--strategies", "ddp,fsdp", "--json", os.path.join(self.folder, "compare.json"))
        for variables, equal in (({}, True), ({"TESSERA_PRODUCTS": "own"}, True), ({"TESSERA_PRODUCTS": "library"}, False)):
            done = self.run_tool(TOOL, "compare", *options, **variables)
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(os.path.join(self.folder, "compare.json")) as file:
                result = json.load(file)
            self.assertEqual(result["products"], variables.get("TESSERA_PRODUCTS", "own"))
            hashes = {run["final_parameters_hash"] for run in result["runs"]}
            self.assertEqual(hashes == {HASHES["gpt-nano", "f32"]}, equal, hashes)

    def test_libraries_that_round_differently_are_named(self):
        done = self.train(on_rank_1=OLDER)
        self.hash_of(done)
        lines = [line for line in done.stderr.splitlines() if DIFFERENT in line]
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertRegex(lines[0], r"products by OpenBLAS [0-9.]+ \(Sandybridge\) on rank 1")
        self.assertRegex(lines[0], r"products by (OpenBLAS|oneDNN) [0-9.]+ \(\w+\) on rank 0")
        equal = self.train()  # the control
        self.hash_of(equal)
        self.assertNotIn(DIFFERENT, equal.stderr)

    def test_ranks_must_choose_alike(self):
        for here, there in (("own", "library"), ("library", "own")):
            done = self.train(on_rank_1=f"export TESSERA_PRODUCTS={there}", TESSERA_PRODUCTS=here)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("TESSERA_PRODUCTS differs between the ranks: it is "
                          f"library on rank {int(here == 'own')}; own on rank {int(here != 'own')}; choose the same on all ranks", done.stderr)

    def test_an_unknown_choice_is_one_line(self):
        done = self.run_tool(TOOL, "train", "--model", "gpt-nano", "--data", self.text, TESSERA_PRODUCTS="fast")
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stderr, "tessera: TESSERA_PRODUCTS is 'fast', needs own or library\n")


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
