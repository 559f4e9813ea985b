"""The README's program equals the example, and its output the example's: the tests of examples/ compile and run both. Its
table says what docs/README.md shows of the demo, and it stays short."""

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
assert len(readme.splitlines()) <= 120, "README: more than 120 lines; docs/README.md has room"


def amount(text):
    """Bytes of "43.4 MB" """
    number, unit = text.split()
    return float(number) * {"kB": 1e3, "MB": 1e6}[unit]


demo = (root / "docs" / "README.md").read_text().split("gpt-tall:")[0]
for strategy, stored, peak, calls, sent in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (\d+) \| (.*?) \|$", readme, re.M):
    line = re.search(rf"^{strategy} .*$", demo, re.M)[0]
    sizes = re.findall(r"(?<!/ )\b[\d.]+ [kM]B", line)  # parameters, gradients, optimizer, activations, peak
    operations = [(int(count), amount(size)) for count, size in re.findall(r"(\d+) / ([\d.]+ [kM]B)", line)]
    for name, said, shown in (("stored", amount(stored), sum(map(amount, sizes[:3]))), ("peak", amount(peak), amount(sizes[4])),
                              ("calls", int(calls), sum(count for count, _ in operations)), ("sent", amount(sent), sum(size for _, size in operations))):
        assert abs(said - shown) < 0.006 * shown, f"README: {strategy}: {name} {said}, the demo has {shown}"
assert len(re.findall(r"^\| `(?:ddp|zero1|zero2|fsdp|hsdp)` ", readme, re.M)) == 5
