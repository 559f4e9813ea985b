#!/usr/bin/env python3
"""A libtorch transformer with an engine (bench_libtorch_step), in turns with the plain program on one rank and, on two ranks of this
host, with the same model in Python under PyTorch's FSDP2, over Gloo and over this project's own backend.

    bench/libtorch_step.py BUILD [--pairs 5] [--python PYTHON_WITH_TORCH_AND_TESSERA] [--batch 8] [--steps 12] [--ranks 4]

6 blocks of width 384, --batch x 256 tokens a rank, f32, AdamW, one thread a rank. Then the peak resident memory of fsdp on --ranks
ranks against what it should be: the process before the model, what the engine counts, and the plain program's activations. BUILD and
PYTHON should have the same Torch. Leave the machine alone meanwhile.
"""
import argparse
import json
import os
import statistics
import subprocess

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("build")
parser.add_argument("--pairs", type=int, default=5)
parser.add_argument("--python", help="one that has torch 2.6 or later and this project's package")
parser.add_argument("--batch", type=int, default=8, help="sequences a rank")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--ranks", type=int, default=4, help="of the measurement of memory")
options = parser.parse_args()
WIDTH, LAYERS, WORDS = 384, 6, 256
SHAPE = ["--width", str(WIDTH), "--heads", "6", "--layers", str(LAYERS), "--words", str(WORDS), "--batch", str(options.batch), "--positions", "256",
         "--threads", "1"]


def last_line(command, **variables):
    out = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}).stdout
    line = out.strip().splitlines()[-1]
    return json.loads(line[line.index("{"):])  # behind the rank


def ours(strategy, ranks, steps=options.steps, **variables):
    return last_line([f"{options.build}/tessera", "run", "--ranks", str(ranks), "--", f"{options.build}/bench_libtorch_step", "--strategy", strategy,
                      "--steps", str(steps), *SHAPE], **variables)


def theirs(backend):
    peers = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers")
    return last_line([options.python, f"{peers}/torch_fsdp2.py", "--model", "transformer", "--backend", backend, "--batch", str(options.batch), "--steps",
                      str(options.steps)])


runs = {"plain": lambda: ours("plain", 1), "fsdp, 1 rank": lambda: ours("fsdp", 1), "fsdp, 2 ranks": lambda: ours("fsdp", 2)}
if options.python:
    runs |= {f"FSDP2 over {backend}": lambda backend=backend: theirs(backend) for backend in ("gloo", "tessera")}
print("ms a step:  " + "  ".join(f"{name:>18}" for name in runs))
steps = {name: [] for name in runs}
for pair in range(options.pairs):
    for name in list(runs) if pair % 2 == 0 else reversed(runs):
        steps[name].append(runs[name]()["step_ms"])
    print("            " + "  ".join(f"{steps[name][-1]:18.1f}" for name in runs), flush=True)


def ratio(name, of):
    print(f"{name} / {of}: {statistics.median(a / b for a, b in zip(steps[name], steps[of])):.3f}")


ratio("fsdp, 1 rank", "plain")
for name in list(runs)[3:]:
    ratio(name, "fsdp, 2 ranks")

# The C library gives freed tensors back at once: else the peak has its gaps, too, and differs from run to run.
at_once = {"MALLOC_MMAP_THRESHOLD_": "131072"}
plain = ours("plain", 1, 4, **at_once)
parameters = LAYERS * (12 * WIDTH * WIDTH + 13 * WIDTH) + 2 * WORDS * WIDTH + WORDS
# At the end of a forward, the plain program's peak, it has values and two moments, and no gradients.
activations = plain["resident_bytes"] - plain["resident_before"] - 12 * parameters
print(f"peak resident memory of fsdp on {options.ranks} ranks, MB (over shm with the pages of other ranks that a rank has read):")
for backend in ("tcp", "shm"):
    run = ours("fsdp", options.ranks, 4, TESSERA_BACKEND=backend, **at_once)
    expected = run["resident_before"] + run["peak_bytes"] + activations
    print(f"  {backend}: {run['resident_bytes'] / 1e6:.1f} of {expected / 1e6:.1f} = {run['resident_before'] / 1e6:.1f} before the model + "
          f"{run['peak_bytes'] / 1e6:.1f} of the engine + {activations / 1e6:.1f} of activations: {run['resident_bytes'] / expected:.3f}")
