"""tessera plan --validate: published rows stay within bounds, wrong machines don't, and every mistake is one line.

    validation_test.py TOOL
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = None
ROWS = pathlib.Path(__file__).parent / "data" / "published_rows.json"


class ValidationTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def run_tool(self, text):
        (self.folder / "rows.json").write_text(text)
        return subprocess.run([TOOL, "plan", "--validate", self.folder / "rows.json", "--json", self.folder / "v.json"],
                              text=True, capture_output=True, timeout=200)

    def validate(self, objects):
        done = self.run_tool(json.dumps(objects))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return json.loads((self.folder / "v.json").read_text()), done.stdout

    def wrong(self, text, *parts):
        done = self.run_tool(text)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
        for part in parts:
            self.assertIn(part, done.stderr)

    def errors(self, objects):
        result, _ = self.validate(objects)
        return {row["id"]: row["error"] for row in result["rows"] if not row["calibration"] and "outlier" not in row}

    def test_published_rows_stay_within_bounds(self):
        result, text = self.validate(json.loads(ROWS.read_text()))
        for source, errors in result["by_source"].items():
            self.assertLess(errors["mean_error"], 0.05, source)
            self.assertLess(errors["p90_error"], 0.10, source)
            self.assertLess(errors["max_error"], 0.10, source)
        self.assertEqual({source: errors["rows"] for source, errors in result["by_source"].items()},
                         {"atorch": 2, "fms-fsdp": 3, "fsdp-paper": 2, "titan-a100": 2})
        for row in result["rows"]:
            self.assertAlmostEqual(row["error"], abs(row["predicted"] / row["measured"] - 1))
        self.assertTrue(all(len(machine["fitted"]) <= 3 for machine in result["fitted"]))
        self.assertEqual([row["id"] for row in result["out_of_reach"]], ["titan-h100-8b-8-compile"])
        outliers = text[text.index("\noutliers"):text.index("\nout of reach")]
        self.assertIn("fsdppaper-175b-b2-n128", outliers)
        self.assertIn("memory almost full", outliers)

    def test_one_object_a_line_gives_the_same(self):
        objects = json.loads(ROWS.read_text())
        lines = self.run_tool("\n".join(map(json.dumps, objects)) + "\n")
        self.assertEqual((lines.returncode, lines.stderr), (0, ""))
        self.assertEqual(lines.stdout, self.validate(objects)[1])

    def test_control_wrong_machines_exceed_the_bounds(self):
        objects = json.loads(ROWS.read_text())
        for cluster in objects:
            if cluster["id"] == "ibm-a100":
                cluster["gpu"] = "H100-80GB"  # three times the rate of products
        self.assertGreater(self.errors(objects)["fms-feb24-70b-a100"], 0.10)
        objects = json.loads(ROWS.read_text())
        for cluster in objects:
            if cluster["id"] == "meta-a100-roce":
                cluster["inter_Gbps_per_node"] /= 2
        self.assertGreater(self.errors(objects)["fsdppaper-fig6b-noprefetch-n128"], 0.10)

    def test_steps_without_calibration_are_those_of_an_independent_simulation(self):
        # Seconds by a simulation with a schedule of its own, which was written before this one: hsdp, fsdp, zero1.
        expected = {"fms-mar24-7b-a100": 2.15085, "fms-feb24-70b-a100": 65.17912, "atorch-7b-n64": 4.87882,
                    "llmc-124m": 0.31270, "titan-a100-l3-8b-selop": 2.77825, "titan-a100-l2-13b-none": 3.72168}
        objects = json.loads(ROWS.read_text())
        by = {thing["id"]: thing for thing in objects if thing["kind"] == "training"}
        sources = {thing["id"]: thing for thing in objects if thing["kind"] == "source"}
        for thing in objects:
            thing.pop("role", None)
        predicted = {row["id"]: row["predicted"] for row in self.validate(objects)[0]["rows"]}
        for name, seconds in expected.items():
            row = {**sources[by[name]["source"]]["defaults"], **by[name]}
            tokens = row["seq"] * row["micro_batch"] * row["accum"]
            self.assertLess(abs(tokens / predicted[name] / seconds - 1), 0.015, name)

    def test_rows_hold_what_they_refer_to_and_need_no_reach(self):
        objects = json.loads(ROWS.read_text())
        by = {thing["id"]: thing for thing in objects}
        row = dict(by["atorch-7b-n16"])
        for key in ("reach", "role"):
            row.pop(key, None)
        row.update(source=by["atorch"], cluster=by["ant-a100"], model=by["llama2-7b"])
        result, text = self.validate([row])
        self.assertEqual(result["by_source"]["atorch"]["rows"], 1)
        self.assertLess(result["rows"][0]["error"], 0.10)
        self.assertIn("(no row)", text)

    def test_rows_that_others_wrote_are_out_of_reach_by_their_fields(self):
        row = {"id": "r", "source": {"id": "s"}, "model": {"layers": 2, "hidden": 256, "heads": 4, "vocab": 512},
               "strategy": "FSDP", "step_time_s": 1}
        for more, reason in (({"precision": "fp8"}, "fp8"), ({"compile": True}, "compiled"),
                             ({"strategy": "FSDP + TP 8"}, "TP 8"), ({"step_time_s": None}, "no measured"),
                             ({"micro_batch": 10**9, "seq": 10**9}, "at most 1e+10 tokens"),
                             ({"model": {**row["model"], "layers": 200000}}, "at most 65536")):
            result, text = self.validate([{**row, **more}])
            self.assertEqual((result["rows"], result["by_source"]), ([], {}))
            self.assertIn(reason, result["out_of_reach"][0]["reason"])
            self.assertIn(reason, text)

    def test_mistakes_are_one_line_and_code_2(self):
        row = {"id": "r1", "source": {"id": "s"}, "model": {"layers": 2, "hidden": 256, "heads": 4, "vocab": 512},
               "step_time_s": 1}
        self.wrong("", "rows.json", "empty")
        self.wrong("[1]", "row 1", "object")
        self.wrong("{", "line 1")
        self.wrong("[]", "no training rows")
        self.wrong(json.dumps([{"kind": "training"}]), "row 1", "id")
        self.wrong(json.dumps([row, row]), "r1", "twice")
        for field, value in (("model", "unknown"), ("model", 3), ("cluster", "unknown"), ("source", "unknown"),
                             ("source", None), ("model", None), ("n_gpus", "8"), ("n_gpus", 0), ("n_gpus", 1 << 21), ("accum", 1.5),
                             ("seq", -1), ("step_time_s", "fast"), ("strategy", 1), ("reach", "maybe"),
                             ("micro_batch", 1e300), ("tokens_per_s_per_gpu", True)):
            self.wrong(json.dumps([{**row, field: value}]), "r1", field)
        for field, value in (("layers", None), ("hidden", "wide"), ("heads", 0), ("vocab", 1.5), ("tied", "yes")):
            self.wrong(json.dumps([{**row, "model": {**row["model"], field: value}}]), "r1", "model", field)
        done = subprocess.run([TOOL, "plan", "--validate", ROWS, "--ranks", "4"], text=True, capture_output=True)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        self.assertIn("--ranks", done.stderr)
        done = subprocess.run([TOOL, "plan", "--validate", self.folder / "none.json"], text=True, capture_output=True)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
