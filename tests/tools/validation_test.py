"""bench/plan_published.py: published rows stay within bounds, wrong machines don't, and every mistake is one line.

    validation_test.py TOOL
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import plan_published  # noqa: E402
from published_kernels import attention_time, device_named, product_time  # noqa: E402
from published_rows import parse_rows  # noqa: E402
from published_step import Step  # noqa: E402
from published_workload import Workload  # noqa: E402

TOOL = None
ROWS = pathlib.Path(__file__).parent / "data" / "published_rows.json"


class ValidationTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def run_tool(self, text):
        (self.folder / "rows.json").write_text(text)
        return self.study(self.folder / "rows.json", "--json", self.folder / "v.json")

    def study(self, *arguments):
        return subprocess.run([sys.executable, BENCH / "plan_published.py", *arguments, "--tool", TOOL], text=True, capture_output=True, timeout=200)

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
        self.wrong('[{"id":"s","z":' + "[" * 200000 + "]" * 200000 + "}]", "is not JSON", "recursion")
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
        done = self.study(self.folder / "none.json")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        self.assertIn("No such file", done.stderr)
        done = self.study(ROWS, "--json", "/proc/none/x")
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1))
        self.assertIn("/proc/none/x", done.stderr)
        done = subprocess.run([sys.executable, BENCH / "plan_published.py", ROWS, "--tool", self.folder], text=True, capture_output=True, timeout=30)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1))
        self.assertIn("is no program", done.stderr)

    def test_the_tool_names_the_program(self):
        for option in ("--validate", "--chakra"):
            done = subprocess.run([TOOL, "plan", option, "x"], text=True, capture_output=True, timeout=30)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
            self.assertIn(option, done.stderr)


class KernelTest(unittest.TestCase):
    """Costs by shape."""

    def product(self, device, *size):
        return product_time(device_named(device), *size)

    def test_product_of_one_tile(self):
        # One 64 x 64 tile of 64 steps, with a start worth 150 more: on one of 108 multiprocessors, at 0.62 of its rate.
        rate = 271.2e12 / 0.97 / 108 * 0.62
        self.assertAlmostEqual(self.product("A100-40GB", 64, 64, 64)[0], 64 * 64 * 2 * (64 + 150) / rate, delta=1e-15)

    def test_products_of_several_shapes(self):
        for device, size, seconds in (("A100-80GB", (4096, 4096, 4096), 0.0005304802), ("H100-80GB", (8192, 11008, 4096), 0.000968822543),
                                      ("A100-80GB", (1024, 768, 768), 7.26237112e-06), ("A100-80GB", (768, 768, 16384), 8.46401352e-05)):
            self.assertAlmostEqual(self.product(device, *size)[0] / seconds, 1, delta=1e-8, msg=size)  # the last is split along K
        self.assertFalse(self.product("A100-80GB", 4096, 4096, 4096)[1])

    def test_a_flat_product_takes_the_time_of_its_bytes(self):
        seconds, of_bytes = self.product("H100-80GB", 2048, 128, 2048, 32)
        self.assertTrue(of_bytes)
        self.assertAlmostEqual(seconds / 0.000116659834, 1, delta=1e-8)

    def test_fused_attention(self):
        for device, kernel, size, backward, seconds in (("A100-80GB", "triton", (128, 2048, 128), False, 0.00123990043),
                                                        ("A100-80GB", "triton", (128, 2048, 128), True, 0.00485320048),
                                                        ("H100-80GB", "flash1", (16, 512, 80), False, 8.45623223e-06),
                                                        ("H100-80GB", "flash2", (64, 8192, 128), True, 0.010286607)):
            self.assertAlmostEqual(attention_time(device_named(device), kernel, *size, backward) / seconds, 1, delta=1e-8)

    def test_unknown_names_have_their_generation(self):
        self.assertEqual([device_named(name).name for name in ("H200 NVL", "H100-SXM5", "unknown")], ["H200-SXM", "H100", "A100"])


MODEL = {"layers": 4, "hidden": 1024, "heads": 16, "vocab": 50257, "tied": True}


def step_of(**fields):
    """A step of a small model; `fields` replace its own."""
    row = {"id": "r", "source": {"id": "s"}, "model": MODEL, "cluster": {"id": "c", "gpu": "A100-80GB", "inter_Gbps_per_node": 400},
           "seq": 1024, "micro_batch": 4, "accum": 1, "n_gpus": 8, "strategy": "FSDP", "step_time_s": 0.1, **fields}
    return Step(Workload(parse_rows(json.dumps([row]), "rows.json")[0]), TOOL)


def seconds_of(**fields):
    return step_of(**fields).seconds(plan_published.PRIOR)


class StepTest(unittest.TestCase):
    def test_microbatches_that_are_not_recorded_extend_the_step(self):
        for strategy in ("FSDP", "DDP", "ZeRO-1", "shard-grad-op", "HSDP"):
            seconds = {accum: seconds_of(strategy=strategy, accum=accum, n_gpus=16) for accum in (3, 4, 40)}
            one = seconds[4] - seconds[3]
            self.assertGreater(one, 0, strategy)
            self.assertAlmostEqual(seconds[40], seconds[4] + 36 * one, delta=1e-9, msg=strategy)

    def test_each_parameter_matters_where_it_should(self):
        step = step_of(n_gpus=64, accum=2)
        seconds = lambda **changed: step.seconds({**plan_published.PRIOR, **changed})
        base = seconds()
        for changed in ({"products": 0.4}, {"memory": 0.6}, {"launch_s": 1e-3}):
            self.assertGreater(seconds(**changed), base, changed)
        self.assertGreater(seconds(link=0.1), 2 * base, "bound by communication")
        self.assertAlmostEqual(seconds(overhead=2), base + 20e-3, delta=1e-9)
        self.assertEqual(seconds(), base, "a step can be timed again")

    def test_recomputation_costs_what_it_recomputes(self):
        none, half, everything, some, zero = (seconds_of(n_gpus=1, micro_batch=16, act_ckpt=text)
                                              for text in ("none", "full on 2 of 4", "full", "selective per op", "full on 0 of 4"))
        self.assertGreater(half, none)
        self.assertAlmostEqual(everything - none, 2 * (half - none), delta=1e-6)
        self.assertEqual(zero, none)
        self.assertTrue(none < some < everything)

    def test_collectives_slow_down_the_kernels_beside_them(self):
        fields = {"micro_batch": 32, "strategy": "DDP", "model": {**MODEL, "layers": 17, "vocab": 1024}}
        alone, step = seconds_of(n_gpus=1, **fields), step_of(n_gpus=2, **fields)
        beside = step.seconds(plan_published.PRIOR) - alone
        after = seconds_of(n_gpus=2, overlap="none", **fields) - alone
        # Two ranks reach 85 % of the rate. The gradients of the embedding and of the first block are reduced at the end in any
        # case. While those of the 16 others are, 16 of 108 multiprocessors are busy.
        rate = 227e9 * 0.85
        block, embedding = 2 * step.workload.block_parameters / rate, 2 * step.workload.root_parameters / rate
        self.assertAlmostEqual(after / (17 * block + embedding), 1, delta=0.05)
        self.assertAlmostEqual((beside - embedding - block) / (16 * block * 16 / 108), 1, delta=0.3)

    def test_a_gather_that_is_not_prefetched_waits_for_the_unit_before(self):
        fields = {"n_gpus": 64, "micro_batch": 1, "accum": 2}
        self.assertGreater(seconds_of(prefetch="none", **fields), seconds_of(**fields))


class CalibrationTest(unittest.TestCase):
    def test_finds_the_parameters_of_steps_that_the_model_made(self):
        steps = [step_of(micro_batch=batch, model={"layers": 4, "hidden": 4096, "heads": 32, "vocab": 50257}, accum=8) for batch in (4, 8, 16)]
        prior = plan_published.prior_of(steps[0].workload)
        truth = {**prior, "products": prior["products"] * 0.9}
        measured = [(step, step.seconds(truth)) for step in steps]
        parameters, fitted = plan_published.calibrate(steps[0].workload, measured)
        self.assertEqual(len(fitted), 3)
        self.assertAlmostEqual(parameters["products"] / truth["products"], 1, delta=0.05)
        largest, seconds = measured[-1]
        self.assertAlmostEqual(largest.seconds(parameters) / seconds, 1, delta=0.02)
        self.assertLess(largest.seconds(prior) / seconds, 0.95, "control: the prior is not the answer")
        self.assertEqual(len(plan_published.calibrate(steps[0].workload, [])[1]), 0)
        self.assertEqual(len(plan_published.calibrate(steps[0].workload, measured[:1])[1]), 2)

    def test_outliers_and_calibrating_rows_are_in_no_figure(self):
        rows = [{"id": name, "source": {"id": "s"}, "model": {"layers": 2, "hidden": 512, "heads": 8, "vocab": 1024}, "strategy": "FSDP",
                 "tokens_per_s_per_gpu": 1e5} for name in ("cal", "good", "odd")]
        rows[0]["role"], rows[2]["outlier"] = "calibrate", "marked"
        validation = plan_published.Validation(parse_rows(json.dumps(rows), "rows.json"), TOOL)
        self.assertEqual(len(validation.rows), 3)
        errors, good = validation.errors("s", "yes"), validation.rows[1]
        self.assertEqual((errors["rows"], errors["mean_error"]), (1, good["error"]))
        self.assertAlmostEqual(good["predicted"] / 1e5 * (1 + good["step_error"]), 1, delta=1e-9)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
