#!/usr/bin/env python3
"""Random models and adapters: the tool reads them as transformers and PEFT do, or refuses them by the field.

    fuzz_models.py TOOL [--cases N] [--seed S] [--keep DIR]

By hand, with PyTorch, transformers and peft. A case is a tiny random model, whose config.json, names and files were then
changed by a grammar of what other programs write, and in half of the cases an adapter. Transformers opens the directory, PEFT
the adapter; the tool's loss over the same tokens must be theirs to 2e-4. As good is a refusal: exit code 2 and one line that
has one of the fields (or tensors) which the case made unusual. Where transformers refuses, so must the tool.
--keep DIR: cases that fail stay there, each with a file `why`.
"""
import argparse
import collections
import json
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import warnings

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

VOCABULARY, LENGTH, WINDOWS = 320, 32, 4
TOLERANCE = 2e-4


class Case:
    """What was chosen. `unusual`: fields and tensors that a refusal may name."""

    def __init__(self, rng):
        self.rng, self.unusual, self.story = rng, set(), []

    def maybe(self, chance, field, *values):
        """Returns one of the values, or None, and remembers the field."""
        if self.rng.random() >= chance:
            return None
        value = self.rng.choice(values)
        self.note(field, value)
        return value

    def note(self, field, value):
        self.unusual.add(field)
        self.story.append(f"{field}={value!r}")


def base_config(case):
    """A usual config of one of the types, as the keyword arguments of its class."""
    rng = case.rng
    kind = rng.choice(["gpt2", "llama", "llama", "mistral", "qwen2"])
    heads, width = 4, 32
    if kind == "gpt2":
        return kind, dict(n_embd=width, n_layer=2, n_head=heads, n_positions=64, vocab_size=VOCABULARY)
    return kind, dict(hidden_size=width, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=64,
                      max_position_embeddings=64, vocab_size=VOCABULARY, num_key_value_heads=rng.choice([1, 2, 4]))


def choose_gpt2(case, fields):
    for field, chance, *values in [
            ("activation_function", .3, "gelu", "relu", "gelu_pytorch_tanh", "gelu_fast", "silu", "gelu_new", "tanh", "quick_gelu"),
            ("layer_norm_epsilon", .2, 1e-3, 1e-6), ("n_inner", .2, 48, 100), ("scale_attn_weights", .15, False, True),
            ("scale_attn_by_inverse_layer_idx", .1, True, False), ("reorder_and_upcast_attn", .1, True, False),
            ("tie_word_embeddings", .2, False, True), ("add_cross_attention", .05, True), ("attn_pdrop", .1, 0.0, 0.1),
            ("resid_pdrop", .1, 0.0), ("embd_pdrop", .1, 0.0), ("summary_type", .05, "mean"), ("is_decoder", .05, True)]:
        if (value := case.maybe(chance, field, *values)) is not None:
            fields[field] = value


def choose_llama(case, kind, fields):
    for field, chance, *values in [
            ("hidden_act", .2, "gelu", "relu", "gelu_pytorch_tanh", "silu", "swish", "gelu_new"), ("rms_norm_eps", .2, 1e-3, 1e-5),
            ("tie_word_embeddings", .25, True, False), ("attention_dropout", .1, 0.0, 0.1), ("initializer_range", .1, 0.02)]:
        if (value := case.maybe(chance, field, *values)) is not None:
            fields[field] = value
    if kind == "llama":
        for field, chance, *values in [("attention_bias", .2, True, False), ("mlp_bias", .2, True, False),
                                       ("pretraining_tp", .1, 1, 2)]:
            if (value := case.maybe(chance, field, *values)) is not None:
                fields[field] = value
    if kind in ("llama", "mistral") and (value := case.maybe(.2, "head_dim", 4, 16, 8)) is not None:
        fields["head_dim"] = value
    if kind in ("mistral", "qwen2") and (value := case.maybe(.3, "sliding_window", 8, 64, 4096)) is not None:
        fields["sliding_window"] = value
    if kind == "qwen2":
        if (value := case.maybe(.3, "use_sliding_window", True, False)) is not None:
            fields["use_sliding_window"] = value
        if (value := case.maybe(.2, "max_window_layers", 0, 1, 28)) is not None:
            fields["max_window_layers"] = value


