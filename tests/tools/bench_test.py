"""`tessera bench` as a program: its table, JSON and CSV, and one line for every mistake."""

import csv
import io
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as xml

TOOL = None

OPS = {"all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n, "reduce_scatter": lambda n: (n - 1) / n}


def bench(*arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    done = subprocess.run([TOOL, "bench", *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=400,
                          env={**clean, **environment})
    return done.returncode, done.stdout, done.stderr


def rows(table):
    return [line.split() for line in table.splitlines() if line and not line.startswith("#")]


def read_as_nccl_tests(text):
    """Reads output as scripts around nccl-tests do: the columns named in the header, and the two lines at the end."""
    head = next(line for line in text.splitlines() if re.match(r"#\s+size\s+count\s+type\s+redop\s+root\s", line))
    names = head[1:].split()[:13]
    found = []
    for line in text.splitlines():
        if re.match(r"\s*\d", line):
            cells = line.split()
            found.append({"at": dict(zip(names[:5], cells)), "out": dict(zip(names[5:9], cells[5:9])),
                          "in": dict(zip(names[9:13], cells[9:13]))})
    wrong = re.search(r"^# Out of bounds values : (\d+) (OK|FAILED)", text, re.M)
    speed = re.search(r"^# Avg bus bandwidth\s+:\s+([\d.e+-]+)", text, re.M)
    return head[:116], found, wrong and wrong.groups(), float(speed.group(1))


class BenchTest(unittest.TestCase):
    def test_run_prints_and_writes_documented_results(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "out.json"
            code, out, err = bench(",".join(OPS), "--ranks", "2", "--max-bytes", "1M", "--factor", "8", "--iterations", "20", "--check",
                                   "--json", str(file))
            self.assertEqual((code, err), (0, ""))
            found = json.loads(file.read_text())
            self.assertEqual(os.listdir(folder), ["out.json"])
        self.assertEqual(set(found), {"ranks", "results", "fits", "cold", "memcpy_gbps", "environment", "verdicts", "timing", "misaligned"})
        self.assertEqual(found["ranks"], 2)
        self.assertEqual(set(found["memcpy_gbps"]), {"one_core", "all_ranks"})
        self.assertGreater(min(found["memcpy_gbps"].values()), 0.1)
        self.assertIs(found["cold"], False)
        self.assertEqual([(fit["backend"], fit["op"], fit["points"]) for fit in found["fits"]], [("shm", op, 6) for op in OPS])
        for fit in found["fits"]:
            self.assert_fit(fit, [r for r in found["results"] if r["op"] == fit["op"] and not r["in_place"]])
        self.assertEqual(out.count("# Fit of the time       : "), len(OPS))
        self.assertEqual([(verdict["backend"], verdict["op"]) for verdict in found["verdicts"]], [("shm", op) for op in OPS])
        for verdict in found["verdicts"]:
            self.assertIn(verdict["limit"], ("latency", "memory", "link", "unknown"))
            self.assertIn("# Verdict               : " + verdict["text"] + "\n", out)
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

    def assert_fit(self, fit, results):
        self.assertEqual(list(fit), ["backend", "op", "dtype", "redop", "alpha_us", "beta_us_per_mib", "median_error", "worst_error", "points"])
        line = lambda r: fit["alpha_us"] + fit["beta_us_per_mib"] * r["bytes"] / 2**20
        errors = sorted(abs(line(r) / r["time_us"]["median"] - 1) for r in results)
        self.assertAlmostEqual(fit["worst_error"], errors[-1], places=9)
        self.assertAlmostEqual(fit["median_error"], (errors[2] + errors[3]) / 2, places=9)

    def assert_result(self, r):
        self.assertEqual(list(r), ["backend", "op", "bytes", "dtype", "redop", "time_us", "algbw_gbps", "busbw_gbps", "wrong", "in_place",
                                   "memory", "algorithm", "bound_us", "rounds_us", "noisy"])
        time = r["time_us"]
        self.assertEqual(list(time), ["median", "p99", "min", "max"])
        self.assertTrue(0 < time["min"] <= time["median"] <= time["p99"] <= time["max"], r)
        self.assertAlmostEqual(r["algbw_gbps"], r["bytes"] / time["median"] / 1e3, delta=r["algbw_gbps"] * 1e-9)
        self.assertAlmostEqual(r["busbw_gbps"], r["algbw_gbps"] * OPS[r["op"]](2), delta=r["algbw_gbps"] * 1e-9)
        self.assertEqual((r["backend"], r["dtype"], r["wrong"], r["memory"]), ("shm", "f32", 0, "communicator"))
        small = r["op"] == "all_reduce" and r["bytes"] <= 16384
        self.assertEqual(r["algorithm"], "symmetric" if small else "direct")
        self.assertGreater(r["bound_us"], 0)
        if r["bytes"] >= 1 << 18:  # the same loads and stores can't be far slower than the operation, which also waits for other ranks
            self.assertLess(r["bound_us"], 5 * time["max"])

    def test_uneven_ranks_dtypes_and_roots(self):
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

    def test_lists_of_dtypes_and_reductions_are_a_table_each(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "out.json"
            run = ("all_reduce,all_gather", "--ranks", "2", "-b", "64", "-e", "4K", "-f", "8", "-n", "10", "--dtype", "f32,bf16", "--op",
                   "sum,max")
            code, out, err = bench(*run, "--check", "--backends", "shm,tcp", "--json", str(file))
            self.assertEqual((code, err), (0, ""))
            found = json.loads(file.read_text())
            wanted = [("all_reduce", dtype, redop) for dtype in ("f32", "bf16") for redop in ("sum", "max")]
            wanted += [("all_gather", dtype, "none") for dtype in ("f32", "bf16")]
            name = lambda one: (one["op"], one["dtype"], one["redop"])
            for part in ("fits", "verdicts"):
                self.assertEqual([name(one) for one in found[part]], wanted * 2)
            self.assertEqual([name(r) for r in found["results"] if not r["in_place"] and r["bytes"] == 64], wanted * 2)
            for backend in ("shm", "tcp"):
                self.assertIn(f"\n# all_reduce bf16 max, backend {backend}\n", out)
                self.assertIn(f"\n# all_gather bf16, backend {backend}\n", out)
            self.assertEqual([row[2:4] for row in rows(out)], [list(one[1:]) for one in wanted * 2 for _ in range(3)])
            side = [line.split()[1:4] for line in out[out.index("# Side by side"):].splitlines()[4:]]
            self.assertEqual(side[:6:3], [["all_reduce", "f32", "sum"], ["all_reduce", "f32", "max"]])
            # How fast they are is not the question here: the machine may be busy.
            _, out, _ = bench("all_reduce", "--ranks", "2", "-b", "64", "-e", "4K", "-f", "8", "-n", "10", "--op", "max", "--baseline", str(file))
            self.assertIn(": 6 rows compared", out)  # of f32 and max alone
            for result in found["results"]:
                del result["redop"]  # as older versions wrote it: whatever it was
            file.write_text(json.dumps(found))
            _, out, _ = bench("all_reduce", "--ranks", "2", "-b", "64", "-e", "64", "-n", "10", "--op", "min", "--baseline", str(file))
            self.assertIn(": 2 rows compared", out)

    def test_point_to_point_as_osu_defines_it(self):
        sizes, pairs = (8, 65536), {"ping_pong": 1, "window": 2, "bidirectional": 4}  # what crosses at the same time, of four ranks
        for backend in ("shm", "tcp"):
            with tempfile.TemporaryDirectory() as folder:
                file = pathlib.Path(folder) / "out.json"
                code, out, err = bench(",".join(pairs), "--ranks", "4", "-b", "8", "-e", "64K", "-f", "8192", "-n", "10", "--check", "--backend",
                                       backend, "--json", str(file))
                self.assertEqual((code, err), (0, ""))
                found = json.loads(file.read_text())["results"]
            self.assertEqual([(r["op"], r["bytes"], r["wrong"]) for r in found], [(op, size, 0) for op in pairs for size in sizes])
            for row, r in zip(rows(out), found):
                self.assertAlmostEqual(r["busbw_gbps"], r["bytes"] / r["time_us"]["median"] / 1e3 * pairs[r["op"]])
                self.assertEqual((len(row), row[9]), (17 if r["op"] == "ping_pong" else 18, "N/A"))
                if r["op"] == "ping_pong":
                    self.assertNotIn("messages_per_second", r)
                else:
                    self.assertAlmostEqual(r["messages_per_second"] * r["time_us"]["median"], 1e6 * pairs[r["op"]], delta=1)
                    self.assertAlmostEqual(float(row[17]), r["messages_per_second"], delta=1)
            self.assertEqual(out.count("  msg/s\n"), 2)

    def test_the_time_of_a_message_is_that_of_the_link(self):
        times = {}
        for op in ("ping_pong", "window"):  # over links of 20 ms and 100 MB/s
            code, out, err = bench(op, "--ranks", "2", "-b", "8", "-e", "64K", "-f", "8192", "-n", "3", "-w", "0", "--link", "20ms,100MB/s")
            self.assertEqual(code, 0, err)
            times[op] = [float(row[5]) for row in rows(out)]
        for time in times["ping_pong"]:  # half a round trip
            self.assertGreater(time, 20e3)
            self.assertLess(time, 28e3)
        for time in times["window"]:  # many on the way at once
            self.assertLess(time, 5e3)

    def test_back_to_back_shows_the_mean_of_calls(self):
        """Each call takes the link's latency, however calls are timed: a batch is divided by its calls."""
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "out.json"
            for arguments, timing, words in (((), "per_call", "median over iterations of"), (("--per-call",), "per_call", "median over iterations of"),
                                             (("--aggregate",), "aggregate", "mean of calls back to back,")):
                code, out, err = bench("ping_pong", "--ranks", "2", "-b", "8", "-e", "8", "-n", "60", "--link", "2ms,1GB/s", "--json", str(file), *arguments)
                self.assertEqual((code, err), (0, ""), out)
                self.assertIn(f"time is the {words} the slowest rank's", out)
                found = json.loads(file.read_text())
                (row,) = found["results"]
                self.assertEqual((found["timing"], found["misaligned"]), (timing, False))
                self.assertGreater(row["time_us"]["median"], 1990)
                self.assertLess(row["time_us"]["median"], 4000)
                self.assertTrue(row["time_us"]["min"] <= row["time_us"]["median"] <= row["time_us"]["max"])

    def test_unequal_parts_and_misaligned_buffers_are_checked(self):
        ops = "all_gather_v,reduce_scatter_v,gather_v,scatter_v,all_to_all_v"
        for backend in ("shm", "tcp"):
            code, out, err = bench(ops, "--ranks", "3", "-b", "4", "-e", "100K", "-f", "160", "-n", "5", "--dtype", "f32,u8", "--check", "--misaligned", "--backend", backend)
            self.assertEqual((code, err), (0, ""), out)
            self.assertEqual(out.count("Out of bounds values : 0 OK"), 10)
            self.assertIn("memory communicator, misaligned", out)

    def test_csv_has_one_line_per_result(self):
        code, out, err = bench("all_gather", "--ranks", "2", "--max-bytes", "64", "--iterations", "2", "--csv")
        self.assertEqual((code, err), (0, ""))
        found = list(csv.DictReader(io.StringIO(out)))
        self.assertEqual(len(found), 8)
        self.assertEqual((found[0]["op"], found[1]["in_place"], found[0]["wrong"]), ("all_gather", "true", ""))
        self.assertGreater(float(found[0]["median_us"]), 0)

    def test_scripts_for_nccl_tests_read_it(self):
        golden = (pathlib.Path(__file__).parent / "data" / "nccl_tests.txt").read_text()
        code, out, err = bench("all_reduce", "--ranks", "2", "--max-bytes", "512", "--factor", "8", "--iterations", "5", "--check")
        self.assertEqual((code, err), (0, ""))
        theirs, ours = read_as_nccl_tests(golden), read_as_nccl_tests(out)
        self.assertEqual(ours[0], theirs[0], "the header, to the letter")
        self.assertEqual(len(ours[1]), len(theirs[1]))
        for mine, other in zip(ours[1], theirs[1]):
            self.assertEqual({**mine["at"], "type": "float"}, other["at"])
            for side in ("out", "in"):
                self.assertEqual(list(mine[side]), ["time", "algbw", "busbw", "#wrong"])
                self.assertEqual(mine[side]["#wrong"], "0")
                self.assertGreater(float(mine[side]["time"]), 0)
        self.assertEqual(ours[2], theirs[2])
        mean = [float(row[side]["busbw"]) for row in ours[1] for side in ("out", "in")]
        self.assertAlmostEqual(ours[3], sum(mean) / len(mean), delta=0.006)

    def test_parsers_that_count_from_the_right_read_the_columns_of_nccl_tests(self):
        run = ("all_reduce", "--ranks", "2", "--max-bytes", "64", "--iterations", "5")
        for more, wrong in (((), "N/A"), (("--check",), "0")):
            code, out, err = bench(*run, "--nccl-columns", *more)
            self.assertEqual((code, err), (0, ""))
            rows = [line.split() for line in out.splitlines() if line and not line.startswith("#")]
            self.assertTrue(rows)
            for row in rows:
                self.assertEqual((len(row), row[-1], row[-5]), (13, wrong, wrong))
                self.assertGreater(float(row[-4]), 0)
            self.assertRegex(out, "# Out of bounds values : " + ("0 OK" if more else "N/A") + "\n")
        code, out, _ = bench(*run)  # the control
        self.assertEqual({len(line.split()) for line in out.splitlines() if line and not line.startswith("#")}, {17})

    def test_letters_of_nccl_tests(self):
        code, out, err = bench("all_reduce", "--ranks", "2", "-b", "16", "-e", "1K", "-f", "4", "-n", "3", "-w", "1", "-c")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual([(row[0], row[8]) for row in rows(out)], [(size, "0") for size in ("16", "64", "256", "1024")])
        self.assertIn("# Out of bounds values : 0 OK", out)

    def test_output_shows_cold_and_overlap(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "out.json"
            code, out, err = bench("all_reduce,all_to_all", "--ranks", "2", "--max-bytes", "64K", "--factor", "16", "--iterations", "5", "--check",
                                   "--cold", "--overlap", "--json", str(file))
            self.assertEqual((code, err), (0, ""))
            found = json.loads(file.read_text())
        self.assertIn("caches cold", out.splitlines()[0])
        self.assertIs(found["cold"], True)
        table = rows(out)
        self.assertEqual({len(row) for row in table}, {18})
        for row, r in zip(table, (r for r in found["results"] if not r["in_place"])):
            self.assertGreaterEqual(r["overlap_percent"], 0)
            self.assertAlmostEqual(float(row[17]), r["overlap_percent"], delta=0.051)
            self.assertEqual(r["wrong"], 0)

    def test_the_plot_has_a_curve_for_each_backend_and_operation(self):
        with tempfile.TemporaryDirectory() as folder:
            picture, file = pathlib.Path(folder) / "x.svg", pathlib.Path(folder) / "x.json"
            code, _, err = bench("all_reduce,broadcast,barrier", "--ranks", "2", "--max-bytes", "64K", "--factor", "16", "--iterations", "3",
                                 "--plot", str(picture), "--json", str(file))
            self.assertEqual((code, err), (0, ""))
            text, found = picture.read_text(), json.loads(file.read_text())
        root = xml.fromstring(text)
        self.assertNotRegex(text.replace("http://www.w3.org/2000/svg", ""), r"https?:|url\(|@import|<script|href")
        name = "{http://www.w3.org/2000/svg}"
        curves = {tuple(p.get("data-" + key) for key in ("backend", "op", "measure")): p.get("d")
                  for p in root.iter(name + "path") if p.get("class") == "curve"}
        self.assertEqual(sorted(curves), [("shm", op, measure) for op in ("all_reduce", "broadcast") for measure in ("busbw", "latency")])
        self.assertEqual(len([p for p in root.iter(name + "path")]), 4, "and nothing twice")
        for (_, op, measure), path in curves.items():
            points = [tuple(map(float, point)) for point in re.findall(r"[ML]([\d.e-]+) ([\d.e-]+)", path)]
            results = [r for r in found["results"] if r["op"] == op and not r["in_place"]]
            self.assertEqual(len(points), len(results))
            values = [r["busbw_gbps"] if measure == "busbw" else r["time_us"]["median"] for r in results]
            self.assert_logarithmic([p[0] for p in points], [r["bytes"] for r in results])
            self.assert_logarithmic([-p[1] for p in points], values)
        self.assertIn("shm", [t.text for t in root.iter(name + "text")], "the legend")

    def assert_logarithmic(self, drawn, values):
        """Distances are proportional to those of the logarithms: all decades or octaves have equal length."""
        logs = [math.log(value) for value in values]
        low, high = logs.index(min(logs)), logs.index(max(logs))
        scale = (drawn[high] - drawn[low]) / (logs[high] - logs[low])
        self.assertGreater(scale, 0)
        for at, log in zip(drawn, logs):
            self.assertAlmostEqual(at - drawn[low], scale * (log - logs[low]), delta=0.02)

    def algorithms_on(self, hosts, **environment):
        """{bytes: algorithm} of all_reduce on four ranks, which believe that they are on this many hosts."""
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "out.json"
            on_host = f'export TESSERA_HOST_ID=host$((TESSERA_RANK * {hosts} / 4)); exec "$@"'
            clean = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
            done = subprocess.run([TOOL, "run", "-n", "4", "--", "sh", "-c", on_host, "rank", TOOL, "bench", "all_reduce", "-b", "8", "-e", "256K",
                                   "-f", "32768", "-n", "2", "-w", "1", "--check", "--json", str(file)],
                                  text=True, capture_output=True, timeout=200, env={**clean, **environment})
            self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
            return {r["bytes"]: r["algorithm"] for r in json.loads(file.read_text())["results"]}

    def test_the_algorithm_is_the_one_that_ran_on_one_host_and_across_hosts(self):
        self.assertEqual(self.algorithms_on(1, TESSERA_BACKEND="shm+tcp"), {8: "symmetric", 262144: "direct"})
        for backend in ("tcp", "shm+tcp"):
            self.assertEqual(self.algorithms_on(2, TESSERA_BACKEND=backend), {8: "recursive_doubling", 262144: "direct"}, backend)
        self.assertEqual(self.algorithms_on(2, TESSERA_BACKEND="tcp", TESSERA_ALGO="all_reduce=ring", TESSERA_DETERMINISTIC="0"),
                         {8: "ring", 262144: "ring"})

    def test_tuning_writes_a_table_that_the_next_run_uses(self):
        with tempfile.TemporaryDirectory() as folder:
            table, file = pathlib.Path(folder) / "algo.txt", pathlib.Path(folder) / "out.json"
            options = ("--ranks", "2", "--min-bytes", "32", "--max-bytes", "2M", "--factor", "16", "--iterations", "5")
            code, out, err = bench("all_reduce,all_gather", *options, "--tune", str(table), "--json", str(file), "--check")
            self.assertEqual((code, err), (0, ""))
            found, written = json.loads(file.read_text()), table.read_text()
            lines = [line for line in written.splitlines() if not line.startswith("#")]
            self.assertEqual([line.split("=")[0] for line in lines], ["all_reduce", "all_gather"])
            self.assertEqual(found["tune"], dict(line.split("=") for line in lines))
            self.assertEqual(lines[1], "all_gather=direct")
            algorithms = {(r["op"], r["algorithm"]) for r in found["results"]}
            self.assertEqual(algorithms, {("all_reduce", "direct"), ("all_reduce", "symmetric"), ("all_gather", "direct")})
            self.assertIn("refused", out, "symmetric takes small messages only")
            self.assertNotIn("symmetric", lines[0].split(";")[-1])
            table.write_text("# by hand\nall_reduce=direct\n")
            code, out, err = bench("all_reduce", *options, "--json", str(file), TESSERA_ALGO=f"@{table}")
            self.assertEqual((code, err), (0, ""))
            self.assertEqual({r["algorithm"] for r in json.loads(file.read_text())["results"]}, {"direct"})
        code, _, err = bench("all_reduce", "--ranks", "2", "--max-bytes", "8", TESSERA_ALGO="@/no/such/table")
        self.assertEqual((code, err.count("\n")), (2, 1), err)
        self.assertIn("/no/such/table", err)

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

    def test_invalid_usage_is_one_line_and_code_2(self):
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
            (("--dtype", "f32,f32"), "--dtype: 'f32' is given twice"),
            (("--dtype", "i32,f32", "--op", "sum,bit_and"), "--op bit_and is not defined for --dtype f32"),
            (("--dtype", "f32,bf16", "--plot", "x.svg"), "--plot is for one --dtype and one --op"),
            (("--op", "sum,max", "--tune", "x"), "--tune is for one --dtype and one --op"),
            (("--ranks", "0"), "--ranks"),
            (("send_recv", "--ranks", "1"), "two ranks"),
            (("ping_pong", "--ranks", "1"), "ping_pong: messages need two ranks or more, not --ranks 1"),
            (("all_reduce", "--csv", "--nccl-columns"), "--nccl-columns is about the table's columns; leave it out with --csv"),
            (("ping_pong", "--ranks", "3"), "ping_pong is between pairs of ranks, not of 3; use an even number"),
            (("window", "--overlap"), "window has no --overlap; leave it out"),
            (("bidirectional", "--pattern", "pairs"), "bidirectional has no --pattern; leave it out"),
            (("--iterations", "0"), "--iterations"),
            (("--backends", "shm,warp"), "shm"),
            (("--memory", "shared"), "--memory"),
            (("--json", "/no/such/folder/x.json"), "--json"),
            (("--plot", "/no/such/folder/x.svg"), "--plot"),
            (("--tune", "/no/such/folder/x"), "--tune"),
            (("--tune", "x", "--ranks", "1"), "--ranks 1"),
            (("--tune", "x", "--plot", "x.svg"), "leave --plot out"),
            (("--tune", "x", "--overlap"), "leave --overlap out"),
            (("--tune", "x", "--csv"), "leave --csv out"),
            (("--tune", "x", "--report", "x.html"), "leave --report out"),
            (("all_gather_v", "--tune", "x"), "all_gather_v takes the algorithms of all_gather; tune that"),
            (("--aggregate", "--per-call"), "--aggregate excludes --per-call"),
            (("--aggregate", "--cold"), "--aggregate excludes --cold"),
            (("--aggregate", "--duration", "5s"), "--aggregate excludes --duration"),
            (("--aggregate", "--pattern", "pairs"), "--aggregate has no effect with --pattern"),
            (("--report", "/no/such/folder/x.html"), "--report"),
            (("--backends", "shm,shm"), "'shm' is given twice"),
            (("all_reduce,all_reduce",), "'all_reduce' is given twice"),
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


class ClusterTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.file = pathlib.Path(scratch.name) / "here.json"

    def test_plan_reads_measured_links_and_kernels(self):
        code, out, err = bench("--cluster", str(self.file), "--ranks", "2", "--backends", "tcp", "--max-bytes", "4K", "--factor", "16",
                               "--iterations", "2", "--warmup", "1")
        self.assertEqual((code, err), (0, ""), out)
        cluster = json.loads(self.file.read_text())
        self.assertEqual((cluster["name"], cluster["hosts"], cluster["ranks_per_host"], cluster["sharing"]), ("tcp-2", 1, 2, "in_order"))
        self.assertRegex(cluster["description"], r"cores?, .*; 2 ranks over tcp, 20\d\d-\d\d-\d\d$")
        self.assertEqual({"all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"}, set(cluster["measured"]))
        self.assertEqual({table["ranks"] for table in cluster["measured"].values()}, {2})
        self.assertEqual([point[0] for point in cluster["measured"]["all_gather"]["points"]], [8, 128, 2048])
        kernels = {(table["kernel"], table["dtype"]) for table in cluster["compute"]["kernels"]}
        for kernel in ("linear_forward", "linear_activation_forward", "attention_backward", "attention_dropout_backward", "adam_step", "cross_entropy_forward", "rms_norm_forward", "layer_norm_forward"):
            self.assertIn((kernel, "f32"), kernels)
        self.assertIn(("linear_forward", "bf16"), kernels)
        self.assertEqual({entry["source"] for entry in cluster["sources"]}, {"measured by tessera bench --cluster"})
        for table in cluster["measured"].values():
            times = dict(table["points"])
            self.assertTrue(all(0 <= us <= times[size] for size, us in table["gap"]), table)
            table["points"] = [[size, 0] for size, us in table["points"]]
            for kind in ("busy", "gap"):
                self.assertEqual([size for size, us in table.pop(kind)], [size for size, us in table["points"]])
        cluster["compute"].pop("overhead", None)
        self.file.write_text(json.dumps(cluster))
        before = self.plan()
        for table in cluster["compute"]["kernels"]:
            table["points"] = [[size, 2 * seconds] for size, seconds in table["points"]]
        cluster["compute"]["kernel_latency_us"] *= 2
        self.file.write_text(json.dumps(cluster))
        slower = self.plan()
        self.assertAlmostEqual(slower / before, 2, delta=0.01)
        cluster["compute"]["overhead"] = {"steps": {"others": [[slower / 2, slower], [2 * slower, 5 * slower]], "ddp": [[slower, 9]]}}
        self.file.write_text(json.dumps(cluster))
        self.assertAlmostEqual(self.plan(), slower + 4 * slower / 3, places=6)
        del cluster["compute"]["overhead"]
        for table in cluster["measured"].values():
            table["points"] = [[size, us + 1e6] for size, us in table["points"]]
        self.file.write_text(json.dumps(cluster))
        slowest = self.plan()
        self.assertGreater(slowest, slower + 1000)

    def plan(self):
        done = subprocess.run([TOOL, "plan", "--model", "gpt-nano", "--ranks", "2", "--strategies", "fsdp", "--cluster", str(self.file), "--json",
                               str(self.file) + ".plan"], text=True, capture_output=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return json.loads(pathlib.Path(str(self.file) + ".plan").read_text())["runs"][0]["step_ms"]["median"]

    def test_mistakes_are_one_line_and_code_2(self):
        for arguments, expected in ((("--ranks", "1"), "--cluster needs two ranks or more"),
                                    (("--backends", "shm,tcp"), "a file is for one backend, not for shm,tcp; give one --backend"),
                                    (("--check",), "--check has no effect with --cluster; leave it out"),
                                    (("--ranks", "2", "--max-bytes", "16"), "a link needs three sizes or more")):
            code, out, err = bench("--cluster", str(self.file), *arguments)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), (arguments, out, err))
            self.assertIn(expected, err)
            self.assertFalse(self.file.exists())


class OfStepTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def of_step(self, *arguments, **environment):
        code, out, err = bench("--of-step", "--model", "gpt-nano", "--iterations", "5", *arguments, "--json", str(self.folder / "s.json"),
                               **environment)
        self.assertEqual((code, err), (0, ""), out)
        found = json.loads((self.folder / "s.json").read_text())
        self.assertEqual(set(found), {"ranks", "of_step"})
        return found["of_step"], out

    def test_calls_are_those_of_the_plan_and_each_backend_has_its_times(self):
        step, out = self.of_step("--strategy", "hsdp", "--ranks", "4", "--backends", "shm,tcp")
        done = subprocess.run([TOOL, "plan", "--model", "gpt-nano", "--ranks", "4", "--strategies", "hsdp", "--json", self.folder / "p.json"],
                              capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 0)
        planned = json.loads((self.folder / "p.json").read_text())["runs"][0]["calls_per_step"]
        self.assertEqual((step["model"], step["strategy"], step["ranks"], step["tokens"]), ("gpt-nano", "hsdp", 4, 12 * 64))
        self.assertEqual([one["backend"] for one in step["backends"]], ["shm", "tcp"])
        for one in step["backends"]:
            counts = {op: sum(call["op"] == op for call in one["calls"]) for op in ("all_gather", "reduce_scatter", "all_reduce")}
            self.assertEqual(len(one["calls"]), sum(planned.values()))
            self.assertEqual(counts["reduce_scatter"], planned["reduce_scatter"])
            self.assertGreaterEqual(counts["all_gather"], planned["all_gather"])  # control calls may gather, too
            self.assertEqual({call["ranks"] for call in one["calls"]}, {2, 4})
            for call in one["calls"]:
                self.assertGreater(call["us"], 0)
                self.assertLessEqual(call["best_us"], call["us"])
                self.assertTrue(call["algorithm"] and call["best_algorithm"])
            self.assertLessEqual(one["best_ms"], one["calls_ms"])
            self.assertAlmostEqual(one["calls_ms"], sum(call["us"] for call in one["calls"]) / 1e3, places=6)
            alone = one["compute_ms"] + one["total_ms"]
            self.assertAlmostEqual(one["tokens_per_second"] * alone / 1e3, step["tokens"], places=3)
            self.assertGreaterEqual(one["tokens_per_second_hidden"], one["tokens_per_second"])
            self.assertEqual(one["bits_change_with"], {"size": False, "run": False, "algorithm": False}, one["backend"])
        self.assertEqual(len(rows(out)), 2)

    def test_bits_change_with_the_algorithm_in_any_order_of_sums(self):
        step, _ = self.of_step("--strategy", "ddp", "--ranks", "4", "--backends", "tcp", TESSERA_DETERMINISTIC="0")
        self.assertIs(step["backends"][0]["bits_change_with"]["algorithm"], True)

    def test_mistakes_are_one_line_and_code_2(self):
        for arguments, expected in ((("--of-step", "--ranks", "1"), "a step of one rank makes no calls; use --ranks 2 or more"),
                                    (("--of-step", "--csv"), "--csv has no effect with --of-step; leave it out"),
                                    (("--of-step", "--model", "no"), "no"),
                                    (("--model", "gpt-nano"), "--model has no effect without --of-step; leave it out")):
            code, out, err = bench(*arguments)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), (arguments, out, err))
            self.assertIn(expected, err)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
