"""Fine-tuning from end to end: starts from a folder of transformers, is killed midway, resumes on another number of ranks,
and exports a folder that transformers opens with the same loss.

    python3 tests/peers/finetune.py build/release/tessera [lora] [qlora]

Needs torch and transformers (run with torch 1.13 and transformers 4.40).
"""
import os
import random
import signal
import subprocess
import sys
import tempfile

import torch
import transformers

WORDS = "rank shard unit gather reduce scatter mesh tape tile layer hook lease axis block wire seed norm step".split()
TEXT = " ".join(random.Random(0).choices(WORDS, k=8000)).encode()
SEQ = 64


def loss_of(folder, path):
    """The mean over non-overlapping windows, as --eval defines it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    data = open(path, "rb").read()
    sums, count = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(data) - SEQ, SEQ):
            window = torch.tensor([list(data[begin:begin + SEQ + 1])])
            logits = model(window[:, :-1]).logits
            sums += torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum").item()
            count += SEQ
    return sums / count


def make(kind):
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_layer=3, n_embd=96, n_head=4, vocab_size=256, n_positions=SEQ, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=96, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=SEQ, bos_token_id=0, eos_token_id=0))


def run(tool, kind, extra):
    with tempfile.TemporaryDirectory() as root:
        begin, saves, end, text = (os.path.join(root, name) for name in ("begin", "saves", "end", "text"))
        open(text, "wb").write(TEXT)
        torch.manual_seed(0)
        make(kind).save_pretrained(begin, safe_serialization=True)
        common = [tool, "train", "--data", text, "--seq-len", str(SEQ), "--global-batch", "24", "--wrap", "block", "--strategy", "fsdp",
                  "--precision", "bf16", "--clip-norm", "1", "--accumulate", "2", "--steps", "40", "--lr", "3e-3", "--save", saves, *extra]
        first = subprocess.Popen([*common, "--init", begin, "--save-every", "5", "--ranks", "2"], stdout=subprocess.PIPE, text=True,
                                 start_new_session=True)
        for line in first.stdout:
            if line.startswith("step 17 "):
                os.killpg(first.pid, signal.SIGKILL)  # the launcher and its ranks
                break
        first.wait()
        out = subprocess.run([*common, "--resume", saves, "--ranks", "3", "--export", end, "--eval", text], capture_output=True, text=True)
        assert out.returncode == 0, out.stdout + out.stderr
        lines = out.stdout.splitlines()
        resumed = int(next(line for line in lines if line.startswith("step ")).split()[1])
        ours = float(next(line for line in lines if line.startswith("eval loss")).split()[2])
        again = subprocess.run([tool, "train", "--init", end, "--steps", "0", "--eval", text, "--seq-len", str(SEQ), "--ranks", "2"],
                               capture_output=True, text=True)
        in_f32 = float(again.stdout.splitlines()[0].split()[2])
        before, theirs = loss_of(begin, text), loss_of(end, text)
        print(f"{kind} {' '.join(extra)}: killed at step 17, resumed at {resumed} on 3 ranks; loss {before:.4f} before, "
              f"{ours:.6f} ours in bf16, {in_f32:.6f} of the folder in f32, {theirs:.6f} in transformers: "
              f"{abs(ours - theirs) / theirs:.1e} and {abs(in_f32 - theirs) / theirs:.1e} relative")
        least = 0.2 if extra else 1  # adapters on an untrained base reduce the loss less
        assert 10 < resumed <= 17 and abs(ours - theirs) < 1e-3 * theirs and abs(in_f32 - theirs) < 1e-5 * theirs and theirs < before - least


if __name__ == "__main__":
    for extra in [[]] + ([["--lora", "8"]] if "lora" in sys.argv else []) + ([["--lora", "8", "--quantize", "nf4"]] if "qlora" in sys.argv else []):
        for kind in ("gpt2", "llama"):
            run(os.path.abspath(sys.argv[1]), kind, extra)
