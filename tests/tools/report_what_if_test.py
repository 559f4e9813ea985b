"""The report's What if: in a browser it replays schedules, whose times and memory must be those of plan.

    report_what_if_test.py TOOL BROWSER
"""

import json
import pathlib
import random
import shlex
import subprocess
import sys
import unittest

from browser import PageCase

TOOL = None
MICROSECOND = 1000
DATA = "JSON.parse(document.querySelector('script.data').textContent).what_if"


def random_setting(draw):
    ranks = draw.choice([2, 4, 8, 16, 32, 64])
    return {"link": {"latency_us": draw.choice([0, 20, draw.randrange(1, 5000)]), "bytes_per_second": draw.randrange(10**6, 10 ** draw.choice([7, 8, 10]))},
            "intra": {"latency_us": draw.randrange(50), "bytes_per_second": draw.randrange(10**8, 10**10)}, "ranks": ranks,
            "hosts": draw.choice([h for h in (1, 2, 4, 8) if ranks % h == 0]), "sequences": draw.randrange(1, 65)}


def named(run):
    return run["strategy"] + (" " + run["wrap"] if run.get("wrap") else "")


class WhatIfTest(PageCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.compare("page", "--model", "gpt-tall", "--link", "20us,100MB/s")

    @classmethod
    def compare(cls, name, *options):
        """A page, and its data."""
        done = subprocess.run([TOOL, "compare", "--ranks", "4", "--steps", "2", "--threads", "1", *options, "--report", str(cls.folder / f"{name}.html"),
                               "--json", str(cls.folder / f"{name}.json")], text=True, capture_output=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return json.loads((cls.folder / f"{name}.json").read_text())["what_if"]

    def show(self, name="page"):
        self.browser.size(1200)
        self.browser.open((self.folder / f"{name}.html").as_uri())
        self.assertEqual(self.browser.messages, [], "the console is silent")

    def plan(self, command):
        done = subprocess.run([TOOL, *shlex.split(command)[1:], "--json", str(self.folder / "plan.json")], text=True, capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 0, command + "\n" + done.stderr)
        return {named(run): run for run in json.loads((self.folder / "plan.json").read_text())["runs"]}

    def replayed(self, setting, change=""):
        """By the page: each run in the setting, and the command of plan for the same."""
        return self.browser.value(f"(() => {{ const data = {DATA}, setting = {json.dumps(setting)}; {change};"
                                  "return [Object.fromEntries(data.runs.map(r => [r.name, whatIf(data, r.name, setting)])), planCommand(data, setting)]; })()")

    def difference(self, seen, plan):
        """The largest one of times, in nanoseconds."""
        return max(abs(seen["step"] - plan["step_ms"]["median"] * 1e6), abs(seen["exposed"] - plan["exposed_communication_ms"] * 1e6))

    def compare_with_plan(self, settings, seed):
        draw, compared = random.Random(seed), {}
        memory = self.browser.value(f"Object.fromEntries({DATA}.runs.map(r => [r.name, r.memory_known]))")
        for _ in range(settings):
            setting = random_setting(draw)
            runs, command = self.replayed(setting)
            runs = {name: run for name, run in runs.items() if run}
            if not runs:
                continue
            planned = self.plan(command)
            for name, run in runs.items():
                self.assertLess(self.difference(run, planned[name]), MICROSECOND, f"{name} {setting}")
                self.assertAlmostEqual(run["tokens"] / planned[name]["tokens_per_second"], 1, places=4)
                if memory[name]:
                    self.assertEqual(run["memory"], planned[name]["peak_bytes"]["total"], f"{name} {setting}")
                compared[name] = compared.get(name, 0) + 1
        return compared

    def test_is_plan_in_200_random_settings(self):
        self.show()
        compared = self.compare_with_plan(200, 1)
        self.assertEqual(set(compared), {"ddp", "zero1", "zero2", "fsdp", "hsdp"})
        self.assertEqual(set(compared.values()), {200})

    def test_a_changed_cost_is_seen(self):
        """The negative control: one work or operation costs more, or nothing waits."""
        self.show()
        draw = random.Random(2)
        for change in ("s.works[1] = s.works[1].map(n => n * 1.1)", "s.loads[1][1][0] *= 1.1", "s.loads[1].forEach(l => l[2] += 1)",
                       "s.actions = s.actions.filter(a => a % 4 !== 2)"):
            setting = {**random_setting(draw), "ranks": 4, "hosts": 1, "link": {"latency_us": 20, "bytes_per_second": 10**8}, "sequences": 8}
            schedule = "data.runs.find(r => r.name === 'fsdp').schedules.find(s => s.ranks === 4)"
            runs, command = self.replayed(setting, f"const s = {schedule}; {change}")
            planned = self.plan(command)
            self.assertGreater(self.difference(runs["fsdp"], planned["fsdp"]), MICROSECOND, change)
            self.assertLess(self.difference(runs["ddp"], planned["ddp"]), MICROSECOND)

    def test_options_of_the_step_take_part(self):
        for options in (["--model", "gpt-nano", "--strategies", "ddp,fsdp,hsdp", "--accumulate", "2", "--global-batch", "16", "--reduce-when", "last",
                         "--clip-norm", "1"],
                        ["--model", "gpt-nano", "--strategies", "ddp,fsdp", "--collectives", "int8", "--precision", "bf16"],
                        ["--model", "gpt-nano", "--strategies", "fsdp,hsdp", "--reshard-after-forward", "2", "--prefetch", "0", "--checkpoint-activations"],
                        ["--model", "gpt-nano", "--strategies", "fsdp,hsdp", "--mesh", "2x2", "--lora", "4"],
                        ["--model", "llama-nano", "--strategies", "ddp,fsdp", "--wraps", "block,block;model.embed_tokens;model.norm+lm_head",
                         "--link", "20us,20MB/s", "--hosts", "2", "--link-intra", "5us,5GB/s"]):
            with self.subTest(options=options):
                self.compare("options", *options)
                self.show("options")
                self.assertGreater(sum(self.compare_with_plan(12, 3).values()), 3)
        # The last of these runs had hosts: its bytes by link are all that it sent, but for the mean of the losses.
        totals = self.browser.value("bytesOf(JSON.parse(document.querySelector('script.data').textContent))")
        self.assertEqual([sum(run["links"]) for run in totals], [sum(run["sent"]) - 24 for run in totals])
        self.assertTrue(all(0 < run["links"][0] < run["links"][1] for run in totals), totals)

    def test_leaves_out_what_it_can_not_replay(self):
        data = self.compare("left_out", "--model", "gpt-nano", "--strategies", "fsdp,diloco", "--precision", "bf16")
        self.assertEqual([bool(run["left_out"]) for run in data["runs"]], [False, True])
        self.assertEqual(data["runs"][0]["memory_known"], False, "the loss of bf16 has scratch memory of limited size")
        self.show("left_out")
        text = self.browser.value("document.body.textContent")
        self.assertIn("diloco is left out: its steps differ", text)
        self.assertIn("The memory of fsdp is left out", text)
        self.assertIn("The runs had no --link", text)
        self.assertEqual(self.browser.value("[...document.querySelectorAll('.what-if .step')].map(e => e.dataset.run)"), ["fsdp"])
        self.assertNotIn(" MB", self.browser.value("document.querySelector('.what-if .figures').textContent"))

    def test_sliders_bars_mark_and_address(self):
        self.show()
        b = self.browser
        figures = "[...document.querySelectorAll('.what-if .figures')].map(e => e.textContent)"
        before = b.value(figures)
        self.assertEqual(len(before), 5)
        data = json.loads((self.folder / "page.json").read_text())["what_if"]
        for text, run in zip(before, data["runs"]):
            self.assertAlmostEqual(float(text.split(" ms")[0]), run["simulated_ms"], delta=0.051)
            self.assertIn("tokens/s", text)
        b.value("document.querySelector('[aria-label=\"Rate of a link\"]').focus()")
        for _ in range(4):
            b.key("ArrowLeft", 37)
        slower = b.value(figures)
        self.assertTrue(all(float(s.split(" ms")[0]) > float(f.split(" ms")[0]) for s, f in zip(slower, before)), slower)
        self.assertIn("--link 20us,5MB/s", b.value("document.querySelector('.live pre').textContent"))
        # A bar is as long as its step on the axis that all share.
        lengths = b.value("Object.fromEntries([...document.querySelectorAll('.what-if rect[data-run]')].map(e => e).reduce((m, e) => "
                          "m.set(e.dataset.run, (m.get(e.dataset.run) || 0) + +e.getAttribute('width')), new Map()))")
        ratios = [lengths[run["name"]] / float(text.split(" ms")[0]) for run, text in zip(data["runs"], slower)]
        self.assertLess(max(ratios) / min(ratios), 1.001)
        b.value("new Promise(done => setTimeout(done, 300))")
        address = b.value("location.href")
        self.show()
        b.open(address)
        self.assertEqual(b.value(figures), slower, "the address brings the setting back")
        # T = (b/2) c F/B: at 5 MB/s a gather of 3/4 of 4 bytes hides from 1.5 F/B tokens on.
        expected = 1.5 * data["flops"] / 5e6
        self.assertAlmostEqual(b.value(f"hidingTokens({DATA}, {{...{DATA}.setting, link: {{bytes_per_second: 5e6}}}})"), expected, delta=1e-6 * expected)
        b.value("[...document.querySelectorAll('button')].find(e => e.textContent === 'As it ran').click()")
        self.assertEqual(b.value(figures), before)
        # The mark is on the slider of tokens wherever T is in its range, which depends on how fast this machine computes.
        own = data["setting"]
        sequences = {s for s in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if s <= data["most_sequences"]} | {own["sequences"]}
        rates = sorted({digit * 10**exponent for exponent in range(6, 11) for digit in (1, 2, 5)} | {own["link"]["bytes_per_second"]})
        b.value("document.querySelector('[aria-label=\"Rate of a link\"]').focus()")
        b.key("Home", 36)
        shown = []
        for rate in rates:
            tokens = 1.5 * data["flops"] / rate
            shown.append(b.value("getComputedStyle(document.querySelector('.hides')).display") != "none")
            self.assertEqual(shown[-1], min(sequences) * data["seq_len"] <= tokens <= max(sequences) * data["seq_len"], f"{rate} B/s, {tokens} tokens")
            b.key("ArrowRight", 39)
        self.assertEqual(set(shown), {True, False})


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    PageCase.PROGRAM = sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
    unittest.main(verbosity=2)
