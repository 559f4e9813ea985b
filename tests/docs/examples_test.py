"""Every example is a test: one that isn't registered rots without a word, as add_test() before enable_testing() showed."""

import pathlib
import re
import subprocess
import sys

examples, build = pathlib.Path(sys.argv[1]), sys.argv[2]
listed = subprocess.run(["ctest", "--test-dir", build, "--show-only", "-R", r"^examples\."], text=True, capture_output=True, check=True).stdout
tests = set(re.findall(r": examples\.(\w+)", listed))
programs = {path.stem for path in examples.glob("*.cpp")}
assert programs and tests == programs, f"tests {sorted(tests)} of the programs {sorted(programs)}"
assert programs == {path.stem for path in examples.glob("*.txt")} - {"CMakeLists"}, "each has the output that it prints beside it"
