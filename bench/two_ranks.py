#!/usr/bin/env python3
"""What a second rank costs each rank: two ranks under ddp and fsdp against one rank whose neighbour core does the same work.

    bench/two_ranks.py build/release [--pairs 8] [--model gpt-mini] [--batch 8] [--steps 12] [--json FILE]

In each pair the four runs follow each other, in an order that rotates from pair to pair, so that a machine whose speed drifts hurts
none of them more than the others: alone, ddp, fsdp, alone again. "Alone" is two trainings of one rank, started together, each bound to
its half of the cores: without the busy neighbour one core would run faster (turbo, cache, memory bandwidth), and that would be
counted as communication. The ranks of ddp and fsdp are bound likewise by the tool. One thread a rank. The two alone runs of a pair
against each other give the noise: a loss below it says nothing. Leave the machine alone meanwhile.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("build")
parser.add_argument("--pairs", type=int, default=8)
parser.add_argument("--model", default="gpt-mini")
parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
parser.add_argument("--steps", type=int, default=12, help="the first two are not counted")
parser.add_argument("--json", help="write the figures")
options = parser.parse_args()
CORES = sorted(os.sched_getaffinity(0))
HALF = len(CORES) // 2
if HALF == 0:
    parser.error("needs two cores, and may use one")
if options.steps < 3:
    parser.error("--steps: 3 or more")


def start(folder, name, ranks, strategy, cores):
    path = os.path.join(folder, name + ".json")
    command = [f"{options.build}/tessera", "train", "--model", options.model, "--ranks", str(ranks), "--global-batch",
               str(options.batch * ranks), "--threads", "1", "--steps", str(options.steps), "--strategy", strategy, "--json", path]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, cores))
    return path, process


def tokens_per_rank(path, process, ranks):
    if process.wait() != 0:
        raise SystemExit(f"two_ranks: {' '.join(process.args)} ended with code {process.returncode}")
    with open(path) as file:
        steps = [json.loads(line) for line in file]
    return statistics.median(step["tokens_per_second"] for step in steps[2:] if "step" in step) / ranks


def alone(folder):
    runs = [start(folder, f"alone{i}", 1, "ddp", cores) for i, cores in enumerate((CORES[:HALF], CORES[HALF:2 * HALF]))]
    return statistics.mean([tokens_per_rank(*run, 1) for run in runs])


def together(folder, strategy):
    return tokens_per_rank(*start(folder, strategy, 2, strategy, CORES), 2)


MEASURES = [("alone", alone), ("ddp", lambda folder: together(folder, "ddp")), ("fsdp", lambda folder: together(folder, "fsdp")),
            ("again", alone)]


def summary(name, values):
    ordered = sorted(100 * value for value in values)
    return (f"{name}: median {statistics.median(ordered):+.1f}%, from {ordered[0]:+.1f}% to {ordered[-1]:+.1f}%"
            f" ({len(ordered)} pairs)")


rates, lost = [], {"ddp": [], "fsdp": [], "noise": []}
print("pair  alone  again   ddp  fsdp  tokens/s per rank;  ddp loses  fsdp loses  noise")
with tempfile.TemporaryDirectory() as scratch:
    for pair in range(options.pairs):
        turn = pair % len(MEASURES)
        rate = {name: measure(scratch) for name, measure in MEASURES[turn:] + MEASURES[:turn]}
        base = (rate["alone"] + rate["again"]) / 2
        for strategy in ("ddp", "fsdp"):
            lost[strategy].append(1 - rate[strategy] / base)
        lost["noise"].append(1 - rate["again"] / rate["alone"])
        rates.append(rate)
        print(f"{pair + 1:4} {rate['alone']:6.0f} {rate['again']:6.0f} {rate['ddp']:5.0f} {rate['fsdp']:5.0f}"
              f"  {100 * lost['ddp'][-1]:+27.1f}% {100 * lost['fsdp'][-1]:+10.1f}% {100 * lost['noise'][-1]:+5.1f}%", flush=True)
for strategy in ("ddp", "fsdp"):
    print(summary(f"{strategy} loses per rank", lost[strategy]))
print(summary("noise, alone against alone", lost["noise"]))
if options.json:
    with open(options.json, "w") as file:
        json.dump({"model": options.model, "batch": options.batch, "tokens_per_second_per_rank": rates, "lost": lost}, file, indent=1)
