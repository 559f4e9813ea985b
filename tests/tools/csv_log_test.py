"""train --log-csv: the table of the steps, as Python's csv module reads it; continued by a run that resumes."""

import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60
COLUMNS = ["step", "loss", "tokens_per_second", "grad_norm", "learning_rate", "loss_scale", "skipped_steps", "live_bytes", "peak_bytes", "mfu"]


class CsvLogTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "text.txt").write_text(TEXT)
        self.log = self.folder / "log.csv"

    def command(self, *more, steps=4, ranks=2):
        return [str(word) for word in (TOOL, "train", "--ranks", ranks, "--steps", steps, "--model", "gpt-nano", "--global-batch", 4, "--seq-len", 16,
                                       "--threads", 1, "--data", self.folder / "text.txt", "--log-csv", self.log, *more)]

    def train(self, *more, steps=4):
        done = subprocess.run(self.command(*more, steps=steps), text=True, capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def wrong(self, *more, steps=4):
        done = subprocess.run(self.command(*more, steps=steps), text=True, capture_output=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
        return done.stderr

    def records(self):
        with open(self.log, newline="") as file:
            rows = list(csv.reader(file, strict=True))
        self.assertEqual(rows[0], COLUMNS)
        for row in rows:
            self.assertEqual(len(row), len(COLUMNS))
        return [dict(zip(COLUMNS, row)) for row in rows[1:]]

    def test_a_record_has_the_numbers_of_the_json_line(self):
        for precision in ("f32", "f16"):
            self.train("--precision", precision, "--json", self.folder / "t.json", "--peak-flops", "1TFLOP/s")
            self.assertEqual(self.log.read_bytes().count(b"\r\n"), 5)  # RFC 4180
            self.assertEqual(self.log.read_bytes().count(b"\n"), 5)
            lines = [json.loads(line) for line in (self.folder / "t.json").read_text().splitlines()][:4]
            for record, line in zip(self.records(), lines, strict=True):
                for name in ("step", "loss", "tokens_per_second", "grad_norm", "learning_rate", "mfu"):
                    self.assertEqual(float(record[name]), line[name], name)
                for name in ("loss_scale", "skipped_steps"):
                    self.assertEqual(record[name] != "", precision == "f16")
                    if precision == "f16":
                        self.assertEqual(float(record[name]), line[name], name)
                self.assertGreater(int(record["peak_bytes"]), int(record["live_bytes"]))
                self.assertGreater(int(record["live_bytes"]), 120576 * 4 * 3 // 2)  # the model state of one of two ranks
        self.train()
        self.assertEqual({record["mfu"] for record in self.records()}, {""})  # the control: no peak is known

    def test_numbers_that_are_not_finite_can_be_read(self):
        self.train("--lr", 30, steps=12)
        self.assertEqual(str(float(self.records()[-1]["loss"])), "nan")

    def test_each_step_is_written_when_it_is_done(self):
        process = subprocess.Popen(self.command(steps=100000), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in process.stdout:
            if line.startswith("step 5 "):
                break
        try:
            self.assertGreaterEqual(len(self.log.read_text().splitlines()), 5)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)

    def test_a_resumed_run_continues_its_table(self):
        save = ("--save", self.folder / "saves", "--resume", self.folder / "saves")
        self.train(*save, steps=3)
        first = self.log.read_bytes()
        self.train(*save, steps=5)
        self.assertTrue(self.log.read_bytes().startswith(first))
        self.assertEqual([record["step"] for record in self.records()], ["1", "2", "3", "4", "5"])
        # A run that died after step 7, and in the middle of a line.
        with open(self.log, "ab") as file:
            file.write(b"6" + b",1" * 9 + b"\r\n7" + b",1" * 9 + b"\r\n8,1,")
        self.train(*save, steps=6)
        records = self.records()
        self.assertEqual([record["step"] for record in records], ["1", "2", "3", "4", "5", "6"])
        self.assertNotEqual(records[-1]["loss"], "1")
        whole = self.folder / "whole.json"
        log, self.log = self.log, self.folder / "other.csv"
        self.train("--json", whole, steps=6)
        losses = [json.loads(line)["loss"] for line in whole.read_text().splitlines()[:6]]
        self.assertEqual([float(record["loss"]) for record in records], losses)
        self.log = log
        self.train(steps=2)  # the control: a run from the beginning replaces the file
        self.assertEqual([record["step"] for record in self.records()], ["1", "2"])

    def test_a_new_table_begins_with_the_resumed_step(self):
        save = ("--save", self.folder / "saves", "--resume", self.folder / "saves")
        self.train(*save, steps=2)
        for start in (lambda: self.log.unlink(), lambda: self.log.write_text("")):
            start()
            self.train("--resume", self.folder / "saves", steps=4)
            self.assertEqual([record["step"] for record in self.records()], ["3", "4"])

    def test_a_foreign_file_is_not_continued(self):
        save = ("--save", self.folder / "saves", "--resume", self.folder / "saves")
        self.train(*save, steps=2)
        header = ",".join(COLUMNS) + "\r\n"
        for text, problem in (("a,b\r\n1,2\r\n", "header"), (header.replace("mfu", "more"), "header"), (header + "x,1\r\n", "line 2"),
                              (header + "1,1\r\n1,1\r\n", "line 3"), (header + "1\r\n", "line 2")):
            self.log.write_bytes(text.encode())
            err = self.wrong(*save, steps=4)
            self.assertIn("--log-csv", err)
            self.assertIn(problem, err)
            self.assertEqual(self.log.read_bytes(), text.encode())

    def test_a_file_that_cannot_be_written_is_an_error_before_training(self):
        for path in (self.folder / "none" / "log.csv", self.folder):
            self.log = path
            self.assertIn("--log-csv", self.wrong())
        self.log = self.folder / "text.txt"
        self.assertIn("--log-csv", self.wrong())
        self.assertEqual(self.log.read_text(), TEXT)
        self.log = "/dev/full"
        done = subprocess.run(self.command(ranks=1), text=True, capture_output=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
        self.assertIn("--log-csv: writing failed; is the disk full?", done.stderr)


if __name__ == "__main__":
    TOOL = os.path.abspath(sys.argv.pop(1))
    unittest.main()
