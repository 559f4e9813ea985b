"""--flight-recorder and report --postmortem: killed, stopped and healthy ranks, other launchers, damaged files."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

TOOL = None
TEXT = "the quick brown fox jumps over the lazy dog; " * 500
RING = 64 + 1024 * 128  # bytes before the lines of a file


def report(*arguments):
    done = subprocess.run([TOOL, "report", *map(str, arguments)], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


class PostmortemTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "text.txt").write_text(TEXT)
        self.flight = self.folder / "flight"

    def command(self, *more, ranks=4, steps=3, name="train"):
        return [str(word) for word in (TOOL, name, "--ranks", ranks, "--steps", steps, "--model", "gpt-nano", "--global-batch", 4, "--seq-len", 16,
                                       "--threads", 1, "--data", self.folder / "text.txt", "--flight-recorder", self.flight, *more)]

    def train(self, *more, **options):
        done = subprocess.run(self.command(*more, **options), capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def postmortem(self):
        """Text and JSON."""
        code, out, err = report("--postmortem", self.flight, "--json", self.folder / "p.json")
        self.assertEqual((code, err), (0, ""))
        return out, json.loads((self.folder / "p.json").read_text())

    def process_of(self, rank):
        lines = (self.flight / f"rank-{rank}.flight").read_bytes()[RING:].decode().splitlines()
        return int(next(line for line in lines if line.startswith("process ")).split()[1])

    def communicators_of(self, rank):
        lines = (self.flight / f"rank-{rank}.flight").read_bytes()[RING:].decode().splitlines()
        return [line.split()[2:] for line in lines if line.startswith("communicator ")]

    def break_rank(self, rank, *more, signal_number=signal.SIGKILL, env=None):
        """Signals a rank in the middle of a training, and returns the launcher's standard error."""
        process = subprocess.Popen(self.command(*more, steps=1000000), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env={**os.environ, **(env or {})})
        for line in process.stdout:
            if line.startswith("step 3 "):
                break
        os.kill(self.process_of(rank), signal_number)
        _, err = process.communicate(timeout=40)
        self.assertEqual(process.returncode, 1, err)
        return err

    def check_broken(self, rank, err):
        out, found = self.postmortem()
        divergence = found["divergence"]
        self.assertIsNotNone(divergence, (out, err))
        self.assertEqual(divergence["ranks"], [rank], out)
        died = divergence["kind"] == "died_in"  # after it had called what the others wait in: rare, since calls are short
        self.assertRegex(out.splitlines()[1], rf"^first divergence: rank {rank} {'died in' if died else 'never called'} \w+ #\d+ \(\w+ .*\).* in step \d+, "
                                              r"which ranks? .* waits? in$")
        self.assertEqual([one["end"] for one in found["by_rank"]][rank], "killed", out)
        self.assertIn(f"last calls of rank {rank} (killed):", out)
        if died:
            return out, found
        # The control: what the table says of the call is in the files of the others, and not in that of the rank.
        call = divergence["calls"][0]
        self.assertNotEqual(call["rank"], rank)
        for one in found["by_rank"]:
            made = [(other["operation"], other["sequence"], other["communicator"], other["members"]) for other in one["calls"]]
            self.assertEqual((call["operation"], call["sequence"], divergence["communicator"], divergence["members"]) in made, one["rank"] in {c["rank"] for c in divergence["calls"]})
        self.assertNotIn(rank, {other["rank"] for other in divergence["calls"]})
        return out, found

    def test_a_killed_rank_is_named(self):
        info = json.loads(subprocess.run([TOOL, "info", "--json"], capture_output=True, text=True, timeout=60).stdout)
        usable = [backend["name"] for backend in info["backends"] if backend["available"] and backend["name"] != "nccl"]
        self.assertLessEqual({"shm", "tcp"}, set(usable))
        for backend in usable:
            for strategy in ("fsdp", "hsdp", "ddp") if backend == "shm" else ("fsdp",):
                err = self.break_rank(2, "--backend", backend, "--strategy", strategy)
                self.assertIn("rank 2", err.splitlines()[-1])
                self.assertIn(f"tessera: note: tessera report --postmortem {self.flight} ", err)
                if backend == "mpi":  # mpirun ends the other ranks at once, so that several are behind
                    out, found = self.postmortem()
                else:
                    out, found = self.check_broken(2, err)
                self.assertEqual("tessera: " + found["first_cause"], err.splitlines()[-1])
                self.assertIn(f"first cause, by the launcher: {found['first_cause']}\n", out)

    def test_a_stopped_rank_is_named_with_the_number_of_the_error(self):
        err = self.break_rank(1, signal_number=signal.SIGSTOP, env={"TESSERA_TIMEOUT": "1s"})
        out, found = self.check_broken(1, err)
        self.assertIn("first failure: rank ", out)
        self.assertIn("Timeout: ", out)
        failed = re.search(r"(\w+) #(\d+) \(([\w.]+)\): not done within", out)
        calls = [call for one in found["by_rank"] for call in one["calls"] if call["state"] == "failed"]
        self.assertIn(failed.groups(), {(call["operation"], str(call["sequence"]), call["unit"]) for call in calls}, out)

    def test_a_running_rank_is_not_called_killed(self):
        process = subprocess.Popen(self.command(steps=1000000), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in process.stdout:
            if line.startswith("step 3 "):
                break
        stopped = self.process_of(3)
        os.kill(stopped, signal.SIGSTOP)
        try:
            _, found = self.postmortem()
            self.assertEqual([one["end"] for one in found["by_rank"]], ["running"] * 4)
        finally:
            os.kill(stopped, signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)

    def test_a_healthy_run_has_no_divergence(self):
        for more in (("--strategy", "fsdp"), ("--strategy", "hsdp", "--precision", "f16"), ("--link", "20us,1GB/s"), ("--save", self.folder / "saves")):
            self.train(*more)
            out, found = self.postmortem()
            self.assertEqual(out.splitlines()[1], "no divergence: 4 ranks made the same calls and closed", more)
            self.assertIsNone(found["divergence"])
            self.assertEqual({one["end"] for one in found["by_rank"]}, {"closed"})
            self.assertIsNone(found["first_cause"])
            steps = [call["step"] for call in found["by_rank"][0]["calls"] if call["unit"] == "h.1"]
            self.assertEqual(sorted(set(steps) - {0}), [1, 2, 3])

    def test_recording_changes_no_result(self):
        with_recorder = self.train("--json", self.folder / "a.json").split()[-1]
        command = self.command("--json", self.folder / "b.json")
        command = [word for word in command if word not in ("--flight-recorder", str(self.flight))]
        without = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()[-1]
        self.assertEqual(with_recorder, without)

    def test_a_rank_has_as_many_communicators_as_info_says(self):
        """Each costs memory and connections over NCCL."""
        stated = json.loads(subprocess.run([TOOL, "info", "--json"], capture_output=True, text=True, timeout=60).stdout)["communicators"]
        for strategy, key, ranks in (("ddp", "one_axis", 4), ("fsdp", "one_axis", 4), ("hsdp", "two_axes", 4), ("fsdp", "one_rank", 1)):
            with self.subTest(strategy=strategy):
                shutil.rmtree(self.flight, ignore_errors=True)
                self.train("--strategy", strategy, "--clip-norm", 1, ranks=ranks)
                for rank in range(ranks):
                    self.assertEqual(len(self.communicators_of(rank)), stated[key], self.communicators_of(rank))

    def test_compare_keeps_the_files_of_its_last_run(self):
        options = ("--strategies", "ddp,fsdp", "--json", self.folder / "c.json")
        self.train(*options, name="compare")
        with open(self.folder / "c.json") as file:
            costs = [(run["calls_per_step"], run["wire_bytes_per_step"], run["formula_bytes_per_step"]) for run in json.load(file)["runs"]]
        for _, wire, formula in costs:
            self.assertEqual(wire, formula)  # the recorder's own collectives are not counted
        _, found = self.postmortem()
        self.assertIn("all_gather", {call["operation"] for call in found["by_rank"][0]["calls"] if call["step"] == 3})

    def test_other_launchers_record_by_the_variable(self):
        command = self.command(ranks=2)
        at = command.index("--flight-recorder")
        del command[at:at + 2]
        subprocess.run([TOOL, "run", "-n", "2", "--", *command], check=True, capture_output=True, timeout=60, env={**os.environ, "TESSERA_FLIGHT_RECORDER": str(self.flight)})
        out, _ = self.postmortem()
        self.assertIn("no divergence: 2 ranks", out)

    def test_an_error_of_one_rank_is_in_its_file(self):
        done = subprocess.run(self.command("--json", "/dev/full"), capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 1)
        out, found = self.postmortem()
        self.assertIn("first failure: rank 0: --json: writing failed; is the disk full?", out)
        self.assertEqual(found["by_rank"][0]["end"], "failed")

    def wrong(self, *arguments):
        code, out, err = report(*arguments)
        self.assertEqual((code, out, err.count("\n")), (2, "", 1), (arguments, out, err))
        return err

    def test_damaged_files_are_one_clear_line(self):
        self.train()
        kept = self.folder / "kept"
        shutil.copytree(self.flight, kept)
        one = self.flight / "rank-1.flight"
        whole = one.read_bytes()

        def changed(at, value):
            return whole[:at] + value + whole[at + len(value):]
        for content, problem in ((b"", "not a file of the flight recorder"), (b"hello\n" * 30000, "not a file of the flight recorder"),
                                 (whole[:100], "was cut"), (whole[:RING - 1], "was cut"), (whole[:RING], "damaged"), (changed(16, b"\xff"), "another version"),
                                 (changed(64 + 8, b"\xff"), "damaged"), (changed(64 + 12, b"\xff"), "damaged"), (changed(64 + 16, b"\xff"), "damaged"),
                                 (changed(RING, b"rank x"), "damaged")):
            one.write_bytes(content)
            err = self.wrong("--postmortem", self.flight)
            self.assertIn("rank-1.flight", err)
            self.assertIn(problem, err)
        one.write_bytes(whole)
        self.assertEqual(report("--postmortem", self.flight)[0], 0)  # the control
        one.write_bytes(whole[:-5])  # killed while it wrote the last line
        self.assertEqual(report("--postmortem", self.flight)[0], 0)
        one.write_bytes((self.flight / "rank-2.flight").read_bytes())
        self.assertIn("is that of rank 2", self.wrong("--postmortem", self.flight))
        one.unlink()
        code, out, _ = report("--postmortem", self.flight)
        self.assertEqual(code, 0)
        self.assertIn("rank 1 left no file", out)

    def test_a_rank_that_died_before_all_had_joined_hides_no_other(self):
        self.train()
        one = self.flight / "rank-1.flight"
        unused = one.read_bytes()[:64] + bytes(RING - 64)
        one.write_bytes(unused)
        code, out, _ = report("--postmortem", self.flight)
        self.assertEqual(code, 0)
        self.assertIn("rank 1 left no file", out)
        for rank in range(4):
            (self.flight / f"rank-{rank}.flight").write_bytes(unused)
        self.assertIn("every rank ended before all had joined", self.wrong("--postmortem", self.flight))

    def test_directories_that_hold_no_recording_are_one_clear_line(self):
        self.assertIn("No such file", self.wrong("--postmortem", self.folder / "gone"))
        (self.folder / "empty").mkdir()
        self.assertIn("has no file of the flight recorder", self.wrong("--postmortem", self.folder / "empty"))
        self.assertIn("has no file of the flight recorder", self.wrong("--postmortem", self.folder))
        self.assertIn("Not a directory", self.wrong("--postmortem", self.folder / "text.txt"))
        self.assertIn("--json", self.wrong("--postmortem", self.folder, "--json", self.folder / "none" / "x"))
        self.assertIn("RUN.json", self.wrong())
        self.assertIn("--output", self.wrong("x.json"))
        self.assertIn("--postmortem", self.wrong("x.json", "--postmortem", self.folder))
        self.assertIn("--postmortem", self.wrong("x.json", "-o", "x.html", "--json", "y"))

    def test_a_directory_that_cannot_be_written_is_an_error_before_training(self):
        self.flight = self.folder / "text.txt"
        for name in ("train", "compare"):
            done = subprocess.run(self.command(name=name), capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
            self.assertIn("--flight-recorder", done.stderr)


if __name__ == "__main__":
    TOOL = os.path.abspath(sys.argv.pop(1))
    unittest.main()
