"""The tool's frame: help, exit codes, and one line for every mistake."""

import json
import os
import subprocess
import sys
import unittest

TOOL = None


def tool(*arguments, **options):
    options.setdefault("stdout", subprocess.PIPE)
    done = subprocess.run([TOOL, *arguments], text=True, stderr=subprocess.PIPE, timeout=30, **options)
    return done.returncode, done.stdout, done.stderr


class CommandLineTest(unittest.TestCase):
    def wrong(self, *arguments, **options):
        code, out, err = tool(*arguments, **options)
        self.assertEqual((code, out or "", err.count("\n")), (2, "", 1), (arguments, err))
        self.assertTrue(err.startswith("tessera: "), err)
        return err

    def test_mistakes_end_with_2_and_one_line_that_helps(self):
        self.assertIn("known: ", self.wrong())
        self.assertIn("'trian'", self.wrong("trian"))
        self.assertIn("see tessera run --help", self.wrong("run", "--rnaks", "3", "--", "true"))
        self.assertIn("--ranks", self.wrong("run", "-n", "0", "--", "true"))
        self.assertIn("--ranks", self.wrong("run", "-n", "many", "--", "true"))
        self.assertIn("--bind", self.wrong("run", "--bind", "sideways", "--", "true"))
        self.assertIn("write: tessera run", self.wrong("run"))
        self.assertIn("'/no/such'", self.wrong("run", "--", "/no/such"))
        self.assertIn("/proc/x", self.wrong("run", "--log-dir", "/proc/x", "--", "true"))
        self.assertIn("see tessera info --help", self.wrong("info", "--jsno"))
        self.assertIn("see tessera info --help", self.wrong("info", "extra"))

    def test_help_names_every_subcommand_and_each_explains_itself(self):
        code, out, err = tool("--help")
        self.assertEqual((code, err), (0, ""))
        known = self.wrong("nothing").split("known: ")[1].split(";")[0].split()
        self.assertGreaterEqual(set(known), {"info", "run"})
        for name in known:
            self.assertIn(name, out)
            code, text, err = tool(name, "--help")
            self.assertEqual((code, err), (0, ""))
            self.assertGreater(len(text.splitlines()), 4)

    def test_version(self):
        code, out, _ = tool("--version")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"^tessera \d+\.\d+\.\d+\n$")

    def test_info_json_has_the_documented_fields(self):
        code, out, _ = tool("info", "--json", env={**os.environ, "TESSERA_TOKEN": "my-secret"})
        self.assertEqual(code, 0)
        info = json.loads(out)
        self.assertEqual(set(info), {"version", "backends", "strategies", "collectives", "models", "env"})
        for variable in info["env"]:
            self.assertEqual(set(variable), {"name", "default", "value", "help"})
            self.assertRegex(variable["name"], "^TESSERA_[A-Z_]+$")
            self.assertTrue(variable["help"])
        names = [variable["name"] for variable in info["env"]]
        self.assertEqual(names, sorted(set(names)), "each variable is declared once")
        self.assertIn("TESSERA_RANK", names)
        self.assertNotIn("my-secret", out)

    def test_info_env_is_a_table(self):
        code, out, _ = tool("info", "--env", env={**os.environ, "TESSERA_RUN_ID": "seventeen"})
        self.assertEqual(code, 0)
        self.assertIn("seventeen", out)

    def test_output_that_cannot_be_written_is_a_failure(self):
        with open("/dev/full", "w") as full:
            code, _, err = tool("info", stdout=full)
        self.assertEqual((code, err), (1, "tessera: can't write standard output\n"))


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main(verbosity=2)
