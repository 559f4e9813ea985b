"""The litmus programs mirror lines of the sources: each of these lines is still there. A change of one is a reason to
compare the program with the code, and to check it again (README.md)."""

import pathlib
import re
import sys


def missing(root, program):
    """The lines "// mirrors PATH: TEXT" whose file lacks the text."""
    lines = re.findall(r"^// mirrors (\S+): (.*)$", program.read_text(), re.M)
    if not lines:
        return [f"{program.name} mirrors nothing"]
    return [f"{program.name}: {path} has no '{text}'" for path, text in lines
            if not (root / path).is_file() or text not in (root / path).read_text()]


def main():
    root = pathlib.Path(sys.argv[1])
    programs = sorted((root / "tests" / "litmus").glob("*.c"))
    found = [line for program in programs for line in missing(root, program)]
    page = (root / "docs" / "memory_order.md").read_text()
    found += [f"docs/memory_order.md does not name {program.stem}" for program in programs if program.stem not in page]
    # The control: a line that no source has.
    control = pathlib.Path(sys.argv[2]) / "litmus_control.c"
    control.write_text("// mirrors src/comm/work.h: handles_.fetch_sub(1, std::memory_order_relaxed) == 1\n")
    if len(missing(root, control)) != 1 or not programs:
        found.append("the control was not detected")
    control.unlink()
    print("\n".join(found))
    sys.exit(len(found) > 0)


main()
