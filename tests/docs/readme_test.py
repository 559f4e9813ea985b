"""The README's program equals the example, and its output the example's: the tests of examples/ compile and run both."""

import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
readme = (root / "README.md").read_text()
blocks = re.findall(r"```(\w*)\n(.*?)```", readme, re.S)
code = [text for language, text in blocks if language == "cpp"]
shown = [text.split("\n", 1)[1] for _, text in blocks if text.startswith("$ tessera run")]
assert code == [(root / "examples" / "06_fifteen_lines.cpp").read_text()], "README: the program is not the example"
assert shown == [(root / "examples" / "06_fifteen_lines.txt").read_text()], "README: the output is not the example's"
