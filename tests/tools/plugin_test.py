"""Strategies and collectives from shared objects, as a user names them: plugin_test.py TOOL LAB.so FOLDER (of invalid ones)."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL, LAB, WRONG = None, None, None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 200


def tool(*arguments, cwd=None, env=None):
    done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=100, cwd=cwd,
                          env={**os.environ, **(env or {})})
    return done.returncode, done.stdout, done.stderr


class PluginTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "text.txt").write_text(TEXT)
        (self.folder / "lab.so").symlink_to(LAB)
        self.common = ("--model", "gpt-nano", "--seq-len", 16, "--data", self.folder / "text.txt")

    def train(self, *arguments, **options):
        return tool("train", *self.common, "--ranks", 4, *arguments, **options)

    def hash_of(self, *arguments, **options):
        code, out, err = self.train(*arguments, **options)
        self.assertEqual(code, 0, err)
        return out.splitlines()[-1].removeprefix("final parameters ")

    def test_compare_accepts_plugins_and_built_in_strategies(self):
        code, out, err = tool("compare", *self.common, "--ranks", 4, "--steps", 3, "--strategies",
                              "fsdp,./lab.so:hfsdp,fsdp+./lab.so:f16,./lab.so:hfsdp+reduce_scatter=bf16", "--json",
                              "c.json", "--report", "r.html", cwd=self.folder)
        self.assertEqual(code, 0, err)
        runs = json.loads((self.folder / "c.json").read_text())["runs"]
        fsdp, own, half, both = runs
        self.assertEqual([run["strategy"] for run in runs], ["fsdp", "./lab.so:hfsdp", "fsdp+./lab.so:f16",
                                                             "./lab.so:hfsdp+reduce_scatter=bf16"])
        self.assertIn("fsdp ./lab.so:hfsdp end bitwise equal", out)
        self.assertEqual(own["final_parameters_hash"], fsdp["final_parameters_hash"])
        self.assertNotEqual(half["final_parameters_hash"], fsdp["final_parameters_hash"])  # it rounds
        self.assertEqual(own["mesh"], [2, 2])
        for run in runs:
            self.assertEqual(run["wire_bytes_per_step"] | {"control": 0}, run["formula_bytes_per_step"] | {"control": 0})
        self.assertEqual(2 * half["wire_bytes_per_step"]["all_gather"], fsdp["wire_bytes_per_step"]["all_gather"])
        self.assertEqual(half["plain_bytes_per_step"]["all_gather"], fsdp["wire_bytes_per_step"]["all_gather"])
        self.assertEqual(own["model_state_bytes"]["optimizer"], fsdp["model_state_bytes"]["optimizer"])
        page = (self.folder / "r.html").read_text()
        for run in runs:
            self.assertIn(run["strategy"], page)

    def test_run_resumes_from_its_checkpoint(self):
        whole = self.hash_of("--steps", 4, "--strategy", LAB + ":hfsdp")
        self.hash_of("--steps", 2, "--strategy", LAB + ":hfsdp", "--save", self.folder / "saved")
        for strategy in (LAB + ":hfsdp", "ddp"):
            self.assertEqual(self.hash_of("--steps", 4, "--strategy", strategy, "--resume", self.folder / "saved"), whole)
        self.assertNotEqual(self.hash_of("--steps", 4, "--strategy", "ddp", "--seed", 1), whole)

    def test_a_file_is_found_by_folder_or_by_the_path(self):
        wanted = self.hash_of("--steps", 1, "--strategy", LAB + ":hfsdp")
        self.assertEqual(self.hash_of("--steps", 1, "--strategy", "lab.so:hfsdp", cwd=self.folder), wanted)
        path = {"TESSERA_PLUGIN_PATH": str(self.folder)}
        self.assertEqual(self.hash_of("--steps", 1, "--strategy", "lab.so:hfsdp", env=path), wanted)
        half = self.hash_of("--steps", 1, "--strategy", f"fsdp+{LAB}:f16")
        self.assertEqual(self.hash_of("--steps", 1, "--collectives", f"all_gather={LAB}:f16"), half)
        self.assertNotEqual(half, wanted)

    def test_invalid_plugins_are_one_line_before_start(self):
        (self.folder / "text.so").write_text(TEXT)
        mistakes = {
            "./gone.so:own": "./gone.so: no such file",
            "lab.so:hfsdp": "name its directory too, as ./lab.so",  # not in the current folder
            f"{self.folder}/text.so:own": "text.so: ",
            LAB: f"write {LAB}:NAME; it provides strategy hfsdp, all_gather f16",
            f"{LAB}:fsdp": f"provides no strategy 'fsdp'; it provides strategy hfsdp, all_gather f16",
            f"ddp+{LAB}:g16": "provides no all_gather 'g16'",
            f"fsdp+reduce_scatter={LAB}:f16": "provides no reduce_scatter 'f16'",
            f"zero2+{LAB}:f16": "it rounds",
            f"{WRONG}/otherabi.so:own": "built for 'fsdp 0, quills', but this library is 'fsdp ",
            f"{WRONG}/othersize.so:own": "rebuild it with this library's headers",
            f"{WRONG}/noentry.so:own": "it has no tessera_fsdp_plugin_entry()",
            f"{WRONG}/throws.so:own": "throws.so: no ink",
            f"{WRONG}/twice.so:own": "provides strategy own twice",
            f"{WRONG}/nonsense.so:own": "the optimizer must be too (axis shard)",
            f"{WRONG}/stranger.so:own": "axis tensor, which the mesh does not have; it has replicate shard",
            f"fsdp+{WRONG}/good.so:throwing": "good.so:throwing: the pen is dry",
            f"fsdp+{WRONG}/good.so:priceless": "good.so:priceless: beyond price",
        }
        for strategy, reason in mistakes.items():
            for command in (("train", "--strategy"), ("compare", "--strategies")):
                code, out, err = tool(command[0], *self.common, "--ranks", 2, "--global-batch", 2, command[1], strategy)
                self.assertEqual((code, out), (2, ""), strategy)
                self.assertEqual(len(err.splitlines()), 1, err)
                self.assertIn(reason, err)

    def test_uses_valid_plugin_of_same_file(self):  # control of the mistakes above
        code, out, err = self.train("--steps", 1, "--strategy", f"{WRONG}/good.so:own")
        self.assertEqual(code, 0, err)


if __name__ == "__main__":
    TOOL, LAB, WRONG = (os.path.abspath(path) for path in sys.argv[1:4])
    unittest.main(argv=sys.argv[:1])
