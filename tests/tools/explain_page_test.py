"""The page of explain --html in a browser: its marks and sentences are those of explain --json.

    explain_page_test.py TOOL BROWSER [SCREENSHOTS]     writes pictures of the page to that folder
"""

import json
import pathlib
import subprocess
import sys
import unittest

from browser import PageCase

TOOL, SCREENSHOTS = None, None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 200
HOSTILE = "</script><img src=x onerror=document.title='broken'>"
COMPUTE = ("forward", "backward", "optimizer_step", "unshard_wait", "reduce_wait")


def seen_spans(events, kinds):
    """Events that the compute row shows: all but those that others within them cover."""
    spans = [(i, e[2], e[2] + e[3]) for i, e in enumerate(events) if kinds[e[0]] in COMPUTE and e[3] > 0]
    seen = set()
    for i, begin, end in spans:
        inner = sorted((b, e) for j, b, e in spans if j != i and begin <= b and e <= end and (e - b < end - begin or j > i))
        at = begin
        for b, e in inner:
            if b > at:
                break
            at = max(at, e)
        if at < end:
            seen.add(i)
    return seen


class ExplainPageTest(PageCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        (cls.folder / "text.txt").write_text(TEXT)

    def setUp(self):
        self.browser.size(1200)
        self.browser.prefer()

    def explain(self, *arguments):
        """Opens the page of the step; returns its JSON."""
        command = [TOOL, "explain", *arguments, "--html", "page.html", "--json", "step.json"]
        done = subprocess.run(command, text=True, capture_output=True, timeout=100, cwd=self.folder)
        self.assertEqual((done.returncode, done.stderr), (0, ""), arguments)
        self.show((self.folder / "page.html").read_text())
        return json.loads((self.folder / "step.json").read_text())

    def show(self, text):
        page = self.folder / "shown.html"
        page.write_text(text)
        self.browser.open(page.as_uri())
        self.assertEqual(self.browser.messages, [], "the console is silent")

    def show_data(self, change):
        """The same page with other data."""
        text = (self.folder / "page.html").read_text()
        begin = text.index('class="data">') + len('class="data">')
        end = text.index("</script>", begin)
        data = json.loads(text[begin:end])
        change(data["runs"][0])
        self.show(text[:begin] + json.dumps(data).replace("<", "\\u003c") + text[end:])

    def marks(self, selector=""):
        return sorted(self.browser.value(f"[...document.querySelectorAll('.mark{selector}')].map(e => e.dataset.event)"))

    def matches(self, document):
        timeline, ranks = document["timeline"], document["timeline"]["ranks"]
        kinds = timeline["event_kinds"]
        name = document["strategy"]
        of = lambda rank, events: [f"{name}|{rank['rank']}|{i}" for i in events]
        transfers = [(rank, t) for rank in ranks for t in rank.get("transfers", [])]
        self.assertEqual(set(self.marks(".compute")), {m for rank in ranks for m in of(rank, seen_spans(rank["events"], kinds))})
        self.assertEqual(self.marks(".reshard"), sorted(m for rank in ranks for m in of(rank, [i for i, e in enumerate(rank["events"]) if kinds[e[0]] == "reshard"])))
        if timeline["simulated"]:
            self.assertEqual(self.marks(".queued"), sorted(m for rank, t in transfers if t[4] > t[3] for m in of(rank, [t[6]])))
            self.assertEqual(self.marks(".gather:not(.queued)") + self.marks(".reduce:not(.queued)"),
                             sorted(m for rank, t in transfers if kinds[rank["events"][t[6]][0]] == "unshard_issue" for m in of(rank, [t[6]])) +
                             sorted(m for rank, t in transfers if kinds[rank["events"][t[6]][0]] == "reduce_issue" for m in of(rank, [t[6]])))

    def test_draws_each_event_and_transfer_of_the_step(self):
        for arguments in (("--strategy", "fsdp"), ("--strategy", "hsdp", "--hosts", "2"), ("--strategy", "ddp"), ("--strategy", "zero1")):
            document = self.explain(*arguments)
            self.assertEqual(len(document["timeline"]["ranks"]), 4)
            self.matches(document)
        document = self.explain("--strategy", "fsdp")
        rank = document["timeline"]["ranks"][1]
        self.assertEqual(len(rank["transfers"]), document["cost"]["calls"])
        self.assertEqual(sum(t[2] for t in rank["transfers"]), document["cost"]["bytes_sent"])
        # The negative controls: a transfer less, a free less, and a wait less are seen.
        for list_name, chosen in (("transfers", lambda t, k: t[0] == "reduce_scatter"), ("events", lambda e, k: k[e[0]] == "reshard"),
                                  ("events", lambda e, k: k[e[0]] == "reduce_wait")):
            def change(run):
                events = run["timeline"]["ranks"][1][list_name]
                del events[max(i for i, e in enumerate(events) if chosen(e, run["timeline"]["event_kinds"]))]
            self.show_data(change)
            with self.assertRaises(AssertionError):
                self.matches(document)

    def test_transfers_are_as_long_as_they_take(self):
        document = self.explain()
        drawn = self.browser.value("[...document.querySelectorAll('.mark.gather, .mark.reduce')].map(e => "
                                   "[e.classList.contains('queued'), e.dataset.event, +e.getAttribute('width')])")
        pixels = set()
        for queued, mark, width in drawn:
            _, rank, event = mark.split("|")
            called, begun, done = next(t[3:6] for t in document["timeline"]["ranks"][int(rank)]["transfers"] if t[6] == int(event))
            length = begun - called if queued else done - begun
            if length > 50_000:
                pixels.add(round(width / length * 1e6, 2))
        self.assertEqual(len(pixels), 1)

    def test_slider_tells_each_row_of_the_story(self):
        document = self.explain()
        b = self.browser
        b.value("document.querySelector('input[type=range]').focus()")
        b.key("Home", 36)
        told = []
        for _ in range(200):
            sentence = b.value("document.querySelector('.sentence').textContent")
            if not told or told[-1] != sentence:
                told.append(sentence)
            if "the step ends" in sentence:
                break
            b.key("ArrowRight", 39)
        all_told = "\n".join(told)
        for row in document["rows"]:
            self.assertIn(row["text"], all_told)
            self.assertIn(row["note"], all_told)
        self.assertTrue(all(", every rank: " in sentence for sentence in told))
        self.assertIn("the step ends", told[-1])
        self.assertNotIn("asks for", all_told, "the words are explain's")
        self.assertEqual(b.value("document.querySelectorAll('.shard.here').length"), 0, "at the end all is resharded")
        # The negative control: a row that is told elsewhere is missed.
        self.show_data(lambda run: run["story"]["sentences"].pop(0))
        self.assertNotIn(document["rows"][0]["text"], b.value("[...Array(1)].map(() => document.body.innerText).join()").split("The step in words")[0])

    def test_memory_reaches_the_peak_of_the_plan(self):
        for arguments in ((), ("--strategy", "ddp")):
            document = self.explain(*arguments)
            done = subprocess.run([TOOL, "plan", "--model", "gpt-nano", "--ranks", "4", "--link", "20us,100MB/s", "--strategies", document["strategy"],
                                   "--json", "plan.json"], text=True, capture_output=True, timeout=60, cwd=self.folder)
            self.assertEqual(done.returncode, 0, done.stderr)
            peak = json.loads((self.folder / "plan.json").read_text())["runs"][0]["peak_bytes"]["total"]
            samples = document["timeline"]["ranks"][0]["memory"]
            self.assertEqual(max(sum(sample[1:9]) for sample in samples), peak)
            self.assertEqual([sample[0] for sample in samples], sorted(sample[0] for sample in samples))
            self.assertLessEqual(samples[-1][0], document["timeline"]["length_ns"])
            self.assertIn(f"{peak / 1e6:.3g} MB", self.browser.value("document.querySelector('text.peak').textContent"))

    def test_moments_on_paper_differ_in_what_is_here(self):
        self.explain("--model", "gpt-nano", "--ranks", "4", "--strategy", "fsdp")
        self.browser.value("dispatchEvent(new Event('beforeprint'))")
        here = dict(self.browser.value("[...document.querySelectorAll('.frame')].map(e => [e.querySelector('strong').textContent, e.querySelectorAll('.shard.here').length])"))
        self.assertEqual((here["Begin"], here["End"]), (0, 0))
        self.assertGreater(here["In forward"], 0)
        self.assertLess(here["First reduction"], here["All-gather for backward"])

    def test_real_step_shows_each_rank(self):
        document = self.explain("--run", "--data", "text.txt")
        timeline = document["timeline"]
        self.assertFalse(timeline["simulated"])
        self.assertEqual([rank["rank"] for rank in timeline["ranks"]], [0, 1, 2, 3])
        self.assertEqual(len({json.dumps(rank["events"]) for rank in timeline["ranks"]}), 4, "each rank has times of its own")
        self.matches(document)
        self.assertEqual(self.marks(".queued"), [], "nobody knows when bytes of real transfers pass")
        self.assertIn(", rank 3: ", self.browser.value("document.querySelector('.sentence').textContent"))

    def test_many_ranks_are_a_few_equal_ones(self):
        document = self.explain("--ranks", "64", "--global-batch", "64")
        self.assertEqual(len(document["timeline"]["ranks"]), 8)
        self.assertEqual(self.browser.value("[...document.querySelectorAll('.note')].map(e => e.textContent)"),
                         ["The map shows the first 8 of 64 ranks.", "Of 64 equal ranks the first 8 are shown."])
        self.matches(document)

    def test_hostile_names_stay_text(self):
        self.explain()
        def change(run):
            for unit in run["units"]:
                unit["name"] = HOSTILE if unit["name"] == "h.0" else unit["name"]
            run["timeline"]["units"] = [HOSTILE if u == "h.0" else u for u in run["timeline"]["units"]]
            for sentence in run["story"]["sentences"]:
                sentence[1] = sentence[1].replace("h.0", HOSTILE)
        self.show_data(change)
        self.assertEqual(self.browser.value("document.querySelectorAll('img').length"), 0)
        self.assertIn("Tessera", self.browser.value("document.title"))
        self.assertIn(HOSTILE, self.browser.value("document.querySelector('.sentence').textContent"))

    def visible(self):
        return self.browser.value("[...document.querySelectorAll('[data-picture] svg')].filter(e => e.getBoundingClientRect().width > 0)"
                                  ".map(e => e.closest('[data-picture]').dataset.picture)")

    def test_presents_one_picture_after_the_other(self):
        self.browser.size(1600)
        self.explain()
        b = self.browser
        self.assertEqual(self.visible(), ["map", "timeline", "memory"])
        size = "document.querySelector('[data-picture=map] text.strong').getBoundingClientRect().height"
        small = b.value(size)
        b.value("[...document.querySelectorAll('h2 button')].find(e => e.textContent === 'Present').click()")
        self.assertEqual((self.visible(), b.value("location.hash.includes('present=map')")), (["map"], True))
        self.assertGreater(b.value(size), 1.4 * small, "text is larger")
        self.assertLessEqual(b.value("document.documentElement.scrollHeight"), 900, "it fits the screen")
        sentence = "document.querySelector('.sentence').textContent"
        b.value("document.activeElement.blur()")
        before = b.value(sentence)
        b.key("ArrowRight", 39)
        self.assertNotEqual(b.value(sentence), before, "the next event")
        for key, code, shown in (("ArrowDown", 40, "timeline"), ("PageDown", 34, "memory"), ("PageDown", 34, "memory"), ("PageUp", 33, "timeline")):
            b.key(key, code)
            self.assertEqual(self.visible(), [shown], key)
        b.key("Escape", 27)
        self.assertEqual((self.visible(), b.value("location.hash.includes('present')")), (["map", "timeline", "memory"], False))
        b.key("PageDown", 34)  # the control: the key means nothing on the whole page
        self.assertEqual(self.visible(), ["map", "timeline", "memory"])
        self.assertEqual(b.messages, [])

    def test_one_picture_is_a_part_of_another_page(self):
        self.explain()
        self.browser.open((self.folder / "shown.html").as_uri() + "#embed=timeline&at=2.370")
        self.assertEqual(self.visible(), ["timeline"])
        self.assertEqual(self.browser.value("[...document.querySelectorAll('h1, h2, details, .stage-keys')].filter(e => e.offsetHeight > 0).length"), 0)
        self.browser.value("document.querySelector('[data-picture=timeline] button').click()")
        self.browser.wait_until("/zoom=0.1/.test(location.hash) && /embed=timeline/.test(location.hash)")
        self.browser.open((self.folder / "shown.html").as_uri() + "#embed=nothing")  # the control
        self.assertEqual(self.visible(), ["map", "timeline", "memory"])

    def test_strategies_share_a_page(self):
        document = self.explain("--strategies", "ddp,fsdp")
        self.assertEqual([step["strategy"] for step in document["steps"]], ["ddp", "fsdp"])
        b = self.browser
        self.assertEqual(b.value("[...document.querySelectorAll('.timeline .strong')].map(e => e.textContent)"), ["ddp", "fsdp"])
        self.assertIn("ddp and fsdp on 4 ranks", b.value("document.querySelector('h1').textContent"))
        for step in document["steps"]:
            self.assertIn(f"step {step['timeline']['length_ns'] / 1e6:.2f} ms", b.value("document.querySelector('svg.timeline').textContent"))
        b.value("[...document.querySelectorAll('.chips button')].find(e => e.textContent === 'fsdp').click()")
        self.assertEqual(b.value("[...document.querySelectorAll('.timeline .strong')].map(e => e.textContent)"), ["ddp"])
        self.assertIn("ddp at", b.value("document.querySelector('.sentence').textContent"))
        for arguments, problem in ((("--strategies", "ddp", "--strategy", "fsdp"), "leave --strategy out"), (("--strategies", "ddp", "--run"), "one strategy runs at a time"),
                                   (("--strategies", "ddp,fsdp", "--question", "why-root"), "answers about one strategy")):
            done = subprocess.run([TOOL, "explain", *arguments], text=True, capture_output=True, timeout=60, cwd=self.folder)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n"), problem in done.stderr), (2, "", 1, True), done.stderr)

    def test_fits_a_phone_and_names_its_command(self):
        self.browser.size(360, phone=True)
        self.explain("--strategy", "zero2")
        self.assertLessEqual(self.browser.value("document.documentElement.scrollWidth"), 360, "nothing sticks out sideways")
        self.assertEqual(self.browser.value("[...document.querySelectorAll('pre')].pop().textContent"),
                         "tessera explain --strategy zero2 --html page.html --json step.json")
        self.assertLess((self.folder / "page.html").stat().st_size, 5_000_000)

    def test_refuses_a_page_that_cannot_be_written(self):
        (self.folder / "model.json").write_text("{}")
        for arguments, problem in ((("--html", "no/such/page.html"), "--html"), (("--html", "model.json", "--model", "model.json"), "--html"),
                                   (("--question", "list", "--html", "page.html"), "--html has no effect")):
            done = subprocess.run([TOOL, "explain", *arguments], text=True, capture_output=True, timeout=60, cwd=self.folder)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
            self.assertIn(problem, done.stderr)
        self.assertEqual((self.folder / "model.json").read_text(), "{}")

    def take_screenshots(self):
        for name, width, scheme in (("light", 900, "light"), ("dark", 900, "dark"), ("phone", 360, "light"), ("print", 800, "light")):
            self.browser.size(width, phone=name == "phone")
            self.browser.prefer("print" if name == "print" else "", prefers_color_scheme=scheme)
            self.explain("--model", "gpt-nano", "--ranks", "4", "--strategy", "fsdp")
            height = self.browser.value("document.documentElement.scrollHeight")
            self.browser.screenshot(SCREENSHOTS / f"explain-{name}.png", x=0, y=0, width=width, height=min(height, 2600))


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    PageCase.PROGRAM = sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
    SCREENSHOTS = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
    if SCREENSHOTS is not None:
        ExplainPageTest.test_screenshots = ExplainPageTest.take_screenshots
    unittest.main(verbosity=2)
