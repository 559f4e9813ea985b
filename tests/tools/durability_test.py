"""State of a save after a crash: no file gets its name before it is on the disk, and a replaced step exists until the new
one does."""

import json
import os
import pathlib
import shutil
import sys
import unittest

import checkpoint_test
from checkpoint_test import tool

FAULTS = None  # the library to preload


def breaches(lines, saves):
    """Files that a crash of the machine could lose: each line is RANK CALL PATH [PATH], as faults.cpp writes them. A file's
    content is on the disk after an fsync of the file, a name after an fsync of its folder."""
    found = []
    dirty, unnamed, named = {}, {}, None  # written files; names in folders; the target of `latest`

    def pending(folder):
        """Content and names in a folder that are not on the disk."""
        return [one for one in (*dirty, *(name for names in unnamed.values() for name in names)) if folder in one.parents]

    def is_step(path):
        return path.parent == saves and path.name.startswith("step-") and path.name[5:].isdigit()

    for line in lines:
        _, call, *paths = line.split()
        path = pathlib.Path(paths[0])
        if ".lock" in path.name:
            continue
        if call in ("create", "mkdir"):
            unnamed.setdefault(path.parent, set()).add(path)
        elif call == "write":
            dirty[path] = True
        elif call == "fsync":
            dirty.pop(path, None)
            unnamed.pop(path, None)
        elif call == "remove" and not path.name.startswith("latest"):
            whole = [one for one in (path, *path.parents) if is_step(one)]
            if whole:
                found.append(f"{whole[0].name} is removed in its place")
        elif call == "rename":
            to = pathlib.Path(paths[1])
            if to.name == "latest":
                if left := [one for one in (*dirty, *(name for names in unnamed.values() for name in names)) if one != path]:
                    found.append(f"latest is written before {left[0]} is on the disk")
                if path in dirty:
                    found.append("latest has a name before its content is on the disk")
                named = to
            elif is_step(to):
                found += [f"{to.name} has its name before {one} is on the disk" for one in pending(path)]
            elif is_step(path) and not to.name.endswith(".old") and (named is None or named in unnamed.get(saves, set())):
                found.append(f"{path.name} goes before a newer one is on the disk")
            for one in [one for one in dirty if one == path or path in one.parents]:
                dirty[to / one.relative_to(path)] = dirty.pop(one)
            unnamed.setdefault(to.parent, set()).add(to)
            unnamed.get(path.parent, set()).discard(path)
            for folder in [one for one in unnamed if one == path or path in one.parents]:
                names = unnamed.pop(folder)
                unnamed[to / folder.relative_to(path)] = {to / name.relative_to(path) for name in names}
    found += [f"{one} is not on the disk at the end" for one in dirty]
    if named is None or named in unnamed.get(saves, set()):
        found.append("latest is not on the disk at the end")
    return found


class Faults(checkpoint_test.Folder):
    def train_with(self, *more, steps=2, rank=0, **faults):
        env = {"LD_PRELOAD": FAULTS, "FAULT_FOLDER": str(self.saves), "FAULT_RANK": str(rank), "TESSERA_TIMEOUT": "20s",
               **{f"FAULT_{name.upper()}": str(value) for name, value in faults.items()}}
        return tool(*self.arguments(steps, "--save", self.saves, "--save-every", 1, *more), env=env)


class OrderTest(Faults):
    def test_directory_entries_are_durable(self):
        log = self.folder / "log"
        # Two saves and the removal of a step; then the same two steps again, which replace one of them.
        for lr in ("1e-3", "2e-3"):
            log.unlink(missing_ok=True)
            code, _, err = self.train_with("--keep-last", 1, "--lr", lr, log=log)
            self.assertEqual(code, 0, err)
            lines = log.read_text().splitlines()
            self.assertEqual({line.split()[0] for line in lines}, {"0", "1"}, "not every rank has written")
            self.assertEqual(breaches(lines, self.saves), [])
        # The control: each flush is needed.
        flushes = [i for i, line in enumerate(lines) if line.split()[1] == "fsync"]
        self.assertGreaterEqual(len(flushes), 2 * (2 * 2 + 2 + 2))  # data and manifests of two ranks, index, latest, folders
        unneeded = [lines[i] for i in flushes if not breaches(lines[:i] + lines[i + 1:], self.saves)]
        # A step's folder is flushed with each manifest and once more: one of these flushes is enough.
        self.assertEqual({pathlib.Path(line.split()[2]).name for line in unneeded}, {"step-00000001.partial", "step-00000002.partial"})


