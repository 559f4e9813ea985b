"""tessera explain: explain_test.py TOOL LAB.so, or with --write after them: writes the expected outputs anew.

Simulated steps are compared with whole expected outputs, and what they say with things computed here: shards with a
layout made from the model's shapes, bytes with the formulas of docs/comparison.md, values with those of train and
compare. Each check has a negative control: it is given one wrong figure, which it must find.
"""

import copy
import fcntl
import json
import math
import os
import pathlib
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import unittest

TOOL, LAB = None, None
EXPECTED = pathlib.Path(__file__).parent / "data" / "explain"
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 200
# Each output: arguments. The plug-in's file is beside the process, so that its name is the same everywhere.
STEPS = {name: ("--strategy", name) for name in ("ddp", "zero1", "zero2", "fsdp", "hsdp")}
STEPS["plugin"] = ("--strategy", "./lab.so:hfsdp")
STEPS["tall"] = ("--model", "gpt-tall", "--ranks", "8", "--global-batch", "16", "--checkpoint-activations")
# gpt-nano: the parameters of a block in the order of registration, and of the root.
WIDTH, HIDDEN, VOCABULARY, CONTEXT = 64, 256, 256, 64
BLOCK = [("ln_1.weight", WIDTH), ("ln_1.bias", WIDTH), ("attn.c_attn.weight", 3 * WIDTH * WIDTH), ("attn.c_attn.bias", 3 * WIDTH),
         ("attn.c_proj.weight", WIDTH * WIDTH), ("attn.c_proj.bias", WIDTH), ("ln_2.weight", WIDTH), ("ln_2.bias", WIDTH),
         ("mlp.c_fc.weight", HIDDEN * WIDTH), ("mlp.c_fc.bias", HIDDEN), ("mlp.c_proj.weight", HIDDEN * WIDTH), ("mlp.c_proj.bias", WIDTH)]
ROOT = [("wte.weight", VOCABULARY * WIDTH), ("wpe.weight", CONTEXT * WIDTH), ("ln_f.weight", WIDTH), ("ln_f.bias", WIDTH)]
UNITS = {"root": ROOT, "h.0": [("h.0." + name, count) for name, count in BLOCK], "h.1": [("h.1." + name, count) for name, count in BLOCK]}


def tool(*arguments, cwd=None, columns=None):
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    if columns is not None:
        environment["COLUMNS"] = str(columns)
    done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=100, cwd=cwd, env=environment)
    return done.returncode, done.stdout, done.stderr


