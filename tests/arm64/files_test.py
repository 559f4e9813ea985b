"""Files that one processor writes and the other reads: checkpoints, exported models, adapters."""

import hashlib
import pathlib

import hosts
from hosts import ARM64, NATIVE


def contents(folder):
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()}


class FilesTest(hosts.Case):
    def saved_by(self, tool, *arguments):
        folder = pathlib.Path(self.path(f"saved-{'arm64' if tool is ARM64 else 'native'}"))
        self.train([tool], "--save", folder, *arguments)
        return folder

    def test_checkpoints_are_read_by_the_other(self):
        for tool, reader in ((NATIVE, ARM64), (ARM64, NATIVE)):
            folder = self.saved_by(tool, "--optimizer", "adamw", "--precision", "bf16")
            self.run_on(reader, "checkpoint", "verify", folder)
            inspected = [self.run_on(one, "checkpoint", "inspect", folder) for one in (tool, reader)]
            self.assertEqual(inspected[0], inspected[1])
            exported = []
            for number, one in enumerate((tool, reader)):
                out = pathlib.Path(self.path(f"exported-{number}-{folder.name}"))
                self.run_on(one, "checkpoint", "export", folder, "-o", out)
                exported.append(contents(out))
            self.assertEqual(exported[0], exported[1])
            # No further step, so that no product is computed: the state alone.
            hashes = [self.train([one], "--resume", folder, "--precision", "bf16")[1] for one in (tool, reader)]
            self.assertEqual(hashes[0], hashes[1])

    def test_initial_models_are_equal(self):
        # Random numbers, their conversion, and the file's format.
        folders = [pathlib.Path(self.path(name)) for name in ("native", "arm64")]
        for tool, folder in zip((NATIVE, ARM64), folders):
            for model in ("gpt-nano", "llama-nano"):
                self.run_on(tool, "train", "--ranks", 1, "--model", model, "--steps", 0, "--data", self.text, "--export", folder / model)
        self.assertEqual(contents(folders[0]), contents(folders[1]))
        self.assertGreater(len(contents(folders[0])), 3)

    def test_plans_are_equal(self):
        # Nothing is computed with data: formulas, simulated times, and how numbers are printed.
        for arguments in (("plan", "--parameters", "7.5e9", "--ranks", 64),
                          ("plan", "--model", "gpt2", "--global-batch", 16, "--ranks", 16, "--strategies", "ddp,fsdp", "--cluster", "h100-400g"),
                          ("info", "--models")):
            self.assertEqual(self.run_on(NATIVE, *arguments), self.run_on(ARM64, *arguments), arguments)

    def test_variables_are_equal(self):
        lists = [[line.split() for line in self.run_on(tool, "info", "--env").splitlines() if not line.startswith("TESSERA_NCCL_")] for tool in (NATIVE, ARM64)]
        self.assertEqual(*lists)  # backends without a module for arm64 have variables, too


hosts.main()
