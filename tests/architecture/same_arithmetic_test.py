"""Every file of the build is compiled without contraction and without fast mathematics.

Where processors have a fused multiply-add, as all of arm64 have, GCC uses it for a * b + c by default: results would depend on the
processor. So each command has -ffp-contract=off, for the host's code in a CUDA file by -Xcompiler, and -fmad=false for the device's.
"""

import json
import pathlib
import re
import sys

FAST = re.compile(r"-ffast-math|-Ofast|-funsafe-math-optimizations|-fassociative-math|-freciprocal-math|-ffinite-math-only|--use_fast_math")


def problem(command):
    if "-ffp-contract=off" not in command:
        return "lacks -ffp-contract=off"
    if re.search(r"\.cu( |$)", command) and "-fmad=false" not in command:
        return "lacks -fmad=false"
    fast = FAST.search(command)
    return f"has {fast[0]}" if fast else None


def main():
    # The control: each kind is found.
    good = "c++ -O3 -ffp-contract=off -o a.o -c a.cpp"
    assert problem(good) is None
    assert all(problem(bad) for bad in ("c++ -c a.cpp", good + " -ffast-math", "nvcc -Xcompiler=-ffp-contract=off -c a.cu"))
    commands = json.loads((pathlib.Path(sys.argv[1]) / "compile_commands.json").read_text())
    found = [f"{one['file']}: {problem(one['command'])}" for one in commands if problem(one["command"])]
    print("\n".join(found) or f"{len(commands)} files")
    raise SystemExit(1 if found or len(commands) < 100 else 0)


main()
