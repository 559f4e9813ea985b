"""The report: a golden comparison becomes one well-formed, self-contained page in which nothing is hidden.

    report_test.py TOOL [BROWSER]     without a browser, which renders the page, one test fails
"""

import copy
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOL, BROWSER = None, None
GOLDEN = json.loads((pathlib.Path(__file__).parent / "data" / "compare.json").read_text())
VOID = {"meta", "br", "input"}
HOSTILE = "<script>alert('x')</script>\"&amp; onload=\"x"


def draw(file, folder, width=1200):
    """The page as the browser shows it, after its scripts."""
    program = BROWSER or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise AssertionError("no Chromium on this machine, which would render the page; scripts/setup --tests installs it")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
               f"--window-size={width},900", "--dump-dom", file.as_uri()]
    return subprocess.run(command, text=True, capture_output=True, timeout=90).stdout


class Page(html.parser.HTMLParser):
    """Checks that elements nest; collects texts, tables, charts and every attribute that could load something."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.tables, self.loads, self.bars = [], [], [], [], []
        self.verdicts, self.charts, self.marks = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.loads += [name for name in attributes if name in ("src", "href", "srcset", "data", "action", "xlink:href")]
        self.loads += [name for name in attributes if name.startswith("on")]
        if tag == "table":
            self.tables.append({"caption": "", "rows": []})
        elif tag == "tr":
            self.tables[-1]["rows"].append([])
        elif tag in ("td", "th"):
            self.tables[-1]["rows"][-1].append("")
        elif tag == "svg":
            self.charts.append({"label": attributes["aria-label"], "lines": [], "texts": []})
        elif tag == "path" and ("data-loss" in attributes or "data-line" in attributes):
            self.charts[-1]["lines"].append(attributes.get("d", ""))  # of no values: none
        elif tag == "i" and "title" in attributes:
            self.bars.append((attributes["title"], attributes["style"]))
        elif tag == "b" and "style" in attributes:
            self.marks.append(attributes["style"])
        elif attributes.get("class", "").startswith("verdict"):
            self.verdicts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        if "caption" in self.open:
            self.tables[-1]["caption"] += data
        elif self.open and self.open[-1] in ("td", "th"):
            self.tables[-1]["rows"][-1][-1] += data
        elif "text" in self.open:
            self.charts[-1]["texts"].append(data)
        elif "p" in self.open and self.verdicts and self.open[-1] in ("p", "code"):
            self.verdicts[-1] += data

    def table(self, start):
        return next(table["rows"] for table in self.tables if table["caption"].startswith(start))

    def losses(self):
        """The chart of the losses of each comparison."""
        return [chart for chart in self.charts if chart["label"].startswith("Losses over the steps")]


class ReportTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def report(self, *documents):
        for i, document in enumerate(documents):
            text = document if isinstance(document, str) else json.dumps(document)
            (self.folder / f"{i}.json").write_text(text)
        files = [str(self.folder / f"{i}.json") for i in range(len(documents))]
        return subprocess.run([TOOL, "report", *files, "-o", str(self.folder / "page.html")], text=True, capture_output=True,
                              timeout=30)

    def text_of(self, *documents):
        done = self.report(*documents)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return (self.folder / "page.html").read_text()

    def drawn(self, *documents):
        self.text_of(*documents)
        return Page(draw(self.folder / "page.html", self.folder))

    def test_contains_every_number_of_file(self):
        page = self.drawn(GOLDEN)
        self.assertEqual(len(page.verdicts), 1)
        self.assertIn("ddp, zero1, zero2, fsdp and hsdp end bitwise equal", page.verdicts[0])
        self.assertIn(GOLDEN["runs"][0]["final_parameters_hash"], page.verdicts[0])
        self.assertEqual([len(chart["lines"]) for chart in page.losses()], [5])
        names = ["ddp", "zero1", "zero2", "fsdp", "hsdp 2x2"]
        state, peak, wire, time = (page.table(s) for s in ("Bytes of model", "Peak bytes", "Per step", "Milliseconds"))
        steps = page.table("Loss by step")
        for i, (run, name) in enumerate(zip(GOLDEN["runs"], names)):
            number = [int(cell.replace(",", "")) for cell in state[i + 1][1:]]
            self.assertEqual(state[i + 1][0], name)
            self.assertEqual(number, [*run["model_state_bytes"].values(), sum(run["model_state_bytes"].values())])
            row = dict(zip(peak[0], peak[i + 1]))
            self.assertEqual({kind: int(row[kind].replace(",", "")) for kind in run["peak_bytes"]}, run["peak_bytes"])
            rows = {row[1]: [int(cell.replace(",", "")) for cell in row[2:]] for row in wire if row[0] == name}
            for kind, calls in run["calls_per_step"].items():
                if calls:
                    sent, formula = run["wire_bytes_per_step"][kind], run["formula_bytes_per_step"][kind]
                    self.assertEqual(rows.pop(kind), [calls, sent, formula, sent - formula])
            self.assertEqual(rows, {})
            self.assertEqual(float(time[i + 1][1]), run["step_ms"]["median"])
            self.assertEqual([float(row[i + 1]) for row in steps[1:]], run["losses"])

    def check_sums(self, text):
        rows = Page(text).table("Milliseconds in the step shown")[1:]
        self.assertTrue(rows)
        for name, rank, step, *parts in rows:
            self.assertLessEqual(sum(map(float, parts[:4])), float(step) * 1.0001, (name, rank))
            self.assertGreater(float(parts[1]), 0)

    def test_no_moment_of_a_step_counts_twice(self):
        base = [TOOL, "explain", "--model", "gpt-nano", "--ranks", "2", "--html", str(self.folder / "e.html")]
        for more in ([], ["--strategy", "ddp"], ["--checkpoint-activations"], ["--accumulate", "3"]):
            done = subprocess.run([*base, *more], text=True, capture_output=True, timeout=60)
            self.assertEqual(done.returncode, 0, done.stderr)
            text = (self.folder / "e.html").read_text()
            self.check_sums(text)
        # The control: a table in which a span of the root counts a second time.
        rows = Page(text).table("Milliseconds in the step shown")
        backward = rows[1][4]
        with self.assertRaises(AssertionError):
            self.check_sums(text.replace(f"<td>{backward}</td>", f"<td>{2 * float(rows[1][2])}</td>", 1))

    def test_the_axis_of_one_step_has_one_label(self):
        one = copy.deepcopy(GOLDEN)
        for run in one["runs"]:
            run["losses"] = run["losses"][:1]
        first, second = self.drawn(one, GOLDEN).losses()
        steps = lambda chart: [text for text in chart["texts"] if text.startswith("step")]
        self.assertEqual(steps(first), ["step 1"])
        self.assertEqual((steps(second)[0], steps(second)[-1]), ("step 1", f"step {len(GOLDEN['runs'][0]['losses'])}"))

    def test_bars_are_as_long_as_their_numbers(self):
        bars = self.drawn(GOLDEN).bars
        widths = [float(re.search(r"width: ([\d.]+)%", style).group(1)) for title, style in bars if title.startswith("parameter: ")]
        expected = [run["model_state_bytes"]["parameter"] for run in GOLDEN["runs"]]
        longest = max(sum(run["model_state_bytes"].values()) for run in GOLDEN["runs"])
        for width, bytes_ in zip(widths[:5], expected):
            self.assertAlmostEqual(width, 100 * bytes_ / longest, delta=0.01)

    def test_is_self_contained(self):
        text = self.text_of(GOLDEN)
        page = Page(text)
        self.assertEqual(page.loads, [])
        self.assertFalse({"link", "img", "iframe", "object", "embed", "base"} & set(page.tags))
        outside = re.sub(r"<script.*?</script>|'sha256-.*?'", "", text, flags=re.DOTALL)
        self.assertNotIn(" style=", outside)
        self.assertNotRegex(outside, r'<[^>]* class="[^"]*"[^>]* class="', "a browser ignores the second")
        self.assertNotRegex(outside.lower().replace("http-equiv", ""), r"http|url\(|@import|//[a-z]")
        self.assertIn("default-src 'none'", text)

    def test_escapes_names(self):
        document = copy.deepcopy(GOLDEN)
        document["model"] = document["backend"] = document["machine"] = HOSTILE
        document["runs"][0]["strategy"] = document["runs"][0]["final_parameters_hash"] = HOSTILE
        page = Page(self.text_of(document))
        self.assertEqual(page.tags.count("script"), 6, "the data, those of three charts, D3 and the page's own")
        self.assertEqual(page.loads, [])
        self.assertEqual(page.table("Bytes of model")[1][0], HOSTILE)
        self.assertEqual(len(page.verdicts), 2)

    def test_reports_one_different_bit(self):
        document = copy.deepcopy(GOLDEN)
        document["runs"][3]["losses"][-1] = 3.1337000000000006
        verdicts = Page(self.text_of(document)).verdicts
        self.assertEqual(len(verdicts), 2)
        self.assertIn("ddp, zero1, zero2 and hsdp end bitwise equal", verdicts[0])
        self.assertIn("fsdp ends:", verdicts[1])

    def test_names_the_wrapping_where_several_are_compared(self):
        document = copy.deepcopy(GOLDEN)
        for run, wrap in zip(document["runs"], ("none", "block", "size:1000", "block;wte", "<b>")):
            run["strategy"], run["wrap"] = "fsdp", wrap
        page = Page(self.text_of(document))
        self.assertIn("fsdp none, fsdp block, fsdp size:1000, fsdp block;wte and fsdp <b> end bitwise equal", page.verdicts[0])
        names = [row[0] for row in page.table("Bytes of model")[1:]]
        self.assertEqual(names, ["fsdp none", "fsdp block", "fsdp size:1000", "fsdp block;wte", "fsdp 2x2 <b>"])
        # The negative control: a report without wrappings names strategies only.
        self.assertNotIn("block", Page(self.text_of(GOLDEN)).verdicts[0])

    def test_bytes_have_one_unit_with_the_terminal(self):
        text = re.sub("<script.*?</script>", "", draw(self.folder / "page.html", self.folder) if self.text_of(GOLDEN) else "", flags=re.DOTALL)
        self.assertNotRegex(text, r"[KMGT]iB")
        self.assertRegex(text, r"[0-9] MB")

    def test_non_finite_losses(self):
        document = copy.deepcopy(GOLDEN)
        for run, losses in zip(document["runs"], ([5.0], [], [None, 2.0, None, 1.5], [4.0] * 5000, [1e-30, 1e30])):
            run["losses"] = losses
        page = self.drawn(document)
        self.assertEqual(len(page.verdicts), 5)
        (chart,) = page.losses()
        self.assertEqual(len(chart["lines"]), 5)
        self.assertNotRegex(" ".join(chart["lines"]), "(?i)nan|inf")
        self.assertLess(max(map(len, chart["lines"])), 20000)

    def test_several_files_make_one_page(self):
        other = copy.deepcopy(GOLDEN)
        other["model"] = "gpt-nano"
        self.assertEqual(Page(self.text_of(GOLDEN, other)).tags.count("section"), 2)

    def test_wrong_files_are_one_line(self):
        bad_step = copy.deepcopy(GOLDEN)
        bad_step["runs"][0]["timeline"] = {"step": 1}
        missing = copy.deepcopy(GOLDEN)
        del missing["runs"][1]["step_ms"]["p95"]
        mistyped = copy.deepcopy(GOLDEN)
        mistyped["runs"][0]["losses"] = "5"
        for document, words in (("{", "not JSON"), ("[]", "is an array; needs an object"), ({"model": 1}, "model is 1; needs a text"), (missing, "runs[1].step_ms has no 'p95'"),
                                (mistyped, "runs[0].losses is \"5\""), (bad_step, "runs[0].timeline has no 'length_ns'"), ({**GOLDEN, "runs": []}, "no runs")):
            done = self.report(document)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
            self.assertIn(words, done.stderr)
        for arguments in (("/no/such.json", "-o", "/tmp/x"), (str(self.folder / "0.json"),)):
            done = subprocess.run([TOOL, "report", *arguments], text=True, capture_output=True, timeout=30)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        (self.folder / "0.json").write_text(json.dumps(GOLDEN))
        done = subprocess.run([TOOL, "report", str(self.folder / "0.json"), "-o", "/proc/page.html"], text=True,
                              capture_output=True, timeout=30)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)

    def test_losses_that_differ_in_one_bit_are_drawn_apart(self):
        pairs = ((9.0, 9.000000000000002), (100.1, 100.10000000000001), (1e6 + .1, 1e6 + .1 + 1.2e-10), (1e16, 1e16 + 2),
                     (1e300, -1e300), (1.7e308, -1.7e308), (5e-324, 1e-323), (0.0, 5e-324), (1.7e308, 1.7e308))
        documents = []
        for pair in pairs:
            documents.append(copy.deepcopy(GOLDEN))
            for run, loss in zip(documents[-1]["runs"], pair):
                run["losses"] = [loss]
            documents[-1]["runs"] = documents[-1]["runs"][:2]
        charts = self.drawn(*documents).losses()
        self.assertEqual(len(charts), len(pairs))
        for (a, b), chart in zip(pairs, charts):
            first, second = chart["lines"]
            self.assertEqual(first == second, a == b, (a, b))  # negative control: equal ones lie on each other
            self.assertNotRegex(first + second, "(?i)nan|inf")

    def test_numbers_out_of_range_are_one_line(self):
        def change(path, value):
            document = copy.deepcopy(GOLDEN)
            at = document["runs"][0]
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            return document
        for path, value in ((("mesh",), [2 ** 40, 2 ** 40]), (("mesh",), [2 ** 20, 2]), (("mesh",), [0, 1]), (("mesh",), [1]),
                            (("units", 0, "elements"), -5), (("units", 0, "elements"), -2 ** 63), (("units", 0, "padding"), 1.5),
                            (("wire_bytes_per_step", "all_gather"), 1e300), (("calls_per_step", "all_reduce"), -1),
                            (("tokens_per_second",), 1e300), (("step_ms", "median"), -1), (("copied_bytes_per_step",), 2 ** 64 - 1),
                            (("model_state_bytes", "parameter"), 2 ** 63), (("peak_bytes", "total"), -1), (("losses",), [[1]])):
            done = self.report(change(path, value))
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), (path, value, done.stderr))
            self.assertIn("runs[0]." + str(path[0]), done.stderr)
            self.assertIn("; needs", done.stderr)
        self.assertEqual(self.report(change(("mesh",), [1, 4])).returncode, 0)  # negative control
        for key, value in (("ranks", 0), ("ranks", 2 ** 40), ("steps", -1), ("parameters", 1.5)):
            self.assertIn(f": {key} is", self.report({**GOLDEN, key: value}).stderr)

    def test_without_scripts_the_tables_are_there(self):
        """Each place that a script fills says so, and a table follows it."""
        text = self.text_of(GOLDEN)
        places = re.findall(r'<div class="live[^"]*" data-picture="([^"]*)">.*?</div>\n(.{0,40})', text, re.DOTALL)
        self.assertEqual([name for name, _ in places if name != "chips"], ["bytes", "loss", "bars", "bars", "bars"])
        for name, after in places:
            self.assertRegex(after, '^<(details|div class="scroll")', name)
        self.assertEqual(text.count("the table below has its numbers"), len(places))
        self.assertNotIn("<svg", text)

    def test_a_browser_shows_it(self):
        # A script of the test measures the layout, after the page's own.
        measure = ("<script>const w = e => e.getBoundingClientRect().width;"
                   "document.body.setAttribute('data-seen', JSON.stringify({page: document.documentElement.scrollWidth,"
                   "window: innerWidth, bars: [...document.querySelectorAll('.track i')].map(w),"
                   "tracks: [...document.querySelectorAll('.track')].map(w),"
                   "rejected: [...document.querySelector('style').textContent.matchAll(/[{;]\\s*([a-z][a-z-]*)\\s*:([^;{}]+)/g)]"
                   ".filter(m => !CSS.supports(m[1], m[2])).map(m => m[0]),"
                   "curve: document.querySelector('path[data-loss]').getBBox().width}))</script></body>")
        policy = r"script-src [^\"]*"  # which permits no script but the page's own: report_page_test.py
        text = re.sub(policy, "script-src 'unsafe-inline'; style-src 'unsafe-inline'", self.text_of(GOLDEN).replace("</body>", measure))
        file = self.folder / "measured.html"
        file.write_text(text)
        for width in (390, 1200):
            dom = draw(file, self.folder, width)
            for run in GOLDEN["runs"]:
                for bytes_ in run["model_state_bytes"].values():
                    self.assertIn(f"<td>{bytes_:,}</td>", dom)
            seen = json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', dom).group(1)))
            self.assertEqual(seen["rejected"], [], "the browser knows every property and value of the style")
            self.assertLessEqual(seen["page"], seen["window"], "nothing sticks out sideways")
            self.assertGreater(min(seen["tracks"]), 150)
            self.assertGreater(max(seen["bars"]), 0.4 * max(seen["tracks"]))
            self.assertGreater(seen["curve"], 0.6 * min(width, 830))
        # On paper nothing scrolls: the style of printing, in the width of a page.
        paper = text.replace("<details>", "<details open>")
        for shown, fits in ((paper.replace("@media print", "@media all"), True), (paper.replace(".scroll { overflow-x: auto; }", ""), False)):
            file.write_text(shown)
            seen = json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', draw(file, self.folder, 700)).group(1)))
            self.assertEqual(seen["page"] <= seen["window"], fits, f"{seen['page']} of {seen['window']} pixels; false: the control")


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    BROWSER = sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
    unittest.main(verbosity=2)
