"""The report's moving pictures in a browser: marks, lengths, slider, zoom, chips, names, contrast, size and time.

    report_page_test.py TOOL BROWSER [SCREENSHOTS]     writes pictures of SCREENSHOTS/page.html to that folder
"""

import copy
import json
import pathlib
import re
import subprocess
import sys
import time
import unittest

from browser import PageCase

TOOL, SCREENSHOTS = None, None
COMPARE = ["compare", "--model", "gpt-nano", "--ranks", "4", "--steps", "5", "--link", "20us,100MB/s", "--threads", "1"]
HOSTILE = "</script><img src=x onerror=document.title='broken'>"
CONTRAST = """(() => {
  const shade = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                       return .2126 * r + .7152 * g + .0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)|transparent/.test(c)) return c; }
                        return 'rgb(255, 255, 255)'; };
  return [...document.querySelectorAll('button, summary, p, dfn, td, th, li, h1, h2, .axis text, text.soft, text.strong')]
    .filter(e => e.getClientRects().length && e.textContent.trim())
    .map(e => { const style = getComputedStyle(e), svg = e instanceof SVGElement;
                const a = shade(svg ? style.fill : style.color), b = shade(ground(svg ? e.closest('div') : e));
                return [Math.round((Math.max(a, b) + .05) / (Math.min(a, b) + .05) * 100) / 100, e.tagName + ': ' + e.textContent.slice(0, 40)]; })
    .filter(([ratio]) => ratio < 4.5); })()"""


def events_of(run):
    return [(run["strategy"], rank["rank"], i) for rank in run["timeline"]["ranks"] for i in range(len(rank["events"]))]


def with_why(document):
    """A file as `compare --why ddp,fsdp` writes it, with terms of known lengths."""
    terms = {"volume": 52.5, "latency": 0.25, "overlap": -4.5, "optimizer": -1.25, "contention": 2, "copies": 0.5, "late": 0.25,
             "transport": 0.125, "rest": 0.125}
    document["why"] = {"from": "ddp", "to": "fsdp", "from_ms": 100.0, "to_ms": 150.0, "gap_ms": sum(terms.values()), "terms": terms,
                       "intervals": {name: [value - 1, value + 1] for name, value in terms.items()}, "rounds": 4, "coverage": 0.969, "link": "20us,20MB/s",
                       "helps": [{"change": "none", "gap_ms": 50.0, "step_ms": 150.0, "peak_bytes": 1000}]}
    return document


