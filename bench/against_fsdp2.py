#!/usr/bin/env python3
"""gpt-mini on two ranks of one host, 8 x 256 a rank, f32, AdamW, one thread a rank: fsdp over shm against PyTorch's FSDP2 over Gloo, and
fsdp against ddp, in turns on one machine.

    bench/against_fsdp2.py build/release [--pairs 5] [--python PYTHON_WITH_TORCH_2.6]

Without --python only fsdp against ddp. Peaks are of the process: resident memory at its highest, of the largest rank. Leave the machine
alone meanwhile.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("build")
parser.add_argument("--pairs", type=int, default=5)
parser.add_argument("--python", help="one that has torch 2.6 or later")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--measure", choices=["ddp", "fsdp"], help=argparse.SUPPRESS)
options = parser.parse_args()


def ours(strategy):
    """Runs in its own process, so that the peak of its children is that of this run alone."""
    out = subprocess.run([sys.executable, __file__, options.build, "--measure", strategy, "--steps", str(options.steps)], check=True,
                         text=True, stdout=subprocess.PIPE).stdout
    return json.loads(out)


if options.measure:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([f"{options.build}/tessera", "compare", "--model", "gpt-mini", "--ranks", "2", "--global-batch", "16", "--threads", "1", "--steps",
                        str(options.steps), "--strategies", options.measure, "--json", file.name], check=True, stdout=subprocess.DEVNULL)
        run = json.load(open(file.name))["runs"][0]
    print(json.dumps({"step_ms": run["step_ms"]["median"], "peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024}))
    sys.exit()

to_ddp, to_torch, memory = [], [], []
print("pair  ddp ms  fsdp ms  fsdp/ddp" + ("  FSDP2 ms  FSDP2/fsdp  fsdp MB  FSDP2 MB (grown)" if options.python else ""))
for pair in range(options.pairs):
    order = ["ddp", "fsdp"] if pair % 2 == 0 else ["fsdp", "ddp"]
    figures = {strategy: ours(strategy) for strategy in order}
    to_ddp.append(figures["fsdp"]["step_ms"] / figures["ddp"]["step_ms"])
    line = f"{pair + 1:4}  {figures['ddp']['step_ms']:6.0f}  {figures['fsdp']['step_ms']:7.0f}  {to_ddp[-1]:8.3f}"
    if options.python:
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers", "torch_fsdp2.py")
        torch = json.loads(subprocess.run([options.python, script, "--steps", str(options.steps)], stdout=subprocess.PIPE, text=True, check=True).stdout)
        to_torch.append(torch["step_ms"] / figures["fsdp"]["step_ms"])
        memory.append(figures["fsdp"]["peak_mb"] / torch["grown_mb"])
        line += (f"  {torch['step_ms']:8.0f}  {to_torch[-1]:10.2f}  {figures['fsdp']['peak_mb']:7.0f}  {torch['peak_mb']:8.0f} ({torch['grown_mb']:.0f})")
    print(line, flush=True)
print(f"median: fsdp takes {statistics.median(to_ddp):.3f} of ddp" +
      (f"; FSDP2 takes {statistics.median(to_torch):.2f} of fsdp; all of fsdp's process is {statistics.median(memory):.2f} of what FSDP2's grew by"
       if to_torch else ""))
