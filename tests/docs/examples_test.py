"""Every example is a test. An unregistered one would break unnoticed; add_test() before enable_testing() registers nothing."""

import pathlib
import re
import subprocess
import sys

examples, build = pathlib.Path(sys.argv[1]), sys.argv[2]
listed = subprocess.run(["ctest", "--test-dir", build, "--show-only", "-R", r"^examples\."], text=True, capture_output=True, check=True).stdout
tests = set(re.findall(r": examples\.(\w+)", listed))
names = lambda kind: {path.stem for path in examples.glob(f"*.{kind}")} | {f"parallel_{path.stem}" for path in examples.glob(f"parallel/*.{kind}")}
programs = names("cpp")
if "11_libtorch" not in tests:  # built only where libtorch is found
    programs.discard("11_libtorch")
assert programs and tests == programs, f"tests {sorted(tests)} of the programs {sorted(programs)}"
assert programs == names("txt") - {"CMakeLists"} - ({"11_libtorch"} - tests), "each has the output that it prints beside it"
