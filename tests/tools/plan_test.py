"""tessera plan: the ZeRO table against a real run, its page, the cluster file, and one line for every mistake.

    plan_test.py TOOL
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from report_test import Page, draw

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60


def tool(*arguments, timeout=120):
    done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


class PlanTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def right(self, *arguments):
        code, out, err = tool(*arguments)
        self.assertEqual((code, err), (0, ""), arguments)
        return out

    def wrong(self, *arguments):
        code, out, err = tool("plan", *arguments)
        self.assertEqual((code, out, err.count("\n")), (2, "", 1), (arguments, out, err))
        return err

    def table(self, *arguments):
        out = self.right("plan", *arguments, "--json", self.folder / "t.json")
        return json.loads((self.folder / "t.json").read_text()), out

    def test_zero_table_of_the_paper(self):
        table, out = self.table("--parameters", "7.5e9", "--ranks", "64")
        self.assertEqual((table["ranks"], table["parameters"]), (64, 7500000000))
        total = {row["strategy"]: sum(row["parts"].values()) for row in table["rows"]}
        self.assertEqual(list(total), json.loads(self.right("info", "--json"))["strategies"])
        self.assertEqual([round(total[name] / 1e9, 2) for name in ("ddp", "zero1", "zero2", "fsdp")], [120, 31.41, 16.64, 1.88])
        for row in table["rows"]:
            self.assertEqual(row["model_state_bytes"], total[row["strategy"]])
        shown = {line.split()[0]: line.split()[-1] for line in out.splitlines()[2:]}
        self.assertEqual([shown[name] for name in ("ddp", "zero1", "zero2", "fsdp")], ["120", "31.4", "16.6", "1.9"])
        self.assertEqual(table, self.table("--parameters", "7.5B", "--ranks", "64", "--precision", "bf16")[0])
        self.assertNotEqual(table, self.table("--parameters", "7.5B", "--ranks", "64", "--precision", "f32")[0])

    def test_list_of_ranks_has_a_column_each(self):
        table, out = self.table("--parameters", "7500000000", "--ranks", "1,4,16", "--strategies", "zero2,fsdp")
        self.assertEqual(table["ranks"], [1, 4, 16])
        self.assertEqual([(row["strategy"], row["ranks"]) for row in table["rows"]],
                         [(name, ranks) for name in ("zero2", "fsdp") for ranks in (1, 4, 16)])
        self.assertEqual(out.splitlines()[1].split(), ["strategy", "1", "4", "16"])
        self.assertEqual(out.splitlines()[2].split(), ["zero2", "120", "41.3", "21.6"])
        self.assertEqual(out.splitlines()[3].split(), ["fsdp", "120", "30.0", "7.5"])
        table, out = self.table("--parameters", "1e9", "--ranks", "3,4", "--cluster", "a100-efa")
        self.assertEqual([row["ranks"] for row in table["rows"] if row["strategy"] == "hsdp"], [4])
        self.assertIn("left out: hsdp: 3 ranks", out)

    def test_real_run_keeps_the_bytes_of_the_table(self):
        (self.folder / "text").write_text(TEXT)
        for more in (["--precision", "bf16"], ["--precision", "f32"], ["--precision", "bf16", "--reduce-dtype", "f32"],
                     ["--precision", "f32", "--optimizer", "sgd", "--momentum", "0.9"]):
            names = "ddp,zero1,zero2,fsdp,hsdp,shard_grad_op"
            self.right("compare", "--model", "gpt-nano", "--ranks", 4, "--steps", 2, "--global-batch", 4, "--seq-len", 16, "--threads", 1,
                       "--data", self.folder / "text", "--strategies", names, "--json", self.folder / "run.json", *more)
            runs = json.loads((self.folder / "run.json").read_text())["runs"]
            elements = {sum(unit["elements"] + unit["padding"] for unit in run["units"]) for run in runs}
            for run in runs:
                padded = sum(unit["elements"] + unit["padding"] for unit in run["units"])
                table, _ = self.table("--parameters", padded, "--ranks", 4, "--strategies", run["strategy"], *more)
                self.assertEqual(table["rows"][0]["parts"], run["model_state_bytes"], (run["strategy"], more))
                self.assertEqual(table["rows"][0]["mesh"], run["mesh"])
            # The negative control: with another number of parameters the bytes differ.
            table, _ = self.table("--parameters", min(elements) - 64, "--ranks", 4, "--strategies", "fsdp", *more)
            self.assertNotEqual(table["rows"][0]["parts"], runs[3]["model_state_bytes"])

    def test_page_has_a_bar_of_three_parts_for_each_strategy(self):
        table, _ = self.table("--parameters", "7.5B", "--ranks", "16,64", "--cluster", "h100-400g", "--report", self.folder / "page.html")
        page = Page(draw(self.folder / "page.html", self.folder))
        self.assertEqual(page.loads, [])
        self.assertEqual(len(page.marks), len(table["rows"]), "a line at the memory of a rank")
        for ranks in (16, 64):
            rows = page.table(f"Bytes of model state per rank, {ranks} ranks")[1:]
            expected = [row for row in table["rows"] if row["ranks"] == ranks]
            self.assertEqual([row[0] for row in rows], [row["strategy"] for row in expected])
            for row, one in zip(rows, expected):
                self.assertEqual([int(cell.replace(",", "")) for cell in row[2:]], [*one["parts"].values(), one["model_state_bytes"]])
        widths = [float(re.search(r"width: ([\d.]+)%", style).group(1)) for _, style in page.bars]
        first = max(row["model_state_bytes"] for row in table["rows"] if row["ranks"] == 16)
        parts = [part for row in table["rows"] if row["ranks"] == 16 for part in row["parts"].values()]
        for width, part in zip(widths, parts):
            self.assertAlmostEqual(width, 100 * part / first, delta=0.01)

    def test_clusters_are_listed_written_and_read(self):
        out = self.right("plan", "--cluster", "list", "--json", self.folder / "list.json")
        clusters = json.loads((self.folder / "list.json").read_text())["clusters"]
        self.assertEqual([line.split()[0] for line in out.splitlines()], [cluster["name"] for cluster in clusters])
        self.assertLessEqual({"laptop", "cpu-10gbe", "cpu-25gbe", "a100-200g", "a100-efa", "h100-400g"}, {c["name"] for c in clusters})
        for cluster in clusters:
            first, again = self.folder / "first.json", self.folder / "again.json"
            self.right("plan", "--cluster", cluster["name"], "--json", first)
            self.right("plan", "--cluster", first, "--json", again)
            self.assertEqual(first.read_text(), again.read_text())
            self.assertEqual(json.loads(self.right("plan", "--cluster", cluster["name"])), json.loads(first.read_text()))

    def test_cluster_file_sets_mesh_and_memory(self):
        file = self.folder / "c.json"
        self.right("plan", "--cluster", "h100-400g", "--json", file)
        cluster = json.loads(file.read_text())
        cluster.update(ranks_per_host=4, hosts=4)
        file.write_text(json.dumps(cluster))
        table, out = self.table("--parameters", "7.5B", "--ranks", 16, "--strategies", "ddp,hsdp", "--cluster", file)
        self.assertEqual([row["mesh"] for row in table["rows"]], [[1, 16], [4, 4]])
        self.assertIn("120*", out)
        self.assertIn("has room for 16", self.wrong("--parameters", "7.5B", "--ranks", 32, "--cluster", file))
        before = file.read_text()
        self.assertIn("which it would replace", self.wrong("--cluster", file, "--json", file))
        self.assertEqual(file.read_text(), before)
        cluster["links"]["inter"]["latency_us"] = "fast"
        file.write_text(json.dumps(cluster))
        self.assertIn("links.inter.latency_us is \"fast\"; needs a number", self.wrong("--cluster", file))
        file.write_text("{")
        self.assertIn("is not JSON: line 1", self.wrong("--cluster", file))

    def test_mistakes_are_one_line_and_code_2(self):
        for value in ("0", "-1", "x", "1.5", "nan", "1e999", ""):
            self.assertIn("--parameters", self.wrong(f"--parameters={value}"))
        given = ("--parameters", "7B")
        for value in ("0", "-4", "x", "4,0", "4,4", "2.5", "99999999999"):
            self.assertIn("--ranks", self.wrong(*given, f"--ranks={value}"))
        self.assertIn("--mesh", self.wrong(*given, "--ranks", 6, "--mesh", "2x2"))
        self.assertIn("--mesh", self.wrong(*given, "--ranks", "4,8", "--mesh", "2x2"))
        self.assertIn("--mesh", self.wrong(*given, "--mesh", "x"))
        self.assertIn("'nope'", self.wrong(*given, "--strategies", "nope"))
        self.assertIn("hsdp: 3 ranks", self.wrong(*given, "--ranks", 3, "--strategies", "hsdp"))
        self.assertIn("--precision", self.wrong(*given, "--precision", "f64"))
        self.assertIn("--reduce-dtype", self.wrong(*given, "--precision", "f32", "--reduce-dtype", "bf16"))
        self.assertIn("nesterov", self.wrong(*given, "--nesterov"))
        self.assertIn("--seq-len has no effect with --parameters", self.wrong(*given, "--seq-len", 8))
        self.assertIn("--ranks has no effect with --cluster list", self.wrong("--cluster", "list", "--ranks", 8))
        self.assertIn("known: laptop", self.wrong("--cluster", "nope"))
        self.assertIn("--json", self.wrong(*given, "--json", "/no/such/folder/f"))
        self.assertIn("--parameters", self.wrong())
        self.assertIn("--parameters", self.wrong("--ranks", 8))


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main(verbosity=2)