def rope_of(case):
    rng = case.rng
    kind = rng.choice(["default", "linear", "llama3", "dynamic", "yarn", "proportional", "longrope"])
    rope = {rng.choice(["rope_type", "type"]): kind}
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        rope["factor"] = rng.choice([2.0, 4, 8.0])
    if kind == "llama3":
        rope.update(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=rng.choice([32, 16]))
    if kind == "yarn" and rng.random() < .5:
        rope["original_max_position_embeddings"] = 32
    if rng.random() < .2:
        rope["attention_factor"] = 1.5
    return kind, rope


def edit_config(case, kind, config):
    """Changes the written config.json as other programs write it."""
    rng = case.rng
    if kind != "gpt2":
        where = rng.choice(["as it is", "outside", "scaling", "parameters", "both"])
        theta = rng.choice([10000.0, 500000.0, 1000, 100.0])
        if where != "as it is":
            config.pop("rope_parameters", None)
            config.pop("rope_scaling", None)
            name, rope = rope_of(case)
            for field in ("rope_theta", "rope_type", "type", "rope_scaling", "rope_parameters", "attention_factor", "partial_rotary_factor"):
                case.unusual.add(field)
            case.story.append(f"rope {where} {rope} theta {theta}")
            if where == "outside":
                config["rope_theta"] = theta
                if rng.random() < .3:
                    config["rope_scaling"] = None
            elif where == "both":
                config["rope_theta"], config["rope_scaling"] = theta, rope
            elif rng.random() < .7:
                config["rope_" + where] = {**rope, "rope_theta": theta}
            else:
                config["rope_" + where] = rope
            if rng.random() < .1:
                (config if rng.random() < .5 else config.get("rope_parameters") or config)["partial_rotary_factor"] = rng.choice([.5, 1.0])
                case.story.append("partial_rotary_factor")
        if (value := case.maybe(.1, "num_key_value_heads", None, "absent")) is not None:
            config.pop("num_key_value_heads", None)  # then it is that of the class
        if (value := case.maybe(.1, "head_dim", "null", "absent")) is not None:
            config.pop("head_dim", None)
            if value == "null":
                config["head_dim"] = None
    else:
        for old, new in [("n_embd", "hidden_size"), ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"),
                         ("n_positions", "max_position_embeddings")]:
            if rng.random() < .15:
                case.note(new, config[old])
                config[new] = config.pop(old) if rng.random() < .6 else config[old]
                case.unusual.add(old)
        if (value := case.maybe(.1, "n_ctx", 64, 32)) is not None:
            config["n_ctx"] = value
    for field, chance, *values in [
            ("torch_dtype", .2, "bfloat16", "float16", "float32"), ("use_cache", .1, False), ("architectures", .1, None, []),
            ("_name_or_path", .1, "x/y"), ("task_specific_params", .1, {"a": 1}), ("quantization_config", .03, {"quant_method": "gptq", "bits": 4}),
            ("rope_interleaved", .03, True), ("num_experts", .03, 4), ("output_hidden_states", .05, True), ("eos_token_id", .2, [1, 2], 7, None),
            ("pruned_heads", .05, {}, {"0": [1]}), ("is_encoder_decoder", .03, False), ("tie_encoder_decoder", .03, False),
            ("layer_types", .05, ["full_attention", "full_attention"], ["sliding_attention", "full_attention"]),
            ("bias", .03, True), ("logit_scale", .03, 0.5), ("final_logit_softcapping", .03, 30.0), ("chunk_size_feed_forward", .03, 0)]:
        if (value := case.maybe(chance, field, *values)) is not None:
            config[field] = value
    if rng.random() < .25:  # a value that no program should write, or another spelling of a usual one
        field = rng.choice(sorted(config))
        value = rng.choice([None, -1, 0, "8", 1.5, float(config[field]) if type(config[field]) is int else "x", 10**20, [], {}, True, "absent"])
        case.note(field, value)
        config.pop(field) if value == "absent" else config.update({field: value})
    if rng.random() < .1:
        config.pop("architectures", None)
    if (value := case.maybe(.05, "tie_word_embeddings", "absent")) is not None:
        config.pop("tie_word_embeddings", None)


