"""`tessera bench` as a program: its table, JSON and CSV, and one line for every mistake."""

import csv
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = None

OPS = {"all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n, "reduce_scatter": lambda n: (n - 1) / n}


def bench(*arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    done = subprocess.run([TOOL, "bench", *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60,
                          env={**clean, **environment})
    return done.returncode, done.stdout, done.stderr


def rows(table):
    return [line.split() for line in table.splitlines() if line and not line.startswith("#")]


class BenchTest(unittest.TestCase):
    def test_a_real_run_prints_and_writes_what_the_page_says(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "out.json"
            code, out, err = bench(",".join(OPS), "--ranks", "2", "--max-bytes", "1M", "--factor", "8", "--iterations", "20", "--check",
                                   "--json", str(file))
            self.assertEqual((code, err), (0, ""))
            found = json.loads(file.read_text())
            self.assertEqual(os.listdir(folder), ["out.json"])
        self.assertEqual(set(found), {"ranks", "results", "memcpy_gbps"})
        self.assertEqual(found["ranks"], 2)
        self.assertEqual(set(found["memcpy_gbps"]), {"one_core", "all_ranks"})
        self.assertGreater(min(found["memcpy_gbps"].values()), 0.1)
        sizes = [8 * 8**i for i in range(6)]
        cases = [(r["op"], r["bytes"], r["in_place"]) for r in found["results"]]
        self.assertEqual(cases, [(op, size, place) for op in OPS for size in sizes for place in (False, True)])
        for r in found["results"]:
            self.assert_result(r)

        table = rows(out)
        self.assertEqual(len(table), len(OPS) * len(sizes))
        for row, r in zip(table, found["results"][::2]):
            self.assertEqual(len(row), 17, row)
            per_rank = 1 if r["op"] == "all_reduce" else 2
            reduces = "none" if r["op"] == "all_gather" else "sum"
            self.assertEqual(row[:5], [str(r["bytes"]), str(r["bytes"] // 4 // per_rank), "f32", reduces, "-1"])
            self.assertAlmostEqual(float(row[5]), r["time_us"]["median"], delta=0.006 + r["time_us"]["median"] / 1000)
            self.assertAlmostEqual(float(row[7]), r["busbw_gbps"], delta=0.006)
            self.assertEqual((row[8], row[12]), ("0", "0"))
            self.assertEqual(row[13], row[5], "p50 is the time")
        self.assertEqual(out.count("# Out of bounds values : 0 OK\n"), len(OPS))
        self.assertIn("# Avg bus bandwidth    : ", out)

    def assert_result(self, r):
        self.assertEqual(list(r), ["backend", "op", "bytes", "dtype", "time_us", "algbw_gbps", "busbw_gbps", "wrong", "in_place", "memory",
                                   "algorithm", "bound_us"])
        time = r["time_us"]
        self.assertEqual(list(time), ["median", "p99", "min", "max"])
        self.assertTrue(0 < time["min"] <= time["median"] <= time["p99"] <= time["max"], r)
        self.assertAlmostEqual(r["algbw_gbps"], r["bytes"] / time["median"] / 1e3, delta=r["algbw_gbps"] * 1e-9)
        self.assertAlmostEqual(r["busbw_gbps"], r["algbw_gbps"] * OPS[r["op"]](2), delta=r["algbw_gbps"] * 1e-9)
        self.assertEqual((r["backend"], r["dtype"], r["wrong"], r["memory"]), ("shm", "f32", 0, "communicator"))
        self.assertIn(r["algorithm"], ("auto", "direct"))
        self.assertGreater(r["bound_us"], 0)
        if r["bytes"] >= 1 << 18:  # the same loads and stores can't be far slower than the operation that waits for others too
            self.assertLess(r["bound_us"], 5 * time["max"])

    def test_odd_ranks_other_types_and_roots(self):
        code, out, err = bench("reduce,all_to_all,broadcast", "--ranks", "3", "--min-bytes", "4", "--max-bytes", "1000", "--factor", "9", "--dtype",
                               "bf16", "--op", "max", "--root", "2", "--iterations", "2", "--memory", "ordinary", "--check")
        self.assertEqual((code, err), (0, ""))
        table = rows(out)
        self.assertEqual([row[:5] for row in table],
                         [[str(2 * n), str(n), "bf16", "max", "2"] for n in (2, 18, 162)] +
                         [[str(6 * n), str(n), "bf16", "none", "-1"] for n in (0, 6, 54)] +
                         [[str(2 * n), str(n), "bf16", "none", "2"] for n in (2, 18, 162)])
        self.assertEqual(table[3][9:13], ["N/A"] * 4, "all_to_all has no in-place form")
        self.assertEqual({row[8] for row in table}, {"0"})

    def test_csv_has_one_line_per_result(self):
        code, out, err = bench("all_gather", "--ranks", "2", "--max-bytes", "64", "--iterations", "2", "--csv")
        self.assertEqual((code, err), (0, ""))
        found = list(csv.DictReader(io.StringIO(out)))
        self.assertEqual(len(found), 8)
        self.assertEqual((found[0]["op"], found[1]["in_place"], found[0]["wrong"]), ("all_gather", "true", ""))
        self.assertGreater(float(found[0]["median_us"]), 0)

    def test_one_rank(self):
        code, out, err = bench("--ranks", "1", "--backends", "shm", "all_reduce,barrier", "--max-bytes", "64", "--iterations", "2", "--check")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual([row[7] for row in rows(out)], ["0.00"] * 5, "nothing crosses a bus")

    def test_a_world_that_another_launcher_started(self):
        done = subprocess.run([TOOL, "run", "-n", "2", "--no-tag", "--", TOOL, "bench", "all_reduce", "--max-bytes", "64", "--iterations", "2", "--check"],
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(len(rows(done.stdout)), 4)
        self.assertIn("ranks 2,", done.stdout)

    def test_mistakes_end_with_2_and_one_line_that_helps(self):
        for arguments, says in (
            (("all_reduce,allgather",), "'allgather'; known: all_reduce all_gather"),
            (("send",), "'send'"),
            (("--min-bytes", "2M", "--max-bytes", "1M"), "--min-bytes 2M is more than --max-bytes 1M"),
            (("--min-bytes", "0"), "--min-bytes"),
            (("--min-bytes", "8x"), "--min-bytes"),
            (("--max-bytes", "-8"), "--max-bytes"),
            (("--factor", "1"), "--factor"),
            (("--dtype", "fp32"), "f32"),
            (("--op", "xor"), "premul_sum"),
            (("all_gather", "--op", "max"), "--op max: all_gather reduces nothing"),
            (("all_reduce", "--root", "1"), "--root 1: all_reduce has no root"),
            (("reduce", "--root", "4"), "--root"),
            (("--ranks", "0"), "--ranks"),
            (("send_recv", "--ranks", "1"), "two ranks"),
            (("--iterations", "0"), "--iterations"),
            (("--backends", "shm,warp"), "shm"),
            (("--memory", "shared"), "--memory"),
            (("--json", "/no/such/folder/x.json"), "--json"),
            (("--cold",), "--cold"),
            (("--overlap",), "--overlap"),
            (("--plot", "x.png"), "--plot"),
            (("--tune", "x"), "--tune"),
        ):
            code, out, err = bench(*arguments)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), (arguments, out, err))
            self.assertTrue(err.startswith("tessera: "), err)
            self.assertIn(says, err)

    def test_a_backend_of_the_environment_that_is_unknown(self):
        code, _, err = bench("all_reduce", TESSERA_BACKEND="warp")
        self.assertEqual((code, err.count("\n")), (2, 1), err)
        self.assertIn("'warp'", err)
        self.assertIn("shm", err)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
