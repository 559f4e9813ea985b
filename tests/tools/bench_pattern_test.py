"""`tessera bench --pattern` with ranks of one host: its text, its JSON, and one line for every mistake."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

TOOL = None


def bench(*arguments):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    done = subprocess.run([TOOL, "bench", *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=400,
                          env={**clean, "TESSERA_TIMEOUT": "60s"})
    return done.returncode, done.stdout, done.stderr


class PatternTest(unittest.TestCase):
    def measure(self, pattern, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "out.json"
            code, out, err = bench("--pattern", pattern, "-n", "3", "-w", "1", "--check", "--json", str(file), *arguments)
            self.assertEqual((code, err), (0, ""), out)
            found = json.loads(file.read_text())
        self.assertEqual(found["results"], [])
        self.assertTrue(all(not line or line.startswith("#") for line in out.splitlines()), out)
        for one in found["patterns"]:
            self.assertEqual(list(one)[:15], ["pattern", "backend", "op", "one_way", "bytes", "dtype", "redop", "memory", "unit", "units", "rounds",
                                              "rates", "outlier", "slow", "wrong"])
            self.assertEqual((one["pattern"], one["wrong"]), (pattern, 0))
            for r in one["rounds"]:
                self.assertAlmostEqual(r["sum_gbps"], sum(group["busbw_gbps"] for group in r["groups"]))
                for group in r["groups"]:
                    self.assertGreater(group["time_us"], 0)
        return found["patterns"], out

    def test_pairs_are_a_matrix(self):
        (one,), out = self.measure("pairs", "--ranks", "4", "-e", "64K")
        self.assertEqual((one["op"], one["one_way"], one["unit"], one["bytes"]), ("send", True, "rank", 65536))
        self.assertEqual([unit["name"] for unit in one["units"]], [f"rank {r}" for r in range(4)])
        links = [link for a in range(4) for b in range(a + 1, 4) for link in ([a, b], [b, a])]
        self.assertEqual([[(g["units"], g["ranks"]) for g in r["groups"]] for r in one["rounds"]], [[(link, link[::-1])] for link in links])
        matrix = one["matrix_gbps"]
        for a in range(4):
            self.assertIsNone(matrix[a][a])
            for b in set(range(4)) - {a}:
                group = next(r["groups"][0] for r in one["rounds"] if r["groups"][0]["units"] == [a, b])
                self.assertEqual(matrix[a][b], group["busbw_gbps"])
                self.assertAlmostEqual(matrix[a][b], 65536 / group["time_us"] / 1e3)
        printed = [re.findall(r"[\d.e+-]+", line)[1:] for line in out.splitlines() if re.match(r"#    [0-3]  ", line)][-4:]
        for row, values in zip(printed, matrix):
            for cell, value in zip(row, values):
                if value is not None:
                    self.assertAlmostEqual(float(cell) / value, 1, delta=0.001)

    def test_pairs_that_run_an_operation_have_one_rate(self):
        (one,), _ = self.measure("pairs", "send_recv", "--ranks", "3", "-e", "4K")
        self.assertEqual((one["op"], one["one_way"]), ("send_recv", False))
        self.assertEqual([rate["units"] for rate in one["rates"]], [[0, 1], [0, 2], [1, 2]])
        for rate in one["rates"]:
            a, b = rate["units"]
            self.assertEqual((one["matrix_gbps"][a][b], one["matrix_gbps"][b][a]), (rate["gbps"],) * 2)

    def test_operations_dtypes_and_sizes(self):
        found, _ = self.measure("groups=2", "all_reduce,reduce", "--ranks", "4", "-b", "1K", "-e", "64K", "-f", "64", "--dtype", "bf16",
                                "--op", "sum,max")
        self.assertEqual([(one["op"], one["redop"], one["bytes"], one["dtype"]) for one in found],
                         [(op, redop, size, "bf16") for op in ("all_reduce", "reduce") for redop in ("sum", "max") for size in (1024, 65536)])
        for one in found:
            self.assertEqual([[g["ranks"] for g in r["groups"]] for r in one["rounds"]], [[[0, 1], [2, 3]]])
            self.assertEqual(one["units"][1], {"name": "group 1 (ranks 2 to 3)", "ranks": [2, 3]})

    def test_neighbors_and_incast_over_tcp(self):
        (one,), _ = self.measure("neighbors", "--ranks", "3", "--backend", "tcp", "-e", "64K")
        self.assertEqual([rate["units"] for rate in one["rates"]], [[0, 1], [1, 2], [2, 0]])
        (one,), out = self.measure("incast", "--ranks", "3", "--backend", "tcp", "-e", "32K")
        self.assertEqual((one["op"], [g["ranks"] for r in one["rounds"] for g in r["groups"]]), ("send", [[0, 1, 2], [1, 0, 2], [2, 0, 1]]))
        for rate, r in zip(one["rates"], one["rounds"]):  # two messages
            self.assertAlmostEqual(rate["gbps"], 65536 / r["groups"][0]["time_us"] / 1e3)
        self.assertIn("not judged, since fewer than four", out)

    def test_bisection_in_a_world_that_another_launcher_started(self):
        done = subprocess.run([TOOL, "run", "-n", "4", "--no-tag", "--", TOOL, "bench", "--pattern", "bisection", "-e", "4K", "-n", "3"],
                              text=True, capture_output=True, timeout=120)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"(?m)^# All at once : [\d.e-]+ GB/s in sum, in the median of 6 rounds$")

    def test_mistakes_are_one_line_and_code_2(self):
        for arguments, says in ((("--pattern", "star"), "--pattern 'star'; known: pairs bisection groups=K neighbors incast"),
                                (("--pattern", "groups=3"), "4 ranks don't make 3 equal groups of two or more; use a divisor of 4"),
                                (("--pattern", "groups=4"), "equal groups of two or more"),
                                (("--pattern", "pairs", "--ranks", "1"), "--pattern needs two ranks or more"),
                                (("--pattern", "incast", "all_reduce"), "--pattern incast consists of sends"),
                                (("--pattern", "pairs", "barrier"), "barrier has none of"),
                                (("--pattern", "pairs", "--csv"), "--csv has no effect with --pattern"),
                                (("--pattern", "pairs", "--root", "1"), "--root has no effect with --pattern"),
                                (("--pattern", "pairs", "--outlier", "0"), "--outlier"),
                                (("--outlier", "3"), "--outlier has no effect without --pattern")):
            code, out, err = bench(*arguments)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), (arguments, out, err))
            self.assertIn(says, err)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
