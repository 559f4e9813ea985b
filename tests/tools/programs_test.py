"""compare --programs: the programs of examples/parallel against each other, the formulas and the step without bubbles; bad programs.

    programs_test.py TOOL FOLDER_OF_EXAMPLES
"""

import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import unittest

TOOL = None
EXAMPLES = None
RANKS, BLOCKS, ELEMENT = 4, 4, 4
ACTIVATION = 8 * 16 * 32 * ELEMENT  # sequences x positions x width: what a block passes on
PARAMETERS = 53536


class ProgramsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def compare(self, programs, *more, code=0):
        """Programs: {name: "pipeline gpipe"}, of examples/parallel, or another command with a slash."""
        listed = ",".join(f"{name}={command if '/' in command else EXAMPLES / f'parallel_{command}'}" for name, command in programs.items())
        done = subprocess.run([TOOL, "compare", "--ranks", str(RANKS), "--programs", listed, *map(str, more)], capture_output=True, text=True, timeout=100,
                              check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def runs(self, programs, *more):
        file = self.folder / "c.json"
        self.said = self.compare(programs, "--json", file, *more).stdout
        return {run["strategy"]: run for run in json.loads(file.read_text())["runs"]}

    def program(self, text):
        file = self.folder / f"program-{len(list(self.folder.iterdir()))}"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return str(file)

    def test_bits_bytes_and_memory(self):
        runs = self.runs({"data": "data", "fsdp": "fsdp", "tensor": "tensor", "sequence": "tensor sequence", "gpipe": "pipeline gpipe", "1f1b": "pipeline 1f1b",
                          "model": "pipeline model", "gpipe8": "pipeline gpipe 8", "1f1b8": "pipeline 1f1b 8", "context": "context"}, "--steps", "3",
                         "--report", self.folder / "page.html")
        # Additions in one order give one result; others differ in the last digits.
        first = runs["data"]
        equal = {name for name, run in runs.items() if run["final_parameters_hash"] == first["final_parameters_hash"] and run["losses"] == first["losses"]}
        self.assertEqual(equal, {"data", "fsdp", "gpipe", "1f1b"})
        self.assertIn("data fsdp gpipe 1f1b end bitwise equal", self.said)
        for name, run in runs.items():
            for loss, other in zip(run["losses"], first["losses"]):
                self.assertLess(abs(loss / other - 1), 1e-6, name)
        self.assertEqual([len(run["losses"]) for run in runs.values()], [3] * len(runs))

        part = (RANKS - 1) / RANKS
        sums = 4 * BLOCKS  # tensor parallel: two of the forward and two of the backward of each block
        replicated = PARAMETERS - BLOCKS * (4 * 32 * 32 + 2 * 4 * 32 * 32)
        formulas = {"data": {"all_reduce": 2 * part * PARAMETERS * ELEMENT},
                    "fsdp": {"all_gather": 2 * part * PARAMETERS * ELEMENT, "reduce_scatter": part * PARAMETERS * ELEMENT},
                    "tensor": {"all_reduce": sums * 2 * part * ACTIVATION},
                    "sequence": {"all_gather": sums * part * ACTIVATION, "reduce_scatter": sums * part * ACTIVATION,
                                 "all_reduce": 2 * part * replicated * ELEMENT},
                    "model": {"send": 2 * ACTIVATION}, "gpipe": {"send": 2 * ACTIVATION}, "1f1b": {"send": 2 * ACTIVATION},
                    "context": {"all_gather": 2 * BLOCKS * part * ACTIVATION, "reduce_scatter": 2 * BLOCKS * part * ACTIVATION,
                                "all_reduce": 2 * part * PARAMETERS * ELEMENT}}
        for name, formula in formulas.items():
            self.assertEqual({kind: sent for kind, sent in runs[name]["wire_bytes_per_step"].items() if sent}, formula, name)

        parameters = {name: run["model_state_bytes"]["parameter"] for name, run in runs.items()}
        self.assertEqual((parameters["data"], parameters["fsdp"], parameters["context"]), (PARAMETERS * ELEMENT, PARAMETERS, PARAMETERS * ELEMENT))
        self.assertEqual(parameters["tensor"], (replicated + (PARAMETERS - replicated) // RANKS) * ELEMENT)
        activations = {name: run["peak_bytes"]["activation"] for name, run in runs.items()}
        self.assertLess(activations["1f1b8"], 0.7 * activations["gpipe8"])  # 4 of 8 microbatches in flight
        self.assertGreater(activations["1f1b"], 0.7 * activations["gpipe"])  # the control: 4 of 4

        page = (self.folder / "page.html").read_text()
        self.assertFalse("<h2>Who holds what" in page)  # programs have no units
        self.assertTrue("<h2>One step over time" in page)

    def test_bubbles(self):
        """Waiting can only be longer than the formula says: the machine is busy."""
        block = 40  # ms
        runs = self.runs({"data": f"data --block-ms {block}", "gpipe": f"pipeline gpipe --block-ms {block}", "8": f"pipeline 1f1b 8 --block-ms {block}",
                          "model": f"pipeline model --block-ms {block}"}, "--steps", "2")
        for name, microbatches in (("gpipe", 4), ("8", 8), ("model", 1)):
            whole = 3 * block * (microbatches + RANKS - 1) / microbatches  # forward and backward of a block, and of those that others are in
            bubble = 3 * block * (RANKS - 1) / microbatches
            self.assertGreater(runs[name]["step_ms"]["median"], 0.98 * whole, name)
            self.assertGreater(runs[name]["exposed_communication_ms"], 0.9 * bubble, name)
        self.assertLess(runs["data"]["exposed_communication_ms"], runs["model"]["exposed_communication_ms"] / 3)  # the control

    def test_rounds_and_other_lines(self):
        program = self.program(f"[ $TESSERA_RANK = 0 ] && echo hello; exec {EXAMPLES}/parallel_data \"$@\"")
        said = self.compare({"a": program, "b": "data"}, "--steps", "1", "--repeat", "2").stdout
        self.assertEqual(said.count("a: hello\n"), 2)
        self.assertIn("a b end bitwise equal", said)

    def test_what_is_wrong_is_said(self):
        nothing = self.program("exit 0")
        for programs, more, text in (({"a": nothing}, (), "a printed no result"),
                                     ({"a": self.program("echo '{\"losses\": 3}'")}, (), "a"),
                                     ({"a": "/no/such"}, (), "/no/such"),
                                     ({"a": "data"}, ("--model", "gpt-nano"), "--model has no effect on --programs"),
                                     ({"a": "data"}, ("--strategies", "ddp"), "--strategies has no effect"),
                                     ({"a": "data"}, ("--steps", "0"), "--steps 0"),
                                     ({"a": "data"}, ("--json", "/no/such/folder/x"), "--json")):
            done = self.compare(programs, *more, code=2)
            self.assertIn(text, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        done = subprocess.run([TOOL, "compare", "--programs", f"{EXAMPLES}/parallel_data,parallel_data={EXAMPLES}/parallel_fsdp"], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertEqual((done.returncode, "two programs are called 'parallel_data'" in done.stderr), (2, True), done.stderr)
        failed = self.compare({"a": self.program("exit 3")}, code=1)
        self.assertIn("rank", failed.stderr)


if __name__ == "__main__":
    EXAMPLES = pathlib.Path(sys.argv.pop(2))
    TOOL = sys.argv.pop(1)
    os.environ.pop("TESSERA_BACKEND", None)
    unittest.main()