def layout(parameters, ranks):
    """The offset of each parameter and the padded length: each starts at a multiple of 8, and so does each of the parts."""
    offsets, end = {}, 0
    for name, count in parameters:
        offsets[name] = (end, count)
        end = -(-(end + count) // 8) * 8
    return offsets, -(-end // (8 * ranks)) * 8 * ranks


def shard_start(parameters, ranks, parts, part):
    """The parameter and its element at which a part begins."""
    offsets, padded = layout(parameters, ranks)
    begin = padded // parts * part
    for name, (offset, count) in offsets.items():
        if begin < offset + count:
            return f"{name}[{max(0, begin - offset)}]"
    raise AssertionError("a part without parameters")


def events(document):
    """What happens, without times: rows of waits and resumptions depend on them."""
    return [(row["event"], row["unit"]) for row in document["rows"] if not row["event"].endswith("_wait") and not row["text"].endswith(", on")]


class ExplainTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        (cls.folder / "text.txt").write_text(TEXT)
        (cls.folder / "lab.so").symlink_to(LAB)
        cls.data = ("--data", cls.folder / "text.txt")

    def explain(self, *arguments, columns=None):
        code, out, err = tool("explain", *arguments, cwd=self.folder, columns=columns)
        self.assertEqual((code, err), (0, ""), arguments)
        return out

    def facts(self, *arguments):
        self.explain(*arguments, "--json", "e.json")
        return json.loads((self.folder / "e.json").read_text())

    def refused(self, *arguments):
        code, out, err = tool("explain", *arguments, cwd=self.folder)
        self.assertEqual((code, out, err.count("\n")), (2, "", 1), (arguments, out, err))
        return err

    def detects(self, check, document, *path):
        """Control: the check fails if the number at this place of the document is one more."""
        wrong = copy.deepcopy(document)
        place = wrong
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] += 1
        with self.assertRaises(AssertionError):
            check(wrong)

    def test_steps_of_all_strategies_are_as_expected(self):
        for name, arguments in STEPS.items():
            out = self.explain(*arguments)
            self.assertEqual(out, (EXPECTED / f"{name}.txt").read_text(), name)
            self.assertLessEqual(max(map(len, out.splitlines())), 100, name)
            narrow = self.explain(*arguments, columns=80)
            self.assertEqual(narrow, (EXPECTED / f"{name}-80.txt").read_text(), name)
            self.assertLessEqual(max(map(len, narrow.splitlines())), 80, name)
            self.assertEqual(narrow.replace("-", " ").split().count("unshard"), out.replace("-", " ").split().count("unshard"), name)
            self.assertGreater(max(map(len, out.splitlines())), 80, "the negative control")
        self.assertNotEqual(self.explain("--strategy", "fsdp", "--link", "20us,99MB/s"), (EXPECTED / "fsdp.txt").read_text())

    def test_shards_are_ranges_of_the_layout(self):
        for arguments, parts, place in (((), 4, lambda rank: rank), (("--strategy", "hsdp"), 2, lambda rank: rank % 2)):
            document = self.facts(*arguments, "--run", *self.data)

            def check(document):
                for unit in document["units"]:
                    offsets, padded = layout(UNITS[unit["name"]], 4)
                    self.assertEqual((unit["padded"], unit["bytes"]), (padded, 4 * padded))
                    for shard in unit["shards"]:
                        part = shard["begin"] * parts // padded
                        self.assertEqual((shard["begin"], shard["end"]), (padded // parts * part, padded // parts * (part + 1)))
                        self.assertEqual(shard["ranks"], [rank for rank in range(4) if place(rank) == part])
                for rank, values in enumerate(document["values"]["ranks"]):  # what the real engine updates with
                    for unit in values["units"]:
                        self.assertEqual(unit["shard_first"], shard_start(UNITS[unit["name"]], 4, parts, place(rank)))
                        self.assertEqual(unit["shard_elements"], layout(UNITS[unit["name"]], 4)[1] // parts)

            check(document)
            self.detects(check, document, "units", 1, "shards", 1, "begin")
            self.detects(check, document, "values", "ranks", 2, "units", 1, "shard_elements")

    def test_bytes_and_state_follow_formulas(self):
        psi = {name: layout(parameters, 4)[1] for name, parameters in UNITS.items()}
        whole, kept = sum(psi.values()), psi["root"] + psi["h.1"]
        formulas = {"ddp": {"all_reduce": (3, 2 * 3 * 4 * whole // 4)},
                    "zero2": {"reduce_scatter": (3, 3 * 4 * whole // 4), "all_gather": (3, 3 * 4 * whole // 4)},
                    "fsdp": {"reduce_scatter": (3, 3 * 4 * whole // 4), "all_gather": (4, 3 * 4 * (2 * whole - kept) // 4)},
                    "hsdp": {"reduce_scatter": (3, 4 * whole // 2), "all_gather": (4, 4 * (2 * whole - kept) // 2),
                             "all_reduce": (3, 2 * 4 * whole // 2 // 2)}}
        states = {"ddp": 16, "zero2": 7, "fsdp": 4, "hsdp": 8}
        for strategy, operations in formulas.items():
            def check(document):
                cost = document["cost"]
                self.assertEqual({each["operation"]: (each["calls"], each["bytes_sent"]) for each in cost["operations"]}, operations)
                self.assertEqual(cost["bytes_sent"], sum(sent for _, sent in operations.values()))
                self.assertEqual(cost["bytes_sent"], sum(row.get("sent_bytes", 0) for row in document["rows"]))
                self.assertEqual(cost["formula_bytes"], cost["bytes_sent"])
                self.assertEqual(sum(document["model_state_bytes"].values()), states[strategy] * whole)

            document = self.facts("--strategy", strategy)
            check(document)
            self.detects(check, document, "cost", "operations", 0, "bytes_sent")
            self.detects(check, document, "model_state_bytes", "gradient")

    def test_values_are_those_of_training(self):
        document = self.facts("--run", *self.data)
        common = ("--model", "gpt-nano", "--ranks", 4, "--steps", 1, *self.data, "--json")
        for command, file in (("compare", "compare.json"), ("train", "train.json")):
            code, _, err = tool(command, *common, file, "--strategy", "ddp", cwd=self.folder)
            self.assertEqual(code, 0, err)
        run = json.loads((self.folder / "compare.json").read_text())["runs"][0]
        first = json.loads((self.folder / "train.json").read_text().splitlines()[0])

        def check(document):
            values = document["values"]
            ranks = values["ranks"]
            self.assertAlmostEqual(sum(rank["loss"] for rank in ranks) / 4, run["losses"][0], delta=1e-12)
            self.assertEqual(len({rank["loss"] for rank in ranks}), 4)
            for index, name in enumerate(UNITS):
                units = [rank["units"][index] for rank in ranks]
                self.assertEqual(len({unit["weights_hash"] for unit in units}), 1)
                self.assertEqual(len({unit["gradient_norm"] for unit in units}), 4)
                shards = math.sqrt(sum(unit["shard_norm"] ** 2 for unit in units))
                self.assertAlmostEqual(shards, values["norms"][name], delta=1e-9)
                self.assertLessEqual(shards, max(unit["gradient_norm"] for unit in units))  # a mean is no longer
            self.assertAlmostEqual(math.sqrt(sum(norm ** 2 for norm in values["norms"].values())), first["grad_norm"], delta=1e-5)

        check(document)
        self.detects(check, document, "values", "ranks", 1, "loss")
        self.detects(check, document, "values", "ranks", 3, "units", 1, "shard_norm")
        other = self.facts("--run", *self.data, "--strategy", "ddp")
        for name, norm in other["values"]["norms"].items():  # each rank has the same whole gradient
            self.assertAlmostEqual(norm, document["values"]["norms"][name], delta=1e-6)
        self.assertEqual(len({rank["units"][1]["shard_norm"] for rank in other["values"]["ranks"]}), 1)

    def test_real_steps_have_the_structure_of_simulated_ones(self):
        for arguments in (("--strategy", "fsdp"), ("--strategy", "zero1"), ("--strategy", "./lab.so:hfsdp"), ("--accumulate", 3)):
            simulated, real = self.facts(*arguments), self.facts(*arguments, "--run", *self.data)
            self.assertEqual(events(real), events(simulated), arguments)
            self.assertEqual([row.get("sent_bytes") for row in real["rows"] if "sent_bytes" in row],
                             [row.get("sent_bytes") for row in simulated["rows"] if "sent_bytes" in row])
        self.assertNotEqual(events(self.facts("--prefetch", 0)), events(self.facts()))

    def test_unsharded_bytes_are_those_that_a_run_holds(self):
        for arguments in ((), ("--prefetch", 0), ("--strategy", "hsdp"), ("--reshard-after-forward", 2)):
            code, _, err = tool("compare", "--model", "gpt-nano", "--ranks", 4, "--steps", 2, *self.data, "--json", "c.json",
                                *(arguments if "--strategy" in arguments else ("--strategy", "fsdp", *arguments)), cwd=self.folder)
            self.assertEqual(code, 0, err)
            held = json.loads((self.folder / "c.json").read_text())["runs"][0]["peak_bytes"]["unsharded_parameter"]
            self.assertEqual(self.facts(*arguments)["peak_unsharded_bytes"], held, arguments)

    def test_questions_are_answered_where_the_step_has_the_facts(self):
        names = [line.split()[0] for line in self.explain("--question", "list").splitlines()]
        self.assertIn("why-twice", names)
        whole = self.explain("--section", "questions")
        for name in names:
            answer = self.explain("--question", name)
            self.assertIn("docs/learn/", answer)
            self.assertIn(" ".join(answer.splitlines()[1].split()[:4]), " ".join(whole.split()))
        self.assertIn("h.0 unsharded twice, and h.1 once", self.explain("--question", "why-twice"))
        ddp = self.explain("--strategy", "ddp", "--section", "questions")
        for name in ("why-twice", "why-root", "whose-unit", "more-blocks"):
            self.assertNotIn(name, ddp)
            self.assertIn("this step has no answer", self.refused("--strategy", "ddp", "--question", name))
        self.assertIn("why-twice", self.refused("--question", "why-thrice"))
        self.assertIn("leave --section out", self.refused("--question", "why-twice", "--section", "cost"))

    def test_text_is_as_wide_as_the_terminal(self):
        wide, narrow = self.explain(), self.explain(columns=80)
        for columns, expected in ((200, wide), (100, wide), (99, narrow), (60, narrow), ("many", wide), ("", wide)):
            self.assertEqual(self.explain(columns=columns), expected, columns)
        for columns, expected in ((100, wide), (99, narrow)):  # of a terminal
            leader, follower = pty.openpty()
            fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
            process = subprocess.Popen([TOOL, "explain"], stdout=follower, env=environment)
            os.close(follower)
            seen = b""
            while True:
                try:
                    part = os.read(leader, 65536)
                except OSError:  # the terminal is closed
                    break
                if not part:
                    break
                seen += part
            self.assertEqual(process.wait(60), 0)
            os.close(leader)
            self.assertEqual(seen.decode().replace("\r\n", "\n"), expected)
        for ranks, columns in ((4, 80), (8, 80), (8, 100)):  # ranks that run write to a pipe of the launcher
            text = self.explain("--ranks", ranks, "--global-batch", 16, "--run", "--section", "values", *self.data, columns=columns)
            self.assertLessEqual(max(map(len, text.splitlines())), columns)
            self.assertIn(f"rank {3 if columns == 80 else 5}", text)

    def test_a_link_is_busy_once_at_a_time(self):
        for link in ("10ms,1GB/s", "20us,1GB/s"):
            document = self.facts("--strategy", "fsdp", "--link", link, "--seq-len", "16")
            step = max(row["at_ms"] for row in document["rows"])
            self.assertLessEqual(document["cost"]["link_ms"], step + 1)

    def test_sections_are_chosen_and_options_checked(self):
        self.assertEqual(len(self.explain("--section", "cost").split("\n\n")), 2)
        self.assertEqual(self.explain("--section", "cut"), self.explain("--section", "wrap"))  # its older name
        self.assertIn("--run", self.refused("--section", "values"))
        self.assertIn("--backend", self.refused("--backend", "tcp"))
        self.assertIn("--section", self.refused("--section", "nothing"))
        self.assertIn("--link-intra", self.refused("--link-intra", "5us,5GB/s"))
        self.assertIn("--json", self.refused("--json", "no/such/folder.json"))


def write():
    EXPECTED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "lab.so").symlink_to(LAB)
        for name, arguments in STEPS.items():
            code, out, err = tool("explain", *arguments, cwd=folder)
            assert code == 0, err
            (EXPECTED / f"{name}.txt").write_text(out)
            (EXPECTED / f"{name}-80.txt").write_text(tool("explain", *arguments, cwd=folder, columns=80)[1])


if __name__ == "__main__":
    TOOL, LAB = sys.argv[1:3]
    if sys.argv[3:] == ["--write"]:
        write()
    else:
        unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
