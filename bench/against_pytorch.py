#!/usr/bin/env python3
"""gpt-mini, batch 8 x 256, f32, AdamW, one thread: this library against PyTorch, in pairs, on one machine.

    bench/against_pytorch.py build/release TORCH_SCRIPT [--pairs 5] [--python /usr/bin/python3]

TORCH_SCRIPT trains the same model with PyTorch and prints, with --json, one line with "tokens_per_second_per_rank" and
"gflops_per_rank". Everything is a ratio within one run; medians are what counts. Leave the machine alone meanwhile. Two ranks against
one: two_ranks.py.
"""
import argparse
import json
import os
import re
import statistics
import subprocess

parser = argparse.ArgumentParser()
parser.add_argument("build")
parser.add_argument("torch_script")
parser.add_argument("--pairs", type=int, default=5)
parser.add_argument("--python", default="/usr/bin/python3")
options = parser.parse_args()
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def last_json(command):
    out = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, check=True).stdout
    return json.loads(out.strip().splitlines()[-1])


def sgemm():
    out = subprocess.run([f"{options.build}/bench_nn_kernels", "--benchmark_filter=product/sgemm_1024"], capture_output=True, text=True,
                         check=True).stdout
    return float(re.search(r"flops=([0-9.]+)G", out).group(1))


ratios, shares = [], []
print("pair  ours tokens/s  PyTorch tokens/s  ratio  ours GFLOP/s  sgemm GFLOP/s  share")
for pair in range(options.pairs):
    ours = last_json([f"{options.build}/bench_train_alone", "gpt-mini", "8", "256"])
    torch = last_json([options.python, options.torch_script, "--steps", "8", "--json"])
    peak = sgemm()
    ratios.append(ours["tokens_per_second"] / torch["tokens_per_second_per_rank"])
    shares.append(ours["gflops"] / peak)
    print(f"{pair + 1:4}  {ours['tokens_per_second']:13.0f}  {torch['tokens_per_second_per_rank']:16.0f}  {ratios[-1]:5.2f}  {ours['gflops']:12.1f}"
          f"  {peak:13.1f}  {shares[-1]:5.2f}", flush=True)
if ratios:
    print(f"median ratio {statistics.median(ratios):.2f}, median share of sgemm {statistics.median(shares):.2f}")
