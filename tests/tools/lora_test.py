"""Adapters (--lora) as a user trains, exports, imports and merges them."""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60


def tool(*arguments):
    done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=100, env=os.environ)
    return done.returncode, done.stdout, done.stderr


def tensors(path):
    """The f32 tensors of a safetensors file."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    values = data[8 + length:]
    return {name: (entry["shape"], struct.unpack(f"<{(entry['data_offsets'][1] - entry['data_offsets'][0]) // 4}f", values[slice(*entry["data_offsets"])]))
            for name, entry in header.items()}


class LoraTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.text = self.folder / "text.txt"
        self.text.write_text(TEXT)

    def run_tool(self, command, *arguments, ranks=2):
        common = ["--ranks", ranks, "--global-batch", "12", "--seq-len", "16", "--threads", "1", "--data", self.text]
        code, out, err = tool(command, *common, *arguments)
        self.assertEqual(code, 0, err)
        return out

    def eval_loss(self, *arguments, ranks=2):
        self.run_tool("train", *arguments, "--eval", self.text, "--json", self.folder / "j", ranks=ranks)
        lines = map(json.loads, (self.folder / "j").read_text().splitlines())
        return next(line["eval_loss"] for line in lines if "eval_loss" in line)

    def base(self, model="gpt-nano"):
        self.run_tool("train", "--model", model, "--steps", "3", "--export", self.folder / "base")
        return ["--init", self.folder / "base"]

    def test_an_adapter_is_trained_exported_read_back_and_merged(self):
        for model, prefix, layer, targets in (("gpt-nano", "base_model.model.transformer.", "h.0.attn.c_attn", ["c_attn"]),
                                              ("llama-nano", "base_model.model.", "model.layers.0.self_attn.q_proj", ["q_proj", "v_proj"])):
            init = self.base(model)
            adapter, merged = self.folder / "adapter", self.folder / "merged"
            loss = self.eval_loss(*init, "--lora", "4", "--lora-alpha", "16", "--lr", "1e-2", "--steps", "4", "--export-adapter", adapter, "--export", merged)
            self.assertLess(loss, self.eval_loss(*init, "--steps", "0"))
            config = json.loads((adapter / "adapter_config.json").read_text())
            self.assertEqual((config["peft_type"], config["r"], config["lora_alpha"], config["target_modules"], config["fan_in_fan_out"]),
                             ("LORA", 4, 16, targets, model == "gpt-nano"))
            factors = tensors(adapter / "adapter_model.safetensors")
            self.assertEqual(len(factors), 2 * 2 * len(targets))
            self.assertIn(f"{prefix}{layer}.lora_A.weight", factors)
            # Base and adapter equal the trained model bitwise, on other ranks up to rounding; so does the merged model.
            self.assertEqual(self.eval_loss(*init, "--init-adapter", adapter, "--steps", "0"), loss)
            self.assertAlmostEqual(self.eval_loss("--init", merged, "--steps", "0", ranks=3), loss, delta=1e-6)
            # W + alpha / r B A, and no other change.
            before, after = tensors(self.folder / "base" / "model.safetensors"), tensors(merged / "model.safetensors")
            self.assertEqual(before.keys(), after.keys())
            changed = {name for name in before if before[name] != after[name]}
            self.assertEqual(changed, {f"{name[len(prefix):-len('.lora_A.weight')]}.weight" for name in factors if ".lora_A." in name})
            (rank, width), a = factors[f"{prefix}{layer}.lora_A.weight"]
            (out, _), b = factors[f"{prefix}{layer}.lora_B.weight"]
            for i, o in ((0, 0), (3, out - 1), (width - 1, 5)):
                at = i * out + o if model == "gpt-nano" else o * width + i
                expected = before[f"{layer}.weight"][1][at] + 4 * sum(b[o * rank + r] * a[r * width + i] for r in range(rank))
                self.assertAlmostEqual(after[f"{layer}.weight"][1][at], expected, delta=1e-6)

    def test_checkpoints_keep_adapters_and_their_export_is_merged(self):
        init = self.base()
        saves, merged, again = self.folder / "saves", self.folder / "merged", self.folder / "again"
        lora = [*init, "--lora", "2", "--lora-targets", "c_attn,mlp.c_proj"]
        whole = self.run_tool("train", *lora, "--steps", "4").splitlines()[-1]
        self.run_tool("train", *lora, "--steps", "2", "--save", saves, "--export", merged)
        resumed = self.run_tool("train", "--resume", saves, "--steps", "4", "--strategy", "zero2").splitlines()[-1]
        self.assertEqual(resumed, whole)
        code, _, err = tool("checkpoint", "export", saves, "-o", again)
        self.assertEqual(code, 0, err)
        self.assertTrue(tensors(again / "model.safetensors") == tensors(merged / "model.safetensors"))
        self.assertFalse(tensors(again / "model.safetensors") == tensors(self.folder / "base" / "model.safetensors"))
        self.wrong("differs from --resume", "train", "--resume", saves, "--lora", "3", "--steps", "4", "--data", self.text)

    def test_a_model_in_four_bits_is_fine_tuned_saved_and_merged(self):
        init = self.base()
        saves, merged, again = self.folder / "saves", self.folder / "merged", self.folder / "again"
        options = [*init, "--lora", "4", "--quantize", "nf4", "--lr", "1e-2"]
        before = self.eval_loss(*options, "--steps", "0")
        self.assertAlmostEqual(before, self.eval_loss(*init, "--steps", "0"), delta=0.1)
        whole = self.eval_loss(*options, "--steps", "4", "--export", merged)
        self.assertLess(whole, before)
        self.run_tool("train", *options, "--steps", "2", "--save", saves)
        self.assertEqual(self.eval_loss("--resume", saves, "--steps", "4", "--lr", "1e-2", "--strategy", "zero2", "--save", saves), whole)
        self.assertAlmostEqual(self.eval_loss("--init", merged, "--steps", "0"), whole, delta=1e-5)
        code, _, err = tool("checkpoint", "export", saves, "-o", again)
        self.assertEqual(code, 0, err)
        self.assertTrue(tensors(again / "model.safetensors") == tensors(merged / "model.safetensors"))
        for hint, arguments in (("--quantize needs --init", ["--lora", "4", "--quantize", "nf4"]), ("train adapters with --lora", [*init, "--quantize", "nf4"])):
            self.wrong(hint, "train", "--model", "gpt-nano", "--data", self.text, *arguments)

    def test_predictions_take_a_model_in_four_bits(self):
        def parameter_bytes(command, *more):
            code, _, err = tool(*command, "--model", "gpt-nano", "--lora", "4", "--json", self.folder / "p", *more)
            self.assertEqual((code, err), (0, ""), command)
            return json.loads((self.folder / "p").read_text())

        plan = ("plan", "--cluster", "laptop", "--ranks", "2", "--strategies", "fsdp", "--seq-len", "16")
        few, all_bits = (parameter_bytes(plan, *more)["runs"][0]["model_state_bytes"]["parameter"] for more in (("--quantize", "nf4"), ()))
        self.assertLess(few, all_bits / 3)  # embeddings and norms stay as they are
        self.assertGreater(few, all_bits / 8)
        parameter_bytes(("explain", "--ranks", "2", "--seq-len", "16"), "--quantize", "nf4")
        parameter_bytes(("bench", "--of-step", "--ranks", "2", "--seq-len", "16", "--iterations", "2"), "--quantize", "nf4")

    def test_compare_counts_formula_bytes(self):
        self.run_tool("compare", *self.base(), "--lora", "4", "--quantize", "nf4", "--steps", "3", "--json", self.folder / "q")
        for run in json.loads((self.folder / "q").read_text())["runs"]:
            self.assertEqual(run["wire_bytes_per_step"], run["formula_bytes_per_step"], run["strategy"])
        self.run_tool("compare", "--model", "gpt-nano", "--lora", "4", "--clip-norm", "1", "--steps", "3", "--checkpoint-activations", "--json", self.folder / "c")
        comparison = json.loads((self.folder / "c").read_text())
        self.assertEqual(comparison["parameters"], 120576 + 2 * (4 * 64 + 4 * 192))
        self.assertEqual(len({run["final_parameters_hash"] for run in comparison["runs"]}), 1)
        for run in comparison["runs"]:
            self.assertEqual(run["wire_bytes_per_step"], run["formula_bytes_per_step"], run["strategy"])
            self.assertEqual(sum(unit["elements"] for unit in run["units"]), comparison["parameters"])
            self.assertLess(20 * run["model_state_bytes"]["optimizer"], 8 * comparison["parameters"])

    def wrong(self, hint, *arguments):
        code, _, err = tool(*arguments)
        self.assertEqual((code, err.count("\n")), (2, 1), err)
        self.assertIn(hint, err)

    def test_invalid_usage_is_one_line_and_code_2(self):
        init = self.base()
        adapter = self.folder / "adapter"
        self.run_tool("train", *init, "--lora", "4", "--steps", "0", "--export-adapter", adapter)
        for hint, arguments in (("--lora-alpha needs adapters", ["--lora-alpha", "4"]), ("--lora-targets needs adapters", ["--lora-targets", "c_attn"]),
                                ("--export-adapter needs adapters", ["--export-adapter", self.folder / "x"]),
                                ("'q_proj' matches no linear layer", ["--lora", "4", "--lora-targets", "q_proj"]),
                                ("--init-adapter needs --init", ["--init-adapter", adapter]),
                                ("--lora 5 differs from --init-adapter", [*init, "--init-adapter", adapter, "--lora", "5"]),
                                ("--lora-alpha 5 differs from", [*init, "--init-adapter", adapter, "--lora-alpha", "5"]),
                                ("--lora", ["--lora", "0"]), ("can't be read", [*init, "--init-adapter", self.folder / "nothing"])):
            self.wrong(hint, "train", "--model", "gpt-nano", "--data", self.text, *arguments)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
