"""train --save, train --resume and checkpoint as a user runs them: killed at any call, on a full disk, on other ranks."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

TOOL = None
FAULTS = None  # the library to preload; if set, only the tests of failing calls run, otherwise only the others
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60


def tool(*arguments, env=None, timeout=100):
    done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=timeout,
                          env={**os.environ, **(env or {})})
    return done.returncode, done.stdout, done.stderr


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.saves = self.folder / "saves"
        self.text = self.folder / "text.txt"
        self.text.write_text(TEXT)

    def arguments(self, steps, *more, ranks=2):
        return ["train", "--ranks", ranks, "--steps", steps, "--model", "gpt-nano", "--global-batch", "12", "--seq-len", "16", "--threads", "1",
                "--data", self.text, *more]

    def train(self, steps, *more, ranks=2, env=None):
        """Losses by step, and the final hash."""
        code, out, err = tool(*self.arguments(steps, *more, ranks=ranks), env=env)
        self.assertEqual(code, 0, err)
        lines = [line.split() for line in out.splitlines()]
        return {int(line[1]): line[3] for line in lines if line[0] == "step"}, lines[-1][-1]

    def wrong(self, *arguments, code=2):
        got, out, err = tool(*arguments)
        self.assertEqual(got, code, out + err)
        self.assertEqual(len(err.strip().splitlines()), 1, err)
        return err.strip()

    def whole_steps(self):
        return sorted(int(path.name[5:]) for path in self.saves.glob("step-*") if path.name[5:].isdigit())


class CheckpointTest(Folder):
    def test_resumed_run_equals_uninterrupted(self):
        losses, end = self.train(6, "--clip-norm", 1)
        self.train(4, "--clip-norm", 1, "--save", self.saves, "--save-every", 2)
        self.assertEqual(self.whole_steps(), [2, 4])
        for begin in ("", "step-00000002"):
            more, same_end = self.train(6, "--clip-norm", 1, "--resume", self.saves / begin)
            self.assertEqual(more, {step: losses[step] for step in more})
            self.assertEqual((len(more), same_end), (4 if begin else 2, end))
        # The control: without the checkpoint the run ends with another hash.
        self.assertNotEqual(self.train(2)[1], end)

    def test_other_ranks_and_strategies_resume(self):
        losses, _ = self.train(6)
        self.train(3, "--save", self.saves)
        for ranks, strategy in ((1, "ddp"), (3, "zero2"), (4, "hsdp")):
            more, _ = self.train(6, "--resume", self.saves, "--strategy", strategy, ranks=ranks)
            for step in (4, 5, 6):
                self.assertAlmostEqual(float(more[step]), float(losses[step]), places=4)

    def test_killed_run_resumes_from_last_complete_step(self):
        _, end = self.train(30)
        process = subprocess.Popen([TOOL, *map(str, self.arguments(30, "--save", self.saves, "--save-every", 1, "--resume", self.saves))],
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
        for line in process.stdout:
            if line.startswith("step 12 "):
                break
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        steps = self.whole_steps()
        self.assertGreaterEqual(steps[-1], 10)
        more, same_end = self.train(30, "--save", self.saves, "--resume", self.saves)
        self.assertEqual(same_end, end)
        self.assertEqual(min(more), steps[-1] + 1)

    def test_rejects_second_run_in_directory(self):
        first = subprocess.Popen([TOOL, *map(str, self.arguments(100000, "--save", self.saves, "--save-every", 1, "--keep-last", 2))],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            begin = time.monotonic()
            while not self.whole_steps() and time.monotonic() - begin < 30:
                time.sleep(0.05)
            error = self.wrong(*self.arguments(2, "--save", self.saves, ranks=3))
            self.assertRegex(error, f"{self.saves}: another run .process [0-9]+ on .* saves to this directory; use a different one$")
            self.assertIsNone(first.poll())
            self.train(1, "--save", self.folder / "another")
        finally:
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()
        self.train(2, "--save", self.saves)  # waits a moment for the killed ranks
        self.assertIn(2, self.whole_steps())

    def test_inspect_verify_and_export(self):
        _, end = self.train(3, "--save", self.saves)
        out = self.folder / "inspect.json"
        code, text, _ = tool("checkpoint", "inspect", self.saves, "--tensors", "--json", out)
        self.assertEqual(code, 0)
        self.assertIn("step 3, written by 2 ranks under fsdp", text)
        found = json.loads(out.read_text())
        self.assertEqual((found["step"], found["ranks"], found["parameters"], len(found["tensors"])), (3, 2, 120576, 28))
        self.assertEqual(tool("checkpoint", "verify", self.saves)[0], 0)
        self.assertEqual(tool("checkpoint", "export", self.saves, "-o", self.folder / "hf")[0], 0)
        code, text, err = tool("train", "--ranks", "1", "--steps", "0", "--init", self.folder / "hf")
        self.assertEqual((code, text.split()[-1]), (0, end), err)

    def test_a_checkpoint_is_no_place_for_results(self):
        self.train(2, "--save", self.saves)
        step = next(self.saves.glob("step-*"))
        before = sorted(file.name for file in step.iterdir())
        for done in (tool("checkpoint", "export", self.saves, "-o", step), tool("train", "--ranks", "1", "--save", step),
                     tool("train", "--ranks", "1", "--export", step)):
            self.assertEqual(done[0], 2)
            self.assertIn("is the checkpoint of a step", done[2])
        self.assertEqual(sorted(file.name for file in step.iterdir()), before)

    def test_parameters_of_an_earlier_sync_are_said(self):
        for strategy, steps, apart in (("diloco", 3, True), ("diloco", 4, False), ("fsdp", 3, False)):
            saves = self.folder / f"{strategy}-{steps}"
            code, _, err = tool("train", "--model", "gpt-nano", "--ranks", 2, "--steps", steps, "--data", self.text, "--global-batch", 4, "--seq-len", 16, "--strategy", strategy,
                                *(("--sync-every", 2) if strategy == "diloco" else ()), "--save", saves)
            self.assertEqual(code, 0, err)
            code, _, err = tool("checkpoint", "export", saves, "-o", self.folder / f"{strategy}-{steps}-hf")
            self.assertEqual((code, "the parameters are those of that sync, before step 3" in err), (0, apart), err)
            self.assertEqual("since they were synchronized" in tool("checkpoint", "inspect", saves)[1], apart)
            code, _, err = tool("train", "--model", "gpt-nano", "--ranks", 1, "--steps", steps, "--data", self.text, "--global-batch", 4, "--seq-len", 16, "--resume", saves)
            self.assertEqual((code, "from whose parameters they go on" in err), (0, apart), err)

    def test_names_damage_and_keeps_files(self):
        self.train(3, "--save", self.saves)
        data = self.saves / "step-00000003/rank-00001.safetensors"
        good = data.read_bytes()
        data.write_bytes(good[:70000] + bytes([good[70000] ^ 1]) + good[70001:])
        line = self.wrong("checkpoint", "verify", self.saves, code=1)
        self.assertIn("rank-00001.safetensors: damaged: block 1 (64 KiB from byte 65536) of '", line)
        code, _, err = tool(*self.arguments(6, "--resume", self.saves))
        self.assertEqual(code, 2)
        self.assertIn("rank-00001.safetensors: damaged: block 1", err.strip().splitlines()[-1])
        data.write_bytes(good)
        self.assertEqual(tool("checkpoint", "verify", self.saves)[0], 0)

    def test_invalid_options_are_one_line(self):
        self.train(3, "--save", self.saves)
        at = self.arguments(6)
        self.assertIn("no such directory", self.wrong(*at, "--resume", self.folder / "nowhere"))
        self.assertIn("contains no complete checkpoint", self.wrong(*at, "--resume", self.folder))
        self.assertIn("written with --seed 0, this run has 1", self.wrong(*at, "--resume", self.saves, "--seed", 1))
        self.assertIn("--data of tokens", self.wrong(*at[:-1], sys.argv[0], "--resume", self.saves))
        self.assertIn("leave --init out", self.wrong(*at, "--resume", self.saves, "--init", self.folder))
        self.assertIn("written with --optimizer adamw", self.wrong(*at, "--resume", self.saves, "--optimizer", "sgd"))
        self.assertIn("needs --save", self.wrong(*at, "--save-every", 2))
        self.assertIn("needs --save", self.wrong(*at, "--keep-last", 2))
        self.assertIn("--save: can't create", self.wrong(*at, "--save", self.text / "below"))
        self.assertIn("A subcommand is required", self.wrong("checkpoint"))
        self.assertIn("--keep-last", self.wrong("compare", "--keep-last", 2))

    def test_rejects_options_that_change_batches(self):
        self.train(3, "--save", self.saves)
        wide = self.folder / "wide.txt"  # the same tokens, of two bytes each
        wide.write_text("\0".join(TEXT) + "\0")
        for changes, said in (({"--seq-len": 15}, "--seq-len 16, this run has 15"), ({"--global-batch": 6}, "--global-batch 12, this run has 6"),
                              ({"--data": wide, "--data-format": "u16"}, "--data-format bytes, this run has u16")):
            options = self.arguments(6, "--data-format", "bytes", "--resume", self.saves)
            for option, value in changes.items():
                options[options.index(option) + 1] = value
            self.assertIn(f"written with {said}, so its batches would not be the next ones", self.wrong(*options))
            # A run without training steps needs no batches.
            options[options.index("--steps") + 1] = 3
            code, _, err = tool(*options)
            self.assertEqual(code, 0, err)

    def test_rejects_another_text_of_the_same_length(self):
        other, parts = self.folder / "other.txt", [self.folder / "p1", self.folder / "p2"]
        other.write_text(TEXT[:2000] + "X" + TEXT[2001:])
        parts[0].write_text(TEXT[:1000])
        parts[1].write_text(TEXT[1000:])
        self.train(3, "--save", self.saves)
        def resume(data):
            arguments = self.arguments(6, "--resume", self.saves)
            arguments[arguments.index("--data") + 1] = data
            return arguments
        for data in (other, f"{parts[1]},{parts[0]}"):
            self.assertIn("written with --data of XXH3 ", self.wrong(*resume(data)))
        for data in (self.text, f"{parts[0]},{parts[1]}"):  # the control: the same tokens
            code, _, err = tool(*resume(data))
            self.assertEqual(code, 0, err)

    def test_forgotten_options_are_those_of_the_checkpoint(self):
        options = ["--betas", "0.5,0.6", "--weight-decay", "5", "--clip-norm", "0.1", "--lr", "0.002", "--amsgrad", "--warmup", "3"]
        _, end = self.train(6, *options)
        self.train(4, *options, "--save", self.saves)
        code, out, err = tool(*self.arguments(6, "--resume", self.saves))
        self.assertEqual((code, out.split()[-1]), (0, end), err)
        self.assertEqual(err.count("\n"), 1, err)
        for option, value in zip(options[:8:2], options[1:8:2]):
            self.assertIn(f"{option} {value}", err)
        # The control: what is given counts, and a line says so.
        code, out, err = tool(*self.arguments(6, "--resume", self.saves, "--clip-norm", "0.2"))
        self.assertEqual(code, 0, err)
        self.assertNotEqual(out.split()[-1], end)
        self.assertIn("--clip-norm 0.2 instead of 0.1", err)
        # So do a restored optimizer and precision.
        sgd = ["--optimizer", "sgd", "--momentum", "0.9", "--precision", "bf16"]
        saves = self.folder / "sgd"
        _, end = self.train(6, *sgd)
        self.train(4, *sgd, "--save", saves)
        self.assertEqual(self.train(6, "--resume", saves)[1], end)

    def test_extended_cosine_is_said(self):
        cosine = ["--schedule", "cosine", "--warmup", "1"]
        self.train(4, *cosine, "--save", self.saves)
        code, out, err = tool(*self.arguments(8, *cosine, "--resume", self.saves))
        self.assertEqual(code, 0, err)
        self.assertIn("the cosine schedule now ends in step 8 instead of 4: the learning rate was 0 in step 4 and is 0.000389 in step 5", err)
        # The control: the same number of steps.
        whole = self.folder / "whole"
        self.train(8, *cosine, "--save", whole, "--save-every", 4)
        code, _, err = tool(*self.arguments(8, *cosine, "--resume", whole / "step-00000004"))
        self.assertEqual((code, err), (0, ""))

    def test_full_disk_fails_save_and_not_training(self):
        _, end = self.train(4)
        self.saves.mkdir()
        # One checkpoint of 1.4 MB fits, two don't.
        subprocess.run([*([] if os.geteuid() == 0 else ["sudo", "-n"]), "mount", "-t", "tmpfs", "-o", "size=2500k,mode=777", "tmpfs", self.saves], check=True)
        self.addCleanup(subprocess.run, [*([] if os.geteuid() == 0 else ["sudo", "-n"]), "umount", self.saves], check=True)
        code, out, err = tool(*self.arguments(4, "--save", self.saves, "--save-every", 2))
        self.assertEqual(out.split()[-1], end, "the training was another")
        self.assertEqual(code, 1)
        self.assertIn("No space left on device; training continues", err)
        self.assertIn("checkpoint of step 4 is not written: rank ", err.strip().splitlines()[-1])
        self.assertEqual(self.whole_steps(), [2])
        self.assertEqual(tool("checkpoint", "verify", self.saves)[0], 0)
        more, same_end = self.train(4, "--resume", self.saves)
        self.assertEqual((sorted(more), same_end), ([3, 4], end))
        # The failed checkpoint leaves no files that use space.
        self.assertEqual(sorted(path.name for path in self.saves.iterdir()), [".lock", "latest", "step-00000002"])


class FaultTest(Folder):
    """Each call that writes, renames, flushes or removes something is once the one with the fault."""

    def hit(self, rank, at, kind):
        count = self.folder / "count"
        count.unlink(missing_ok=True)
        # Each call is tested over one backend with a kill and over the other with a full disk.
        backend = ("shm", "tcp")[(at + (kind == "full")) % 2]
        env = {"TESSERA_BACKEND": backend, "LD_PRELOAD": FAULTS, "FAULT_FOLDER": str(self.saves), "FAULT_RANK": str(rank), "FAULT_AT": str(at), "FAULT_KIND": kind,
               "FAULT_COUNT": str(count), "TESSERA_TIMEOUT": "20s"}
        begin = time.monotonic()
        done = tool(*self.arguments(2, "--save", self.saves, "--save-every", 1, "--keep-last", 1, "--resume", self.saves), env=env)
        self.assertLess(time.monotonic() - begin, 15, "it hung")
        return done, int(count.read_text()) if count.exists() else None

    def data_of(self, step):
        return [path.read_bytes() for path in sorted(step.glob("*.safetensors"))]

    def check_every_call(self, rank, kind):
        before, after = self.folder / "before", self.folder / "after"
        self.train(1, "--save", before)
        _, end = self.train(2, "--save", after, "--save-every", 1)
        wanted = {step: self.data_of(after / f"step-0000000{step}") for step in (1, 2)}
        at = 0
        hits = 0
        while True:
            at += 1
            shutil.rmtree(self.saves, ignore_errors=True)
            shutil.copytree(before, self.saves)
            # The run resumes at step 1, saves step 2 and removes step 1.
            (code, out, err), count = self.hit(rank, at, kind)
            steps = self.whole_steps()
            self.assertTrue(steps, f"call {at}: nothing whole is left")
            verified, text, problem = tool("checkpoint", "verify", self.saves)
            self.assertEqual(verified, 0, f"call {at}: {problem}")
            step = int(text.split("step-")[1][:8])
            self.assertEqual(self.data_of(self.saves / f"step-{step:08}"), wanted[step], f"call {at}")
            if code == 2 and "--save: can't write" in err and not out:  # before training began
                continue
            if kind == "full":
                self.assertEqual(out.split()[-1:], [end], f"call {at}: the training was another: {err}")
            if kind == "kill" and code != 0:
                hits += 1
                continue
            if code != 0:
                last = err.strip().splitlines()[-1]
                self.assertRegex(last, "is not written|is complete, but 'latest'")
                self.assertEqual("complete" in last, step == 2 and "latest" in last, f"call {at}")
                hits += 1
                continue
            if count is not None and at > count:
                break
            hits += 1  # the fault came after the new checkpoint was complete
        self.assertGreater(hits, 8)
        # The control: a fault of a rank that does not exist has no effect.
        self.assertEqual(self.hit(7, 1, kind)[0][0], 0)

    def test_rank_0_is_killed_at_every_call(self):
        self.check_every_call(0, "kill")

    def test_rank_1_is_killed_at_every_call(self):
        self.check_every_call(1, "kill")

    def test_rank_0_has_full_disk_at_every_call(self):
        self.check_every_call(0, "full")

    def test_rank_1_has_full_disk_at_every_call(self):
        self.check_every_call(1, "full")


def all_at_once(case):
    """Runs each test of a case in a process of its own, since each mostly waits; returns 1 if one failed."""
    names = unittest.defaultTestLoader.getTestCaseNames(case)
    running = [subprocess.Popen([sys.executable, *sys.argv, f"{case.__name__}.{name}"]) for name in names]
    return int(any([process.wait() for process in running]))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].endswith(".so"):
        sys.exit(all_at_once(FaultTest))
    TOOL = sys.argv.pop(1)
    if len(sys.argv) > 1 and sys.argv[1].endswith(".so"):
        FAULTS = sys.argv.pop(1)
    sys.argv[1:] = sys.argv[1:] or ["CheckpointTest"]
    unittest.main()
