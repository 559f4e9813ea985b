"""The page of bench --report in a browser: what it draws are the numbers of bench --json.

    bench_page_test.py TOOL BROWSER [SCREENSHOTS]     writes pictures of the page to that folder
"""

import json
import os
import pathlib
import subprocess
import sys
import unittest

from browser import PageCase

TOOL, SCREENSHOTS = None, None
HOSTILE = "</script><img src=x onerror=document.title='broken'>"


class BenchPageTest(PageCase):
    def setUp(self):
        self.browser.size(1200)
        self.browser.prefer()

    def bench(self, *arguments):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
        done = subprocess.run([TOOL, "bench", *map(str, arguments)], text=True, capture_output=True, timeout=200, cwd=self.folder, env=clean)
        return done.returncode, done.stdout, done.stderr

    def show(self, page="page.html"):
        self.browser.open((self.folder / page).as_uri())
        self.assertEqual(self.browser.messages, [], "the console is silent")

    def measure(self, *arguments):
        """Measures, opens the page and returns the JSON."""
        code, _, err = self.bench(*arguments, "--json", "run.json", "--report", "page.html")
        self.assertEqual((code, err), (0, ""), arguments)
        self.show()
        return json.loads((self.folder / "run.json").read_text())

    def draw(self, **runs):
        """Draws files that hold these runs."""
        for name, run in runs.items():
            (self.folder / f"{name}.json").write_text(json.dumps(run))
        code, out, err = self.bench("--report", "page.html", *(f"{name}.json" for name in runs))
        self.assertEqual((code, out, err), (0, "", ""))
        self.show()

    def dots(self, picture):
        """What the picture of that number draws: curve, size, value."""
        return sorted(tuple(dot) for dot in self.browser.value(
            f"[...document.querySelectorAll('svg.curves')[{picture}].querySelectorAll('circle')].map(c => "
            "[c.parentElement.querySelector('.curve').dataset.curve, +c.dataset.bytes, +c.dataset.value])"))

    def texts(self, selector):
        return self.browser.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")

    def pictures(self, name):
        if SCREENSHOTS is None:
            return
        for kind, width, scheme in (("light", 1100, "light"), ("dark", 1100, "dark"), ("phone", 390, "light")):
            self.browser.size(width, phone=kind == "phone")
            self.browser.prefer(prefers_color_scheme=scheme)
            self.browser.call("Page.reload")
            self.browser.wait_until("document.readyState === 'complete'")
            self.browser.screenshot(SCREENSHOTS / f"bench-{name}-{kind}.png", x=0, y=0, width=width,
                                    height=self.browser.value("document.documentElement.scrollHeight"))

    def run_with(self, times, name="shm"):
        """A run with a row for each size, without fits."""
        rows = [{"backend": name, "op": "all_reduce", "bytes": size, "dtype": "f32", "redop": "sum",
                 "time_us": {"median": us, "p99": us * 2, "min": us / 2, "max": us * 3}, "algbw_gbps": size / us / 1e3,
                 "busbw_gbps": size / us / 1e3, "wrong": None, "in_place": False, "memory": "communicator", "algorithm": "direct",
                 "bound_us": us / 4, "rounds_us": [us] * 5, "noisy": size == 16} for size, us in times.items()]
        return {"ranks": 2, "cold": False, "results": rows}

    def test_dots_are_medians_and_bus_bandwidths(self):
        run = self.measure("all_reduce,barrier", "--ranks", "2", "--backends", "shm,tcp", "-e", "4K", "-f", "4", "-n", "20")
        rows = [r for r in run["results"] if r["op"] == "all_reduce" and not r["in_place"]]
        self.assertEqual(len(rows), 10)
        self.assertEqual(self.browser.value("document.querySelectorAll('svg.curves').length"), 2, "barrier has no sizes")
        for picture, value in enumerate((lambda r: r["time_us"]["median"], lambda r: r["busbw_gbps"])):
            self.assertEqual(self.dots(picture), sorted((r["backend"], r["bytes"], value(r)) for r in rows))
        page = "\n".join(self.texts("p.verdict"))
        for verdict in run["verdicts"]:
            self.assertIn(f"{verdict['backend']}: {verdict['text']}", page)
        fits = self.browser.value("[...document.querySelectorAll('.curve.fit')].map(p => p.getAttribute('d')).filter(d => d)")
        self.assertEqual((len(fits), len(set(fits))), (2, 2), "one for each backend, in the picture of times")
        table = self.texts("details table tbody tr")
        self.assertEqual(sum("shm" in row for row in table[:len(run["results"])]), len(run["results"]) // 2)
        self.pictures("run")

    def test_a_picture_for_each_combination(self):
        run = self.measure("all_reduce,all_gather", "--ranks", "2", "-b", "64", "-e", "1K", "-f", "4", "-n", "10", "--dtype", "f32,bf16", "--op", "sum,max")
        headings = self.texts("h2")
        expected = {f"{r['op']}, {r['dtype']}" + ("" if r["redop"] == "none" else f", {r['redop']}") for r in run["results"]}
        self.assertEqual({h.replace("Present", "") for h in headings} - {"Environment"}, expected)
        self.assertEqual(self.browser.value("document.querySelectorAll('svg.curves').length"), 2 * len(expected))

    def test_files_are_laid_over_each_other(self):
        fast = self.run_with({8: 1, 16: 2, 32: 40, 64: 80})
        slow = self.run_with({8: 3, 16: 6, 32: 12, 64: 24, 128: 48})
        fast["environment"] = {"hosts": [{"name": "a", "cores": 2, "load": 0, "kernel": "6.1"}]}
        slow["environment"] = {"hosts": [{"name": "a", "cores": 2, "load": 0, "kernel": "6.2"}]}
        self.draw(fast=fast, slow=slow)
        times = [("fast: shm", r["bytes"], r["time_us"]["median"]) for r in fast["results"]]
        times += [("slow: shm", r["bytes"], r["time_us"]["median"]) for r in slow["results"]]
        self.assertEqual(self.dots(0), sorted(times))
        self.assertEqual(self.texts("p.times"), ["The shortest times: fast: shm from 8 to 16, slow: shm from 32 to 64."])
        self.assertEqual(self.texts(".crossing title"), ["between 16 B and 32 B another one becomes the fastest"])
        self.assertIn("slow differs from fast: host 0 kernel: 6.1 -> 6.2", self.texts("p.soft"))
        self.assertEqual(self.browser.value("document.querySelectorAll('svg.curves')[0].querySelectorAll('circle.noisy').length"), 2)

    def test_a_bound_lies_where_its_share_says(self):
        """The scale is logarithmic: a quarter of the time is as far below every point as it is anywhere else."""
        self.draw(one=self.run_with({8: 1, 64: 10, 512: 100}))
        ys = lambda key: [float(p.split(",")[1]) for p in self.browser.value(f"document.querySelector('.curve.{key}').getAttribute('d')")[1:].split("L")]
        distances = [bound - value for bound, value in zip(ys("bound"), ys("value"))]
        self.assertGreater(distances[0], 0)
        for distance in distances[1:]:
            self.assertAlmostEqual(distance, distances[0], delta=0.01)

    def test_heat_map_has_the_rates_and_frames_what_is_slow(self):
        run = self.measure("--pattern", "pairs", "--ranks", "4", "-e", "64K", "-n", "3", "-w", "1")
        pattern = run["patterns"][0]
        cells = lambda: self.browser.value("[...document.querySelectorAll('.heat .row rect:not(.none)')].map(c => [+c.dataset.from, +c.dataset.to, +c.dataset.value, c.classList.contains('slow')])")
        rates = {(i, j): rate for i, row in enumerate(pattern["matrix_gbps"]) for j, rate in enumerate(row) if rate is not None}
        self.assertEqual({(i, j): rate for i, j, rate, _ in cells()}, rates)
        pattern["slow"] = [{"units": [1, 2], "gbps": 1.5, "median_gbps": 9}, {"units": [3], "gbps": 2, "median_gbps": 9}]
        pattern["matrix_gbps"][1][2] = 1.5
        self.draw(slow=run)
        self.assertEqual([(i, j) for i, j, _, slow in cells() if slow], [(1, 2)])
        self.assertEqual(self.texts(".heat text.slow"), ["3: rank 3"])
        self.assertEqual(self.texts("p.differs"), ["Slow: the link from rank 1 to rank 2, 1.5 GB/s where the median is 9.", "Slow: rank 3, 2 GB/s where the median is 9."])
        self.pictures("pairs")

    def test_a_ring_has_bars(self):
        run = self.measure("--pattern", "neighbors", "--ranks", "3", "-e", "64K", "-n", "3", "-w", "1")
        self.assertEqual(len(self.texts(".bar .name")), len(run["patterns"][0]["rates"]))

    def test_percentiles_over_time(self):
        run = self.measure("all_reduce", "--ranks", "2", "-b", "64", "-e", "64", "-n", "5", "--duration", "2s", "--interval", "500ms")
        intervals = run["long_run"]["intervals"]["shm"]
        self.assertGreaterEqual(len(intervals), 2)
        shown = self.browser.value("[...document.querySelectorAll('[data-line]')].map(p => [p.dataset.line, p.getAttribute('d').split('L').length])")
        self.assertEqual(shown, [[name, len(intervals)] for name in ("longest", "p99", "median")])

    def test_hostile_names_are_text(self):
        run = self.run_with({8: 1, 16: 2}, name=HOSTILE)
        run["environment"] = {"hosts": [{"name": HOSTILE, "cores": 1, "load": 0}], HOSTILE: HOSTILE}
        self.draw(hostile=run)
        self.assertEqual(self.dots(0), [(HOSTILE, 8, 1), (HOSTILE, 16, 2)])
        self.assertFalse(self.browser.value("document.title").startswith("broken"))

    def test_what_is_no_result_is_refused_in_one_line(self):
        good = self.run_with({8: 1})
        (self.folder / "good.json").write_text(json.dumps(good))
        broken = {"text": "12", "field": json.dumps({**good, "results": [{"op": "all_reduce"}]}), "pattern": json.dumps({**good, "patterns": [{"pattern": "pairs"}]}),
                  "run": json.dumps({**good, "long_run": {"intervals": {"shm": [{"time": "x"}]}}}), "load": json.dumps({**good, "environment": {"hosts": [{"name": "a"}]}}),
                  "units": json.dumps({**good, "patterns": [{"pattern": "pairs", "op": "send", "bytes": 8, "backend": "shm", "units": [], "one_way": True, "rates": [],
                                                            "slow": [{"units": [7, 9], "gbps": 1, "median_gbps": 1}]}]})}
        for name, text in broken.items():
            with self.subTest(name):
                (self.folder / f"{name}.json").write_text(text)
                code, out, err = self.bench("--report", "no.html", "good.json", f"{name}.json")
                self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
                self.assertIn(f"{name}.json", err)
                self.assertFalse((self.folder / "no.html").exists())
        for arguments, word in ((("good.json",), "--report FILE.html"), (("--report", "no.html", "missing.json"), "missing.json"),
                                (("--report", "good.json", "good.json"), "good.json"), (("--report", "no.html", "good.json", "--ranks", "2"), "--ranks"),
                                (("--report", "no.html", "good.json,all_reduce"), "all_reduce"), (("--report", "no.html", "--tune", "t.txt"), "--report")):
            with self.subTest(arguments):
                code, out, err = self.bench(*arguments)
                self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
                self.assertIn(word, err)


if __name__ == "__main__":
    TOOL = os.path.abspath(sys.argv.pop(1))
    PageCase.PROGRAM = sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
    SCREENSHOTS = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
    unittest.main(verbosity=2)
