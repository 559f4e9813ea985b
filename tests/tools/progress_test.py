"""The progress line: on a terminal only, with what is left to do; and the same figures in --json."""

import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60
LINE = re.compile(r"step (\d+)/(\d+)  loss [\d.]+  \d+ tokens/s  ETA (\d+:\d\d)  memory [\d.]+ [kM]?B, peak [\d.]+ [kM]?B")


def on_terminal(command, both, seconds=60, columns=0):
    """Runs a command whose standard error is a terminal, and with `both` its output too. Returns code, terminal's text, standard output."""
    ours, theirs = pty.openpty()
    if columns:
        subprocess.run(["stty", "cols", str(columns)], stdin=theirs, check=True)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs if both else subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    text, out, deadline = b"", b"", time.monotonic() + seconds
    sources = [ours] if both else [ours, process.stdout.fileno()]
    while sources and time.monotonic() < deadline:
        for source in select.select(sources, [], [], 1)[0]:
            try:
                data = os.read(source, 65536)
            except OSError:  # no process has the terminal
                data = b""
            if not data:
                sources.remove(source)
            elif source == ours:
                text += data
            else:
                out += data
    os.close(ours)
    if process.stdout:
        process.stdout.close()
    return process.wait(timeout=10), text.decode(), out.decode()


class ProgressTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "text.txt").write_text(TEXT)

    def command(self, *more, name="train", ranks=2, steps=5):
        return [str(word) for word in (TOOL, name, "--ranks", ranks, "--steps", steps, "--model", "gpt-nano", "--global-batch", 4, "--seq-len", 16,
                                       "--threads", 1, "--data", self.folder / "text.txt", *more)]

    def step_lines(self, text):
        return [line for line in text.splitlines() if re.match(r"step \d+ loss ", line)]

    def test_a_terminal_shows_progress_between_the_steps(self):
        for ranks in (1, 2):
            code, text, out = on_terminal(self.command(ranks=ranks), both=False)
            self.assertEqual(code, 0, text)
            shown = LINE.findall(text)
            self.assertEqual([step for step, _, _ in shown], ["1", "2", "3", "4"], text)
            self.assertEqual({steps for _, steps, _ in shown}, {"5"})
            self.assertEqual(len(self.step_lines(out)), 5, out)
            self.assertNotRegex(out, r"ETA|\x1b|\r|\x01")
            self.assertTrue(text.endswith("\r\x1b[K"), repr(text[-200:]))  # nothing of it stays

    def test_lines_of_the_run_replace_the_progress_line(self):
        for ranks in (1, 2):
            code, text, _ = on_terminal(self.command("--lr", 30, ranks=ranks, steps=12), both=True)
            self.assertEqual(code, 0, text)
            screen = []
            for line in text.replace("\r\n", "\n").split("\n"):
                screen.append(re.split(r"\r\x1b\[K", line)[-1])
            self.assertEqual(len(self.step_lines("\n".join(screen))), 12, text)
            self.assertEqual(sum(line.startswith("tessera: warning: ") for line in (part.split("\r")[-1] for part in screen)), 1, text)
            self.assertRegex(screen[-2], "^final parameters [0-9a-f]{32}$")

    def test_a_pipe_has_no_progress_line(self):  # the control
        for ranks in (1, 2):
            done = subprocess.run(self.command(ranks=ranks), capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual([line.split()[1] for line in self.step_lines(done.stdout)], ["1", "2", "3", "4", "5"])
            self.assertNotRegex(done.stdout, r"ETA|\x1b|\r|\x01")

    def test_a_narrow_terminal_cuts_the_line(self):
        code, text, _ = on_terminal(self.command(), both=False, columns=30)
        self.assertEqual(code, 0, text)
        shown = re.findall(r"\x1b\[K([^\r\x1b]+)\r", text)
        self.assertEqual({len(line) for line in shown}, {29}, text)

    def test_f16_shows_scale_and_skipped_steps(self):
        code, text, _ = on_terminal(self.command("--precision", "f16", "--json", self.folder / "t.json"), both=False)
        self.assertEqual(code, 0, text)
        lines = [json.loads(line) for line in (self.folder / "t.json").read_text().splitlines()][:5]
        shown = re.findall(r"loss scale ([\d.]+), (\d+) skipped", text)
        self.assertEqual([(float(scale), int(skipped)) for scale, skipped in shown],
                         [(line["loss_scale"], line["skipped_steps"]) for line in lines[:4]])
        skipped = 0
        for line in lines:
            skipped += line["skipped"]
            self.assertEqual(line["skipped_steps"], skipped)

    def test_mfu_needs_a_known_peak(self):
        code, text, _ = on_terminal(self.command("--peak-flops", "1TFLOP/s", "--json", self.folder / "t.json"), both=False)
        self.assertEqual(code, 0, text)
        self.assertEqual(len(re.findall(r"MFU \d+\.\d %", text)), 4, text)
        for line in [json.loads(line) for line in (self.folder / "t.json").read_text().splitlines()][:5]:
            flops = line["tokens_per_second"] * (6 * 120576 + 12 * 2 * 64 * 16)  # gpt-nano: 2 layers of width 64, 16 tokens
            self.assertAlmostEqual(line["mfu"], flops / 2e12, delta=1e-9)  # 2 ranks
        code, text, _ = on_terminal(self.command(), both=False)  # the control
        self.assertNotIn("MFU", text)
        for wrong in ("1", "0TFLOP/s", "fast"):
            done = subprocess.run(self.command("--peak-flops", wrong), capture_output=True, text=True, timeout=30)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
            self.assertIn("--peak-flops", done.stderr)

    def test_compare_names_the_strategy_in_its_progress_line(self):
        code, text, out = on_terminal(self.command("--strategies", "ddp,fsdp", name="compare"), both=False)
        self.assertEqual(code, 0, text)
        for strategy in ("ddp", "fsdp"):
            self.assertEqual(len(re.findall(rf"\x1b\[K{strategy} step \d/5  ", text)), 5, text)
        self.assertNotRegex(out, r"ETA|\x1b|\x01")

    def test_an_error_is_not_behind_the_progress_line(self):
        command = self.command(steps=100000)
        ours, theirs = pty.openpty()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        for line in process.stdout:
            if line.startswith(b"step 3 "):
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        text = b""
        while select.select([ours], [], [], 0.5)[0]:
            try:
                text += os.read(ours, 65536)
            except OSError:
                break
        os.close(ours)
        self.assertEqual(process.returncode, 1)
        self.assertRegex(text.decode(), r"\r\x1b\[Ktessera: stopped by signal 15 \(SIGTERM\)\r\n$")


if __name__ == "__main__":
    TOOL = os.path.abspath(sys.argv.pop(1))
    unittest.main()
