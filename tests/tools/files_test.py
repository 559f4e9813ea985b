"""Unsuitable files: FIFOs, links, truncated shared objects, a file size limit. files_test.py TOOL LAB.so"""

import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import unittest

TOOL, LAB = None, None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60
SECONDS = 30  # a FIFO without a writer would block forever


class FilesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.text = self.folder / "text.txt"
        self.text.write_text(TEXT)
        self.fifo = self.folder / "fifo"
        os.mkfifo(self.fifo)

    def tool(self, *arguments, env=None, **options):
        done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=SECONDS,
                              env={**os.environ, **(env or {})}, **options)
        return done.returncode, done.stdout, done.stderr

    def train(self, *more, data=None, ranks=1, steps=1, **options):
        return self.tool("train", "--ranks", ranks, "--steps", steps, "--model", "gpt-nano", "--seq-len", 16, "--global-batch", 4,
                         "--data", data or self.text, *more, **options)

    def assert_one_line(self, ended, code, *words):
        got, out, err = ended
        self.assertEqual(got, code, out + err)
        self.assertEqual(len(err.splitlines()), 1, err)
        for word in words:
            self.assertIn(str(word), err)

    def test_same_command_accepts_valid_files(self):  # control of the tests below
        code, _, err = self.train("--strategy", f"{LAB}:hfsdp", "--save", self.folder / "saves")
        self.assertEqual(code, 0, err)
        code, _, err = self.train("--resume", self.folder / "saves", steps=2)
        self.assertEqual(code, 0, err)

    def test_rejects_fifo_wherever_file_is_read(self):
        shared = self.folder / "fifo.so"
        os.mkfifo(shared)
        for name in ("config.json", "model.safetensors"):
            os.mkfifo(self.folder / name)
        code, _, err = self.train("--save", self.folder / "saves", "--save-every", 1, steps=2)
        self.assertEqual(code, 0, err)
        first, last = sorted((self.folder / "saves").glob("step-*"))
        (last / "index.json").unlink()
        os.mkfifo(last / "index.json")
        data = next(first.glob("*.safetensors"))
        data.unlink()
        os.mkfifo(data)
        for ended in (self.train(data=self.fifo),
                      self.train("--eval", self.fifo),
                      self.tool("train", "--ranks", 1, "--model", self.folder / "config.json", "--data", self.text),
                      self.train("--strategy", f"{shared}:x"),
                      self.train("--backend", "tcp", env={"TESSERA_ALGO": f"@{self.fifo}"}, ranks=2),
                      self.train(env={"TESSERA_PLUGIN_PATH": str(shared)}, *("--backend", "fifo")),
                      self.tool("report", self.fifo, "-o", self.folder / "page.html"),
                      self.tool("checkpoint", "inspect", last),
                      self.tool("checkpoint", "verify", first)):
            self.assert_one_line(ended, 2, "not a regular file")

    def test_a_fifo_is_written_only_if_it_is_read(self):
        def bench(*more):
            return self.tool("bench", "all_reduce", "--ranks", 1, "--max-bytes", 8, *more)

        for run in (self.train, bench):
            self.assert_one_line(run("--json", self.fifo), 2, "--json", "a FIFO that no process reads")
            with subprocess.Popen(["cat", self.fifo], stdout=subprocess.PIPE, text=True) as reader:
                code, _, err = run("--json", self.fifo)
                self.assertEqual(code, 0, err)
                self.assertTrue(reader.communicate(timeout=SECONDS)[0].strip().endswith("}"))

    def test_a_checkpoint_that_is_a_fifo_is_not_resumed(self):
        self.train("--save", self.folder / "saves")
        index = next((self.folder / "saves").glob("step-*")) / "index.json"
        index.unlink()
        os.mkfifo(index)
        self.assert_one_line(self.train("--resume", self.folder / "saves"), 2, "not a regular file")

    def test_rejects_truncated_shared_object(self):
        whole = LAB.read_bytes()
        for part in (0.1, 0.5, 0.9, 0.999):
            cut = self.folder / "cut.so"
            cut.write_bytes(whole[:int(len(whole) * part)])
            self.assert_one_line(self.train("--strategy", f"{cut}:hfsdp"), 2, cut, "truncated")
            self.assert_one_line(self.train("--backend", "cut", env={"TESSERA_PLUGIN_PATH": str(cut)}), 2, "truncated")
        cut.write_bytes(b"not an object")
        self.assert_one_line(self.train("--strategy", f"{cut}:hfsdp"), 2, cut, "not a shared object")

    def test_the_lock_of_a_folder_is_no_link(self):
        saves = self.folder / "saves"
        saves.mkdir()
        victim = self.folder / "victim.txt"
        victim.write_text("what must stay")
        (saves / ".lock").symlink_to(victim)
        self.assert_one_line(self.train("--save", saves), 2, saves / ".lock", "not a regular file", "remove it")
        self.assertEqual(victim.read_text(), "what must stay")
        (saves / ".lock").unlink()
        os.mkfifo(saves / ".lock")
        self.assert_one_line(self.train("--save", saves), 2, "not a regular file")

    def test_a_limit_of_file_size_fails_the_save(self):
        def limited():
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        code, out, err = self.train("--save", self.folder / "saves", preexec_fn=limited)
        self.assertEqual(code, 1, err)
        for line in err.splitlines():
            self.assertRegex(line, r"^tessera: checkpoint of step 1 is not written: .*: File too large")
        self.assertIn("final parameters", out)
        self.assertEqual(list((self.folder / "saves").glob("step-*")), [])


if __name__ == "__main__":
    TOOL, LAB = sys.argv.pop(1), pathlib.Path(sys.argv.pop(1))
    unittest.main()