class ReportPageTest(PageCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        command = [TOOL, *COMPARE, "--report", str(cls.folder / "page.html"), "--json", str(cls.folder / "run.json")]
        done = subprocess.run(command, text=True, capture_output=True, timeout=240)
        assert done.returncode == 0, done.stderr
        cls.run_json = json.loads((cls.folder / "run.json").read_text())

    def setUp(self):
        self.browser.size(1200)
        self.browser.prefer()

    def page_of(self, document, name="other"):
        source, page = self.folder / f"{name}.json", self.folder / f"{name}.html"
        source.write_text(json.dumps(document))
        done = subprocess.run([TOOL, "report", str(source), "-o", str(page)], text=True, capture_output=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return page.as_uri()

    def show(self, address=None):
        self.browser.open(address or (self.folder / "page.html").as_uri())
        self.assertEqual(self.browser.messages, [], "the console is silent")

    def marks(self):
        return {tuple(mark.split("|")) for mark in self.browser.value("[...document.querySelectorAll('[data-event]')].map(e => e.dataset.event)")}

    def test_draws_every_event_of_the_chosen_strategies(self):
        self.show()
        expected = {(s, str(r), str(i)) for run in self.run_json["runs"] if run["strategy"] in ("ddp", "fsdp") for s, r, i in events_of(run)}
        drawn = self.marks()
        hidden = expected - drawn  # spans that others within them cover
        self.assertEqual(drawn - expected, set())
        kinds = self.run_json["runs"][0]["timeline"]["event_kinds"]
        by_name = {run["strategy"]: run for run in self.run_json["runs"]}
        for strategy, rank, i in hidden:
            kind, _, _, length, _ = by_name[strategy]["timeline"]["ranks"][int(rank)]["events"][int(i)]
            self.assertTrue(length == 0 or kinds[kind] in ("forward", "backward", "unshard_issue", "reduce_issue"), kinds[kind])
        # The negative control: a page whose file lacks one wait of rank 1 has one mark less.
        document = copy.deepcopy(self.run_json)
        run = next(run for run in document["runs"] if run["strategy"] == "fsdp")
        events = run["timeline"]["ranks"][1]["events"]
        waits = [i for i, e in enumerate(events) if kinds[e[0]] == "unshard_wait" and e[3] > 1000]
        before = len([m for m in drawn if m[:2] == ("fsdp", "1")])
        del events[waits[-1]]
        self.show(self.page_of(document))
        self.assertEqual(len([m for m in self.marks() if m[:2] == ("fsdp", "1")]), before - 1)

    def test_lengths_are_those_of_the_events(self):
        self.show()
        seen = self.browser.value("[...document.querySelectorAll('.mark.unshard_wait, .mark.reduce_wait')].map(e => "
                                  "[e.dataset.event, +e.getAttribute('width')])")
        self.assertGreater(len(seen), 10)
        runs = {run["strategy"]: run["timeline"] for run in self.run_json["runs"]}
        ratios = []
        for mark, width in seen:
            strategy, rank, i = mark.split("|")
            length = runs[strategy]["ranks"][int(rank)]["events"][int(i)][3]
            if width > 2:
                ratios.append(width / length)
        self.assertLess(max(ratios) / min(ratios), 1.001)

    def test_memory_reaches_the_peak_of_the_samples(self):
        self.show()
        for run in self.run_json["runs"]:
            if run["strategy"] not in ("ddp", "fsdp"):
                continue
            top = max(sum(sample[1:9]) for rank in run["timeline"]["ranks"] for sample in rank["memory"])
            self.assertLessEqual(top, run["peak_bytes"]["total"])
            self.assertGreater(top, 0.9 * run["peak_bytes"]["total"], "the step shown comes near the peak of all steps")
            self.assertIn(f"<td>{top:,}</td>", (self.folder / "page.html").read_text())
        areas = self.browser.value("document.querySelectorAll('svg.memory').length * 8 === document.querySelectorAll('.area').length")
        self.assertTrue(areas)
        formula = {run["strategy"]: run["timeline"]["predicted_state"] for run in self.run_json["runs"]}
        parameters = self.run_json["parameters"]
        self.assertEqual((formula["ddp"], formula["zero2"], formula["fsdp"]), (16 * parameters, 7 * parameters, 4 * parameters))

    def test_sums_by_rank_lie_within_the_step(self):
        self.show()
        table = self.browser.value("[...[...document.querySelectorAll('details')].find(d => d.querySelector('summary').textContent === 'Sums by rank')"
                                   ".querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))")
        runs = {run["strategy"]: run["timeline"] for run in self.run_json["runs"]}
        self.assertEqual([row[:2] for row in table], [[name, str(rank["rank"])] for name, run in runs.items() for rank in run["ranks"]])
        counted_twice = 0
        for name, rank, *times, gathers, reductions in table:
            step, *parts = map(float, times)  # forward, backward, optimizer, exposed
            self.assertAlmostEqual(step, runs[name]["length_ns"] / 1e6, delta=1e-4 * step)
            self.assertLessEqual(sum(parts), step * 1.0002, (name, rank, times))
            events, kinds = runs[name]["ranks"][int(rank)]["events"], runs[name]["event_kinds"]
            lengths = {kind: [e[3] for e in events if kinds[e[0]] == kind] for kind in kinds}
            self.assertEqual((int(gathers), int(reductions)), (len(lengths["unshard_issue"]), len(lengths["reduce_issue"])))
            self.assertAlmostEqual(parts[2], sum(lengths["optimizer_step"]) / 1e6, delta=1e-4 * step)
            spans = sum(sum(lengths[kind]) for kind in ("forward", "backward", "optimizer_step", "unshard_wait", "reduce_wait"))
            counted_twice += spans / 1e6 > sum(parts) * 1.0002
        self.assertGreater(counted_twice, 0, "the control: spans hold others, so that their lengths add up to more")

    def test_waterfall_adds_up(self):
        self.show(self.page_of(with_why(copy.deepcopy(self.run_json))))
        widths = "Object.fromEntries([...document.querySelectorAll('[data-term]')].map(e => [e.dataset.term, +e.getAttribute('width')]))"
        steps = "[...document.querySelectorAll('.why .step')].map(e => +e.getAttribute('width'))"
        terms, (first, last) = self.browser.value(widths), self.browser.value(steps)
        self.assertEqual(len(terms), 9)
        pixel = first / 100
        self.assertAlmostEqual(last / pixel, 150, places=3)
        self.assertAlmostEqual(terms["volume"] / pixel, 52.5, places=3)
        unsure = self.browser.value("[...document.querySelectorAll('.why .unsure')].map(e => e.dataset.term)")
        self.assertEqual(unsure, ["latency", "copies", "late", "transport", "rest"])
        # The negative control: a term that is 1 % longer is drawn 1 % longer.
        document = with_why(copy.deepcopy(self.run_json))
        document["why"]["terms"]["volume"] *= 1.01
        self.show(self.page_of(document))
        first = self.browser.value(steps)[0]
        self.assertAlmostEqual(self.browser.value(widths)["volume"] / (first / 100), 52.5 * 1.01, places=3)

    def test_losses_are_one_line_inside_the_other(self):
        lines = "[...document.querySelectorAll('[data-loss]')].map(e => [e.dataset.loss, e.getAttribute('d'), parseFloat(e.style.strokeWidth)])"
        verdict = "document.querySelector('[data-picture=loss] .sentence').textContent"
        self.show()
        drawn, names = self.browser.value(lines), [run["strategy"] for run in self.run_json["runs"]]
        self.assertEqual([name for name, _, _ in drawn], names)
        self.assertEqual(len({path for _, path, _ in drawn}), 1, "equal losses are one line")
        self.assertEqual([width for _, _, width in drawn], sorted({width for _, _, width in drawn}, reverse=True), "each is inside the one before")
        self.assertEqual(drawn[0][1].count("L") + 1, len(self.run_json["runs"][0]["losses"]))
        self.assertIn("is 0 at every step", self.browser.value(verdict))
        # The negative control: one loss of one run is another one.
        document = copy.deepcopy(self.run_json)
        document["runs"][3]["losses"][2] += 1e-5
        self.show(self.page_of(document))
        self.assertEqual(self.browser.value(verdict), "The largest difference from ddp is 0.0000100: fsdp, step 3.")
        drawn = self.browser.value(lines)
        self.assertEqual([name for name, _, _ in drawn], names + names[1:], "and below the differences")
        self.assertEqual(len({path for _, path, _ in drawn[5:]}), 2)

    def test_bytes_end_at_the_ticks_of_the_formula(self):
        box = "[+e.getAttribute('x'), +e.getAttribute('x') + +e.getAttribute('width')]"
        bars = f"Object.fromEntries([...document.querySelectorAll('[data-sent]')].map(e => [e.dataset.sent, {box}]))"
        ticks = "Object.fromEntries([...document.querySelectorAll('[data-formula]')].map(e => [e.dataset.formula, +e.getAttribute('x1')]))"
        self.show()
        sent = {f"{run['strategy']}|{name}": count for run in self.run_json["runs"] for name, count in run["wire_bytes_per_step"].items() if count}
        drawn, formula = self.browser.value(bars), self.browser.value(ticks)
        self.assertEqual(set(drawn), set(sent))
        self.assertEqual(set(formula), set(sent))
        pixels = [(drawn[name][1] - drawn[name][0]) / count for name, count in sent.items() if count > 1e5]
        self.assertLess(max(pixels) / min(pixels), 1.001)
        for name, (_, end) in drawn.items():
            self.assertAlmostEqual(formula[name], end, places=6)
        document = copy.deepcopy(self.run_json)  # the negative control
        formula = document["runs"][0]["formula_bytes_per_step"]
        formula["all_reduce"] += formula["all_reduce"] // 100
        self.show(self.page_of(document))
        drawn, formula = self.browser.value(bars), self.browser.value(ticks)
        self.assertGreater(formula["ddp|all_reduce"], drawn["ddp|all_reduce"][1] + 0.5)

    def test_prints_eight_moments(self):
        self.show()
        b, frames = self.browser, "[...document.querySelectorAll('.frame')].map(e => [e.querySelector('strong').textContent, e.querySelectorAll('.shard').length," \
                                  "e.querySelectorAll('.shard.here').length, e.querySelectorAll('.grad.way').length, e.lastChild.textContent])"
        self.assertEqual(b.value(frames), [])
        b.value("dispatchEvent(new Event('beforeprint'))")
        drawn = b.value(frames)
        self.assertEqual([name for name, *_ in drawn], ["Begin", "First all-gather", "In forward", "All-gather for backward", "In backward", "First reduction", "First mean gradients", "End"])
        self.assertEqual(len({shards for _, shards, *_ in drawn}), 1)
        here = {name: count for name, _, count, *_ in drawn}
        self.assertEqual((here["Begin"], here["End"]), (0, 0))
        self.assertGreater(min(here["In forward"], here["In backward"]), 0)
        self.assertGreater(next(way for name, _, _, way, _ in drawn if name == "First reduction"), 0)
        self.assertLessEqual(here["First reduction"], here["All-gather for backward"])  # less where ranks are as fast: explain_page_test.py
        self.assertRegex(next(text for name, *_, text in drawn if name == "In forward"), r"computes the forward of h\.")
        self.assertIn("computes the gradients of", next(text for name, *_, text in drawn if name == "In backward"))
        b.prefer("print")
        self.assertEqual(b.value("[...document.querySelectorAll('[data-picture=map] > .slot, .frames, button')].filter(e => e.offsetHeight > 0).length"), 1)
        b.value("dispatchEvent(new Event('afterprint'))")
        self.assertEqual(b.value(frames), [])

    def test_saves_a_trace(self):
        """As --trace writes it, of the step shown."""
        self.show()
        self.browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.folder))
        self.browser.value("[...document.querySelectorAll('button')].find(e => e.textContent === 'Save for Perfetto').click()")
        file, deadline = self.folder / "fsdp.trace.json", time.monotonic() + 20
        saved = None
        while saved is None:  # the browser creates the file before it writes it
            try:
                saved = json.loads(file.read_text())
            except (FileNotFoundError, json.JSONDecodeError):
                self.assertLess(time.monotonic(), deadline, "no whole file")
                time.sleep(0.05)
        written = self.folder / "traced"
        done = subprocess.run([TOOL, *COMPARE, "--strategies", "fsdp", "--trace", str(written)], text=True, capture_output=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        written = json.loads(written.read_text())
        timeline = next(run["timeline"] for run in self.run_json["runs"] if run["strategy"] == "fsdp")
        events = [e for e in saved["traceEvents"] if e["ph"] != "M"]
        self.assertEqual(len(events), sum(len(rank["events"]) for rank in timeline["ranks"]))
        shape = lambda e: (e["ph"], e["name"] if e["ph"] == "M" else e["cat"], e.get("tid"), tuple(sorted(e)), tuple(sorted(e["args"])))
        names = lambda trace: {(e["pid"], e.get("tid"), e["args"]["name"]) for e in trace["traceEvents"] if e["ph"] == "M"}
        self.assertEqual(names(saved), names(written))
        seen = {shape(e) for e in written["traceEvents"]}
        self.assertEqual({shape(e) for e in saved["traceEvents"]} - seen, set())
        self.assertAlmostEqual(sum(e.get("dur", 0) for e in events) * 1000, sum(e[3] for rank in timeline["ranks"] for e in rank["events"]), delta=10)

    def test_slider_moves_the_map_from_event_to_event(self):
        self.show()
        b = self.browser
        b.value("document.querySelector('input[type=range]').focus()")
        b.key("Home", 36)
        self.assertEqual(b.value("document.querySelectorAll('.shard.here').length"), 0, "at first no rank has others' shards")
        seen, states, places = set(), set(), [b.value("+document.querySelector('input[type=range]').value")]
        for _ in range(60):
            b.key("ArrowRight", 39)
            places.append(b.value("+document.querySelector('input[type=range]').value"))
            seen.add(b.value("document.querySelector('input[type=range]').getAttribute('aria-valuetext')"))
            states.add(b.value("document.querySelectorAll('.shard.here').length"))
        self.assertEqual(places, sorted(set(places)), "each press moves to a later event")
        self.assertGreater(len(seen), 40)  # some events read alike
        self.assertGreater(len(states), 2)
        self.assertTrue(any("computes the forward of" in s for s in seen), seen)
        before = b.value("+document.querySelector('input[type=range]').value")
        b.key("ArrowLeft", 37)
        self.assertLess(b.value("+document.querySelector('input[type=range]').value"), before)
        b.key(" ", 32, " ")  # plays
        b.wait_until(f"+document.querySelector('input[type=range]').value > {before}")
        b.key(" ", 32, " ")

    def test_zoom_chips_and_fragment(self):
        self.show()
        b = self.browser
        width = "+document.querySelector('.mark.reduce').getAttribute('width')"
        before = b.value(width)
        b.value("document.querySelector('[aria-label=\"Zoom in\"]').click()")
        self.assertAlmostEqual(b.value(width) / before, 1.5, places=2)
        b.value("document.querySelector('svg.timeline').focus()")
        b.key("0", 48, "0")
        self.assertAlmostEqual(b.value(width), before, places=2)
        place = ("(() => { const r = document.querySelector('svg.timeline').getBoundingClientRect(); window.scrollTo(0, r.top + window.scrollY);"
                 "const n = document.querySelector('svg.timeline').getBoundingClientRect(); return [n.left + n.width / 2, n.top + 60]; })()")
        # On a busy machine the browser may still have the page's old position, and the wheel turns over another picture.
        for _ in range(10):
            x, y = b.value(place)
            b.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-120)
            deadline = time.monotonic() + 2
            while not b.value(f"{width} > {before * 1.05}") and time.monotonic() < deadline:
                time.sleep(0.02)
            if b.value(f"{width} > {before * 1.05}"):
                break
        self.assertGreater(b.value(width), before * 1.05)
        b.value("[...document.querySelectorAll('.chips button')].find(e => e.textContent === 'zero2').click()")
        self.assertEqual({m[0] for m in self.marks()}, {"fsdp", "zero2"})
        b.wait_until("location.href.includes('show=fsdp%2Czero2')")
        address = b.value("location.href")
        zoomed = b.value(width)
        self.show(address)
        self.assertEqual({m[0] for m in self.marks()}, {"fsdp", "zero2"}, "the address brings the choice back")
        self.assertAlmostEqual(b.value(width) / zoomed, 1, places=2)

    def test_hostile_names_stay_text(self):
        document = copy.deepcopy(self.run_json)
        for run in document["runs"]:
            run["timeline"]["units"] = [HOSTILE if u == "h.0" else u for u in run["timeline"]["units"]]
            for unit in run["units"]:
                unit["name"] = HOSTILE if unit["name"] == "h.0" else unit["name"]
        self.show(self.page_of(document))
        self.assertIn("Tessera", self.browser.value("document.title"))
        self.assertEqual(self.browser.value("document.querySelectorAll('img').length"), 0)
        self.assertGreater(len(self.marks()), 20, "the pictures are drawn")

    def test_only_its_own_scripts_and_styles_work(self):
        page = (self.folder / "page.html").read_text()
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page).group(1)
        self.assertNotIn("unsafe", policy)
        poison = "<script>document.title = 'broken'</script><p id=poison style='color: rgb(1, 2, 3)' onclick='document.title = \"broken\"'>x</p>"
        poisoned = page.replace("</body>", poison + "</body>")

        def seen(text):
            (self.folder / "poisoned.html").write_text(text)
            self.browser.open((self.folder / "poisoned.html").as_uri())
            color = self.browser.value("getComputedStyle(document.querySelector('#poison')).color")
            self.browser.value("document.querySelector('#poison').click()")
            return "broken" in self.browser.value("document.title"), color == "rgb(1, 2, 3)", len(self.marks()) > 20

        self.assertEqual(seen(poisoned), (False, False, True))
        self.assertTrue(any("Content Security Policy" in message for message in self.browser.messages), self.browser.messages)
        free = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
        self.assertEqual(seen(poisoned.replace(policy, free)), (True, True, True))  # the control

    def test_controls_have_names_and_texts_have_contrast(self):
        document = with_why(copy.deepcopy(self.run_json))
        address = self.page_of(document)
        for scheme in ("light", "dark"):
            self.browser.prefer(prefers_color_scheme=scheme)
            self.show(address)
            nodes = self.browser.call("Accessibility.getFullAXTree")["nodes"]
            controls = [n for n in nodes if n.get("role", {}).get("value") in ("button", "slider", "img") and not n.get("ignored")]
            self.assertGreater(len(controls), 10)
            self.assertEqual([n["role"]["value"] for n in controls if not n.get("name", {}).get("value")], [])
            self.assertEqual(self.browser.value(CONTRAST), [], scheme)
        self.browser.value("document.querySelector('.sentence').style.color = '#bbb'")  # the negative control
        self.browser.value("document.querySelector('.sentence').parentElement.style.background = '#fff'")
        self.assertNotEqual(self.browser.value(CONTRAST), [])

    def test_every_word_has_an_entry(self):
        done = subprocess.run([TOOL, "info", "--words"], text=True, capture_output=True, timeout=30)
        words = {line for line in done.stdout.splitlines() if not line.startswith(" ")}
        text = (self.folder / "page.html").read_text()
        used = set(re.findall(r"<dfn[^>]*>([^<]*)<", text))
        self.assertGreater(len(used), 6)
        self.assertEqual(used - words, set())
        self.show()
        self.browser.value("document.querySelector('dfn').focus()")
        self.assertGreater(self.browser.value("document.querySelector('dfn > span').getBoundingClientRect().width"), 50)

    def test_says_what_is_left_out(self):
        notes = "[...document.querySelectorAll('.note')].map(e => e.textContent)"
        self.show()
        self.assertEqual(self.browser.value(notes), ["", ""])
        document = copy.deepcopy(self.run_json)
        for run in document["runs"]:
            ranks = run["timeline"]["ranks"]
            run["timeline"]["ranks"] = [{**ranks[i % 4], "rank": i} for i in range(12)]
        self.show(self.page_of(document))
        self.assertEqual(self.browser.value(notes), ["The map shows the first 8 of 12 ranks.",
                                                     "Of 12 ranks the slowest, the middle one and the fastest are shown."])

    def test_names_the_command(self):
        self.show()
        line = self.browser.value("document.querySelector('section > pre').textContent")
        self.assertTrue(line.startswith("tessera " + " ".join(COMPARE)), line)

    def test_size_time_and_phone(self):
        text = (self.folder / "page.html").read_text()
        self.assertLess(len(text), 5_000_000)
        self.show()
        self.assertLess(float(self.browser.value("document.querySelector('section').dataset.drawn")), 2000)
        for width in (360, 1200):
            self.browser.size(width, phone=width == 360)
            self.show()
            self.assertLessEqual(self.browser.value("document.documentElement.scrollWidth"), width, "nothing sticks out sideways")

    def take_screenshots(self):
        address = (SCREENSHOTS / "page.html").as_uri()
        for name, width, most, scheme in (("light", 900, 4400, "light"), ("dark", 900, 2900, "dark"), ("phone", 360, 2900, "light"), ("print", 800, 1240, "light")):
            self.browser.size(width, phone=name == "phone")
            self.browser.prefer("print" if name == "print" else "", prefers_color_scheme=scheme)
            self.show(address)
            if name == "print":
                self.browser.value("dispatchEvent(new Event('beforeprint'))")
            height = self.browser.value("document.documentElement.scrollHeight")
            self.browser.screenshot(SCREENSHOTS / f"report-{name}.png", x=0, y=0, width=width, height=min(height, most))


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    PageCase.PROGRAM = sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
    SCREENSHOTS = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
    if SCREENSHOTS is not None:
        ReportPageTest.test_screenshots = ReportPageTest.take_screenshots
    unittest.main(verbosity=2)
