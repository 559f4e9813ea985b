"""Files that others made, damaged or with intent: foreign_files_test.py TOOL. Each is refused in one line, in little time and memory."""

import ctypes
import ctypes.util
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60
CONFIG = dict(model_type="gpt2", vocab_size=256, n_layer=1, n_embd=64, n_head=2, n_positions=64, embd_pdrop=0, resid_pdrop=0, attn_pdrop=0)
MEMORY = 6 << 30  # of addresses, for one rank
DEEP = "[" * 300_000 + "]" * 300_000


class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


XXHASH = ctypes.CDLL(ctypes.util.find_library("xxhash"))
XXHASH.XXH3_128bits.restype = Hash128
XXHASH.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]


def hash_of(text):
    value = XXHASH.XXH3_128bits(text, len(text))
    return f"{value.high:016x}{value.low:016x}"


def compact(document):
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


class ForeignFilesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.scratch.name)
        cls.text = cls.root / "text.txt"
        cls.text.write_text(TEXT)
        (cls.root / "config.json").write_text(json.dumps(CONFIG))
        cls.options = ["--ranks", "1", "--threads", "1", "--seq-len", "16", "--global-batch", "2", "--data", str(cls.text)]
        made = [("--model", cls.root / "config.json", "--steps", "1", "--save", cls.root / "plain", "--export", cls.root / "model"),
                ("--init", cls.root / "model", "--steps", "1", "--lora", "4", "--save", cls.root / "lora", "--export-adapter", cls.root / "adapter"),
                ("--init", cls.root / "model", "--steps", "1", "--lora", "4", "--quantize", "nf4", "--save", cls.root / "nf4")]
        for more in made:
            subprocess.run([TOOL, "train", *cls.options, *map(str, more)], check=True, capture_output=True, timeout=60)

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def copy(self, name):
        return pathlib.Path(shutil.copytree(self.root / name, self.folder / name))

    def tool(self, *arguments, addresses=MEMORY, **options):
        def limit():
            if addresses:
                resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
        done = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, timeout=30, preexec_fn=limit, **options)
        done.stdout, done.stderr = done.stdout.decode(errors="surrogateescape"), done.stderr.decode(errors="surrogateescape")
        self.assertNotIn("\x1b", done.stdout + done.stderr)
        return done

    def train(self, *more, **options):
        return self.tool("train", *self.options, *more, **options)

    def accepts(self, done):
        self.assertEqual(done.returncode, 0, done.stderr)

    def refuses(self, done, *words):
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stdout + done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def export(self, name, index=None, manifest=None):
        """Exports a checkpoint whose files were changed, with hashes that fit."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        step = self.copy(name) / "step-00000001"
        file = step / "rank-00000.json"
        changed = json.loads(file.read_bytes())
        if manifest:
            manifest(changed)
        file.write_bytes(compact(changed))
        whole = json.loads((step / "index.json").read_bytes())
        whole["manifests"] = [hash_of(compact(changed))]
        del whole["xxh3"]
        if index:
            index(whole)
        whole["xxh3"] = hash_of(compact(whole))
        (step / "index.json").write_bytes(compact(whole))
        return self.tool("checkpoint", "export", step, "-o", self.folder / "export")

    def test_same_commands_accept_whole_files(self):  # control of the tests below
        for name in ("plain", "lora", "nf4"):
            self.accepts(self.export(name))
        self.accepts(self.train("--init", self.root / "model", "--steps", 0))
        self.accepts(self.train("--init", self.root / "model", "--init-adapter", self.root / "adapter", "--steps", 0))
        self.accepts(self.train("--resume", self.root / "nf4", "--steps", 1))

    def test_checkpoint_of_another_model_is_not_exported(self):
        def model(**fields):
            def change(index):
                index["attributes"]["model"] = json.dumps({**json.loads(index["attributes"]["model"]), **fields})
            return change
        for fields in ({"vocab_size": 20_000_000}, {"n_layer": 60_000}, {"n_layer": 2}, {"n_inner": 128}, {"vocab_size": 257}):
            self.refuses(self.export("plain", model(**fields)), "step-00000001: ")
            self.refuses(self.train("--resume", self.folder / "plain", "--steps", 2), "step-00000001: ")

    def test_adapters_that_fit_nothing_are_not_merged(self):
        def shaped(part, shape):
            """The values stay; there are as many."""
            def change(index):
                for tensor in index["tensors"]:
                    if part in tensor["name"]:
                        tensor["shape"] = shape
            return change
        for part, shape in (("lora_A", [64, 4]), ("lora_A", [256]), ("lora_A", [2, 128]), ("lora_A", [4, 8, 8]), ("lora_B", [4, 192]),
                            ("lora_B", [768, 1])):
            self.refuses(self.export("lora", shaped(part, shape)), "has shape", part)

        def config(**fields):
            def change(index):
                index["attributes"]["lora"] = json.dumps({**json.loads(index["attributes"]["lora"]), **fields})
            return change
        for fields, words in (({"r": 5}, "has shape"), ({"r": 2 ** 62}, "'r' is"), ({"r": 2 ** 54}, "'r' is"), ({"r": 0}, "'r' is"),
                              ({"target_modules": ["c_proj"]}, "does not match")):
            self.refuses(self.export("lora", config(**fields)), words)
        self.refuses(self.export("nf4", lambda index: index["attributes"].pop("quantize")), "has shape")
        self.refuses(self.export("plain", lambda index: index["attributes"].update(quantize="nf4")), "has shape")

    def test_buffer_with_the_name_of_a_parameter_is_not_exported(self):
        def drop(index):
            index["tensors"] = [t for t in index["tensors"] if t["name"] != "wte.weight"]
            index["buffers"] = [{"name": "wte.weight", "shape": [1], "dtype": "f32"}]

        def rename(manifest):
            manifest["pieces"] = [p for p in manifest["pieces"] if p[0] != "wte.weight"] + [["wte.weight", -3, 0, 1, "f32", 0]]
        self.refuses(self.export("plain", drop, rename), "it lacks 'wte.weight'")

    def test_memory_is_taken_after_the_comparison(self):
        model = self.copy("model")
        for fields in ({"vocab_size": 20_000_000}, {"vocab_size": 2 ** 31 - 1}, {"n_positions": 2 ** 30}, {"n_inner": 2 ** 30}, {"n_layer": 65536},
                       {"vocab_size": 2 ** 62}, {"n_embd": 2 ** 30, "n_head": 1}):
            (model / "config.json").write_text(json.dumps({**CONFIG, **fields}))
            self.refuses(self.train("--init", model, "--steps", 0, "--seq-len", 16))
        adapter = self.copy("adapter")
        config = json.loads((adapter / "adapter_config.json").read_text())
        for rank in (1_000_000, 2 ** 20 + 1, 2 ** 54, 2 ** 62, 2 ** 63, 1.5, -1):
            (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": rank}))
            self.refuses(self.train("--init", self.root / "model", "--init-adapter", adapter, "--steps", 0))

    def test_deep_json_is_refused(self):
        step = self.copy("plain") / "step-00000001"
        index = (step / "index.json").read_text().rstrip()
        (step / "index.json").write_text(index[:-1] + ',"z":' + DEEP + "}")
        for more in (("checkpoint", "inspect", step), ("checkpoint", "verify", step), ("checkpoint", "export", step, "-o", self.folder / "x"),
                     ("train", *self.options, "--resume", step, "--steps", 2)):
            self.refuses(self.tool(*more), "index.json: is nested more than 64 deep")
        model = self.copy("model")
        (model / "config.json").write_text('{"z":' + DEEP + "}")
        self.refuses(self.train("--init", model, "--steps", 0), "is nested")
        for name in ("rows.json", "lines.json"):
            row = self.folder / name
            row.write_text(('[{"id":"s","z":' if name == "rows.json" else '{"id":"s","z":') + DEEP + ("}]" if name == "rows.json" else "}"))
            self.refuses(self.tool("plan", "--cluster", row, "--model", "gpt-nano"), "is nested")
            self.refuses(self.tool("report", row, "-o", self.folder / "x.html"), "is nested")

    def test_control_characters_do_not_reach_the_terminal(self):
        def change(index):
            index["strategy"] = "fsdp\x1b]0;title\x07"
            index["attributes"].update(note="\x1b[31mred", **{"\x1b[2J": "x", "optimizer": "\x1b[1m"})
        done = self.export("plain", change)
        self.accepts(done)
        step = self.folder / "plain" / "step-00000001"
        done = self.tool("checkpoint", "inspect", step, "--tensors")
        self.accepts(done)
        self.assertIn(r"\x1b[31mred", done.stdout)
        self.refuses(self.train("--resume", step, "--steps", 2), r"\x1b[1m")
        for field in ("model_type", "activation_function"):
            (self.folder / "config.json").write_text(json.dumps({**CONFIG, field: "\x1b[2Jgpt2"}))
            self.refuses(self.tool("plan", "--model", self.folder / "config.json", "--ranks", 2), r"\x1b[2J")
        cluster = self.folder / "cluster.json"
        cluster.write_text(json.dumps({"name": "\x1b[2J", "ranks_per_host": 1, "\x1b[3J": 1}))
        self.refuses(self.tool("plan", "--cluster", cluster, "--model", "gpt-nano"))
        self.refuses(self.tool("plan", "--cluster", "\x1b[2J\x9b", "--model", "gpt-nano"), r"\x1b[2J")

    def record(self, name):
        folder = self.folder / name
        self.accepts(self.train("--model", "gpt-nano", "--steps", 1, "--flight-recorder", folder))
        return folder

    def test_a_first_cause_that_is_no_file_is_refused(self):
        folder = self.record("records")
        cause = folder / "first-cause.txt"
        cause.write_text("rank 0 \x1b[31mfailed\n")
        done = self.tool("report", "--postmortem", folder)
        self.accepts(done)
        self.assertIn(r"rank 0 \x1b[31mfailed", done.stdout)  # negative control: a file is read
        for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink(self.text, path),
                     lambda path: path.write_text("x" * (2 << 20))):
            cause.rmdir() if cause.is_dir() else cause.unlink()
            make(cause)
            self.refuses(self.tool("report", "--postmortem", folder), "first-cause.txt': ")

    def test_new_files_follow_no_link(self):
        """The names of temporary files hold the number of the process, which others can foresee."""
        target = self.folder / "target"  # which does not exist

        def linked(*paths):
            """As the process that becomes the tool, links where it will write."""
            def make():
                for path in paths:
                    for number in ("", "-0"):
                        os.symlink(target, f"{path}.partial-{os.getpid()}{number}")
            return make
        records = self.folder / "records"
        records.mkdir()
        options = [TOOL, "train", *self.options, "--model", "gpt-nano", "--steps", "1", "--flight-recorder", records, "--json", self.folder / "out.json"]
        done = subprocess.run(list(map(str, options)), capture_output=True, timeout=30, text=True,
                              preexec_fn=linked(records / "rank-0.flight", self.folder / "out.json"))
        self.accepts(done)
        self.assertFalse(target.exists())
        self.assertFalse((records / "rank-0.flight").is_symlink())
        self.assertGreater((records / "rank-0.flight").stat().st_size, 1000)  # negative control: it was written

    def test_two_ranks_start_under_a_limit_of_addresses(self):
        for ranks in (2, 4):
            options = ["--backend", "shm", "--ranks", ranks, "--threads", 1, "--global-batch", ranks, "--seq-len", 16, "--data", self.text,
                       "--model", "gpt-nano", "--steps", 1]
            self.accepts(self.tool("train", *options, addresses=12 << 30))


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
