"""The command line: help, exit codes, and one line for every mistake."""

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

    def test_invalid_usage_is_one_line_and_code_2(self):
        self.assertIn("known: ", self.wrong())
        self.assertIn("'trian'", self.wrong("trian"))
        self.assertIn("see tessera run --help", self.wrong("run", "--rnaks", "3", "--", "true"))
        self.assertIn("--ranks", self.wrong("run", "-n", "0", "--", "true"))
        self.assertIn("--ranks", self.wrong("run", "-n", "many", "--", "true"))
        self.assertIn("--bind", self.wrong("run", "--bind", "sideways", "--", "true"))
        self.assertIn("write: tessera run", self.wrong("run"))
        for program in (("./train",), ("-n", "2", "./train", "-n", "3"), ("./train", "--epochs", "3")):
            self.assertIn("write -- before the program; see tessera run --help", self.wrong("run", *program))
        self.assertNotIn("write --", self.wrong("run", "-n", "0", "--", "./train", "-n", "3"))
        self.assertIn("'/no/such'", self.wrong("run", "--", "/no/such"))
        self.assertIn("/proc/x", self.wrong("run", "--log-dir", "/proc/x", "--", "true"))
        self.assertIn("see tessera info --help", self.wrong("info", "--jsno"))
        self.assertIn("see tessera info --help", self.wrong("info", "extra"))
        trial = {**os.environ, "TESSERA_MATMUL": "try:/tmp/products.json"}
        self.assertIn("use --ranks 1", self.wrong("train", "--ranks", "2", "--data", __file__, env=trial))

    def test_help_lists_and_describes_subcommands(self):
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
        self.assertEqual(set(info), {"version", "backends", "devices", "strategies", "communicators", "collectives", "models", "env"})
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

    def test_warns_of_misspelled_variable(self):
        code, _, err = tool("info", env={**os.environ, "TESSERA_TIMOUT": "1s", "TESSERA_TIMEOUT": "1s"})
        self.assertEqual((code, err), (0, "tessera: warning: TESSERA_TIMOUT is not a variable of this program; see tessera info --env\n"))
        self.assertEqual(tool("info", env={**os.environ, "TESSERA_TIMEOUT": "1s"})[2], "")

    def test_info_lists_capabilities_of_libraries(self):
        info = json.loads(tool("info", "--json")[1])
        self.assertGreaterEqual({backend["name"] for backend in info["backends"]}, {"shm"})
        self.assertEqual(set(info["strategies"]), {"ddp", "zero1", "zero2", "fsdp", "hsdp", "shard_grad_op", "diloco", "local_sgd"})
        self.assertEqual(info["models"], ["gpt-nano", "gpt-mini", "gpt2", "gpt2-xl", "llama-nano", "llama-7b", "gpt-tall"])
        rows = {line.split()[0]: int(line.split()[1]) for line in tool("info", "--models")[1].splitlines()}
        self.assertEqual(rows, {"gpt-nano": 120576, "gpt-mini": 10844160, "gpt2": 124439808, "gpt2-xl": 1557611200,
                                "llama-nano": 123712, "llama-7b": 6738415616, "gpt-tall": 420480})

    def test_unusable_device_is_error_with_reason(self):
        devices = {d["name"]: d for d in json.loads(tool("info", "--json")[1])["devices"]}
        self.assertTrue(devices["cpu"]["available"] and devices["meta"]["available"])
        for command in ("train", "compare", "bench"):
            self.assertIn("known: cpu, meta, cuda", self.wrong(command, "--device", "abacus"))
            self.assertIn("shapes without data", self.wrong(command, "--device", "meta"))
            if not devices.get("cuda", {}).get("available"):
                reason = devices["cuda"]["reason"] if "cuda" in devices else "not part of this build"
                self.assertIn(reason, self.wrong(command, "--ranks", "1", "--device", "cuda"))

    def test_output_that_cannot_be_written_is_a_failure(self):
        with open("/dev/full", "w") as full:
            for arguments in (("info",), ("--help",), ("train", "--help"), ("--version",)):
                code, _, err = tool(*arguments, stdout=full)
                self.assertEqual((code, err), (1, "tessera: can't write standard output\n"), arguments)

    def test_a_value_is_given_once(self):
        text = ("--data", __file__, "--model", "gpt-nano")
        for command, option, value in ((("compare", *text), "--strategies", "ddp"), (("compare", *text), "--wraps", "block"),
                                       (("plan", "--model", "gpt-nano"), "--strategies", "fsdp"), (("train", *text, "--lora", "2"), "--lora-targets", "c_attn"),
                                       (("bench", "all_reduce"), "--op", "max"), (("plan", "--parameters", "1e6"), "--ranks", "4")):
            self.assertIn(f"{option}: '{value}' is given twice", self.wrong(*command, option, f"{value},{value}"))
        link = ("plan", "--model", "gpt-nano", "--link", "1us,1GB/s")
        self.assertIn("--slow-rank: 1 is given twice", self.wrong(*link, "--slow-rank", "1:2,1:3"))
        for arguments in ((*link, "--slow-rank", "1:2,2:2"), ("train", *text, "--ranks", "1", "--steps", "0", "--betas", "0.9,0.9")):  # the control
            self.assertEqual(tool(*arguments)[0], 0, arguments)

    def test_info_shows_one_thing(self):
        for pair in (("--words", "--json"), ("--words", "--models"), ("--units", "--env")):
            self.assertIn("excludes", self.wrong("info", *pair))
        units = ("info", "--units", "--model", "llama-nano", "--ranks", "3")
        found = json.loads(tool(*units, "--json")[1])
        rows = [line.split() for line in tool(*units)[1].splitlines()]
        self.assertEqual([[unit["unit"], str(unit["parameters"]), str(unit["padding"])] for unit in found["units"]],
                         [row[:3] for row in rows[1:] if len(row) == 4])
        self.assertIn(found["better_wrap"], rows[-1][1])
        self.assertEqual(tool(*units, "--precision", "fp8"), tool(*units, "--precision", "bf16"))

    def test_a_wrong_variable_is_refused_where_it_has_no_effect(self):
        train = ("train", "--ranks", "1", "--model", "gpt-nano", "--data", __file__, "--steps", "0")
        for name, value in (("TESSERA_ATTENTION", "foo"), ("TESSERA_LOCAL_RANK", "-1"), ("TESSERA_PLUGIN_PATH", "/none")):
            self.assertIn(name, self.wrong(*train, env={**os.environ, name: value}))
        self.assertEqual(tool(*train, env={**os.environ, "TESSERA_ATTENTION": "own", "TESSERA_LOCAL_RANK": "0", "TESSERA_RANK": "0", "TESSERA_WORLD_SIZE": "1"})[0], 0)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main(verbosity=2)
