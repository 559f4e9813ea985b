"""Lines of the Markdown pages have at most 100 characters, outside tables, pictures and code."""

import pathlib
import re
import sys

WIDTH = 100


def too_long(text):
    """The numbers of the lines that are too long."""
    without_code = re.sub(r"^( *```).*?^\1", lambda block: re.sub(r"[^\n]", "", block[0]), text, flags=re.M | re.S)
    return [number for number, line in enumerate(without_code.splitlines(), 1)
            if len(line) > WIDTH and not line.startswith(("|", "![")) and not re.fullmatch(r"\s*`[^`]+`[.,;:]?", line)]


def main():
    root = pathlib.Path(sys.argv[1])
    found = [f"{page.relative_to(root)}:{number}" for page in sorted([*root.glob("*.md"), *(root / "docs").glob("**/*.md"), *(root / "assignments").glob("**/*.md")])
             for number in too_long(page.read_text())]
    # Negative control: a long line is found, before and after code with a longer one.
    long = "word " * 21
    assert too_long(f"{long}\n\n```\n{long}{long}\n```\n| {long} |\n{long}\n") == [1, 7]
    print("\n".join(found) or "none")
    raise SystemExit(f"{len(found)} lines are too long: wrap them" if found else 0)


main()