def edit_weights(case, kind, folder, tensors):
    """Writes the weights in one file or several, with the names and dtypes that are met."""
    rng = case.rng
    prefix = "transformer." if kind == "gpt2" else "model."
    shape = rng.choice(["one", "one", "shards", "bare"])
    if shape == "bare":
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
        case.story.append("names without prefix")
    if (dtype := case.maybe(.25, "dtype of tensors", torch.bfloat16, torch.float16)) is not None:
        tensors = {name: value.to(dtype) for name, value in tensors.items()}
    before = "" if shape == "bare" else prefix
    if kind == "gpt2" and rng.random() < .3:
        tensors[before + "h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
        tensors[before + "h.1.attn.masked_bias"] = torch.tensor(-1e4)
    if kind != "gpt2" and rng.random() < .2:
        tensors[before + "layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(4.0)
    if rng.random() < .08:
        tensors["extra.weight"] = torch.randn(3)
        case.note("extra.weight", "a tensor that the model lacks")
    if rng.random() < .06:
        name = rng.choice(sorted(tensors))
        tensors.pop(name)
        case.note(name, "missing")
    if rng.random() < .05:
        name = rng.choice(sorted(tensors))
        tensors[name] = torch.randn([n + 1 for n in tensors[name].shape] or [1])
        case.note(name, "another shape")
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    if shape != "shards":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"} if rng.random() < .7 else None)
        return
    case.story.append("shards")
    parts, where = [{}, {}, {}], {}
    for name, value in tensors.items():
        part = rng.randrange(3)
        parts[part][name] = value
        where[name] = f"model-{part + 1:05}-of-00003.safetensors"
    for part, held in enumerate(parts):
        save_file(held, folder / f"model-{part + 1:05}-of-00003.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_adapter(case, kind, folder, model):
    """An adapter of PEFT with random factors, by a grammar of LoraConfig's fields."""
    rng = case.rng
    linear = ["c_attn", "c_proj", "c_fc"] if kind == "gpt2" else ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    fields = dict(r=rng.choice([1, 2, 4]), lora_alpha=rng.choice([1, 4, 7]), task_type="CAUSAL_LM")
    fields["target_modules"] = rng.choice([rng.sample(linear, rng.randint(1, len(linear))), rng.sample(linear, 1), "all-linear",
                                           ".*" + rng.choice(linear), r".*\.1\..*" + rng.choice(linear), None,
                                           ["lm_head"], ["wte" if kind == "gpt2" else "embed_tokens"]])
    case.note("target_modules", fields["target_modules"])
    for field, chance, *values in [
            ("use_rslora", .2, True), ("use_dora", .12, True), ("bias", .12, "all", "lora_only"), ("lora_bias", .08, True),
            ("rank_pattern", .12, {linear[0]: 3}, {"^.*0.*" + linear[0]: 2}), ("alpha_pattern", .12, {linear[0]: 3}, {linear[-1]: 9}),
            ("modules_to_save", .1, ["lm_head"], ["ln_f" if kind == "gpt2" else "norm"]), ("layers_to_transform", .12, [0], 1, [0, 1]),
            ("exclude_modules", .1, [linear[0]], ".*0.*"), ("lora_dropout", .2, 0.1), ("fan_in_fan_out", .15, True),
            ("init_lora_weights", .2, "gaussian", "pissa", "olora", False, "orthogonal"),
            ("trainable_token_indices", .05, [1, 2]), ("layer_replication", .05, [[0, 2], [0, 1]])]:
        if (value := case.maybe(chance, field, *values)) is not None:
            fields[field] = value
    if "layers_to_transform" in fields and rng.random() < .5:
        fields["layers_pattern"] = "h" if kind == "gpt2" else "layers"
        case.unusual.add("layers_pattern")
    made = peft.get_peft_model(model, peft.LoraConfig(**fields))
    torch.manual_seed(rng.randrange(1 << 30))
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                value.copy_(torch.randn(value.shape) * .2)
            elif value.requires_grad and "magnitude" not in name:
                value.add_(torch.randn(value.shape) * .1)
    made.save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for field, chance, *values in [("revision", .1, "main"), ("inference_mode", .1, False), ("peft_type", .03, "IA3", "LOHA"),
                                   ("some_new_field", .05, True), ("megatron_config", .03, {"a": 1}), ("r", .03, 0, -1, 3), ("auto_mapping", .05, {})]:
        if (value := case.maybe(chance, field, *values)) is not None:
            config[field] = value
    for field in ("corda_config", "eva_config", "use_qalora", "alora_invocation_tokens"):
        if rng.random() < .1:
            config.pop(field, None)
    path.write_text(json.dumps(config))
    for name in load_file(folder / "adapter_model.safetensors"):
        case.unusual.add(name)


def loss_of(model, tokens):
    model.eval()
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def make(case, folder):
    """Writes the case and returns what transformers and PEFT say: a loss, or their error."""
    rng = case.rng
    kind, fields = base_config(case)
    choose_gpt2(case, fields) if kind == "gpt2" else choose_llama(case, kind, fields)
    case.story.insert(0, kind)
    torch.manual_seed(rng.randrange(1 << 30))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **fields), attn_implementation="eager")
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape) * .15)
    base = folder / "model"
    model.save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    path = base / "config.json"
    config = json.loads(path.read_text())
    edit_config(case, kind, config)
    path.write_text(json.dumps(config))
    edit_weights(case, kind, base, tensors)
    # Windows as the tool takes them: LENGTH inputs, and the token after each as its target.
    tokens = torch.randint(0, VOCABULARY, (LENGTH * WINDOWS + 1,), generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    (folder / "eval.u16").write_bytes(tokens.numpy().astype("<u2").tobytes())
    rows = torch.stack([tokens[i * LENGTH:(i + 1) * LENGTH + 1] for i in range(WINDOWS)])
    try:
        read, report = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        missing = report["missing_keys"] or report["mismatched_keys"]
        if missing:
            return f"transformers: missing or mismatched {missing}"
    except Exception as error:  # noqa: BLE001
        return f"transformers: {error}"
    if rng.random() < .5:
        try:
            write_adapter(case, kind, folder / "adapter", read)
        except Exception as error:  # noqa: BLE001
            shutil.rmtree(folder / "adapter", ignore_errors=True)
            case.story.append(f"no adapter: {str(error)[:80]}")
        read = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        if (folder / "adapter").exists():
            try:
                read = peft.PeftModel.from_pretrained(read, folder / "adapter")
            except Exception as error:  # noqa: BLE001
                return f"peft: {error}"
    return loss_of(read, rows)


def verdict(case, folder, tool, expected):
    """What the tool did, and whether that is right."""
    command = [tool, "train", "--init", "model", *(["--init-adapter", "adapter"] if (folder / "adapter").exists() else []), "--steps", "0",
               "--eval", "eval.u16", "--data-format", "u16", "--seq-len", str(LENGTH), "--ranks", "1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        loss = float(re.search(r"eval loss (\S+)", done.stdout)[1])
        if isinstance(expected, str):
            return "accepted", f"the tool says {loss}; {expected[:300]}"
        return ("equal", "") if abs(loss - expected) <= TOLERANCE else ("WRONG", f"the tool says {loss}, transformers {expected:.6f}")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    error = lines[-1] if lines else ""  # after remarks on what transformers 4 would do
    if done.returncode != 2 or not error.startswith("tessera: "):
        return "UNCLEAR", f"exit code {done.returncode}: {done.stderr[-500:]}"
    named = any(field in error for field in case.unusual)
    if isinstance(expected, str):
        return "both refuse", error
    return ("refused" if named else "UNNAMED"), error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", type=pathlib.Path)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=pathlib.Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    counts, refusals = collections.Counter(), collections.Counter()
    for number in range(options.cases):
        case = Case(random.Random(options.seed * 1_000_003 + number))
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            try:
                expected = make(case, folder)
            except Exception as error:  # noqa: BLE001
                counts["no case"] += 1
                print(f"{number}: no case: {str(error)[:150]}")
                continue
            outcome, detail = verdict(case, folder, options.tool.resolve(), expected)
            counts[outcome] += 1
            if outcome == "refused":
                refusals[re.sub(r"\d+", "N", detail)[-110:]] += 1
            if outcome.isupper() or outcome == "accepted":
                print(f"{number}: {outcome}: {detail}\n    {', '.join(case.story)}", flush=True)
                if options.keep:
                    shutil.copytree(folder, options.keep / str(number), dirs_exist_ok=True)
                    (options.keep / str(number) / "why").write_text(f"{outcome}: {detail}\n{case.story}\n")
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    for text, count in refusals.most_common():
        print(f"{count:4} {text}")
    return 1 if any(outcome.isupper() for outcome in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