class ReplacingTest(Faults):
    def test_killed_replacement_leaves_one_checkpoint(self):
        def data():
            return [path.read_bytes() for path in sorted(self.saves.glob("step-00000001*/*.safetensors"))]

        before = self.folder / "before"
        self.train(1, "--save", before)
        shutil.copytree(before, self.saves)
        old = data()
        count = self.folder / "count"
        self.assertEqual(self.train_with("--lr", "0.1", steps=1, count=count)[0], 0)
        new = data()
        self.assertEqual(len(new), 2, "a step that was replaced is still there")
        self.assertNotEqual(new, old)
        calls = int(count.read_text())
        left = []
        for at in range(1, calls + 1):
            shutil.rmtree(self.saves)
            shutil.copytree(before, self.saves)
            code, out, err = self.train_with("--lr", "0.1", steps=1, at=at, kind="kill")
            self.assertNotEqual(code, 0, f"call {at} of {calls}")
            code, text, problem = tool("checkpoint", "verify", self.saves)
            self.assertEqual(code, 0, f"call {at}: {problem}")
            newest = pathlib.Path(text.split(":")[0])
            found = [path.read_bytes() for path in sorted(newest.glob("*.safetensors"))]
            self.assertIn(found, (old, new), f"call {at}")
            left.append(found == new)
        self.assertEqual(left, sorted(left), "the old one came back")
        self.assertIn(False, left)
        self.assertIn(True, left)


class ExportTest(Faults):
    def export(self, steps, **faults):
        env = {"LD_PRELOAD": FAULTS, "FAULT_FOLDER": str(self.saves), "FAULT_RANK": "0", "TESSERA_RANK": "0",
               **{f"FAULT_{name.upper()}": str(value) for name, value in faults.items()}}
        return tool("checkpoint", "export", steps, "--output", self.saves, env=env)[0]

    def of_models(self):
        """The model type that config.json names, and that of the tensors; None: there is no config.json."""
        config, model = self.saves / "config.json", (self.saves / "model.safetensors").read_bytes()
        names = json.loads(model[8:8 + int.from_bytes(model[:8], "little")])
        return (json.loads(config.read_text())["model_type"] if config.exists() else None,
                "gpt2" if "wte.weight" in names else "llama")

    def test_a_killed_export_leaves_no_config_of_another_model(self):
        old, new, exported, count = (self.folder / name for name in ("old", "new", "exported", "count"))
        self.train(1, "--save", old)
        of_llama = ["llama-nano" if word == "gpt-nano" else word for word in self.arguments(1, "--save", new)]
        self.assertEqual(tool(*of_llama)[0], 0)
        self.assertEqual(self.export(old), 0)
        shutil.copytree(self.saves, exported)
        self.assertEqual(self.export(new, count=count), 0)
        self.assertEqual(self.of_models(), ("llama", "llama"))
        self.assertEqual(sorted(path.name for path in self.saves.iterdir()), ["config.json", "model.safetensors"])
        seen = set()
        for at in range(1, int(count.read_text()) + 1):
            shutil.rmtree(self.saves)
            shutil.copytree(exported, self.saves)
            self.assertNotEqual(self.export(new, at=at, kind="kill"), 0, f"call {at}")
            seen.add(self.of_models())
        self.assertEqual(seen, {("gpt2", "gpt2"), (None, "gpt2"), (None, "llama"), ("llama", "llama")})


class ShortTest(Faults):
    def test_short_writes_are_continued(self):
        whole = self.folder / "whole"
        self.train(2, "--save", whole, "--save-every", 1)
        for rank in (0, 1):
            shutil.rmtree(self.saves, ignore_errors=True)
            code, _, err = self.train_with(rank=rank, at=1, kind="short")
            self.assertEqual((code, err), (0, ""))
            self.assertEqual(tool("checkpoint", "verify", self.saves)[0], 0)
            for step in ("step-00000001", "step-00000002"):
                for path in (whole / step).iterdir():
                    self.assertEqual((self.saves / step / path.name).read_bytes(), path.read_bytes(), path.name)

    def test_a_file_that_cannot_be_closed_is_not_saved(self):
        for rank in (0, 1):
            shutil.rmtree(self.saves, ignore_errors=True)
            code, _, err = self.train_with(rank=rank, at=1, kind="close")
            self.assertEqual(code, 1)
            self.assertIn(f"rank {rank}: close of ", err)
            self.assertEqual(self.whole_steps(), [])


class RecoveryTest(Faults):
    def test_later_save_succeeds_after_failed_one(self):
        count = self.folder / "count"
        self.assertEqual(self.train_with(steps=1, count=count)[0], 0)
        shutil.rmtree(self.saves)
        code, _, err = self.train_with(at=int(count.read_text()) // 2, kind="once")
        self.assertEqual(code, 0, err)
        self.assertEqual(err.count("training continues"), 1, err)
        self.assertEqual(self.whole_steps(), [2])
        # The control: a save that fails at the end fails the run.
        shutil.rmtree(self.saves)
        code, _, err = self.train_with(steps=1, at=int(count.read_text()) // 2, kind="once")
        self.assertEqual(code, 1)
        self.assertIn("is not written", err.strip().splitlines()[-1])


if __name__ == "__main__":
    checkpoint_test.TOOL = sys.argv.pop(1)
    FAULTS = sys.argv.pop(1)
    unittest.main()
