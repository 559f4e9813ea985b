"""Every link to a file and every path in backticks in the Markdown pages exists."""

import pathlib
import re
import sys

LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
PATH = re.compile(r"`((?:src|backends|plugins|tools|examples|tests|bench|docs|scripts|cmake|\.ci)/[\w./-]*)`")


def broken(root):
    for page in sorted([*root.glob("*.md"), *(root / "docs").glob("**/*.md")]):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)  # brackets in code are no links
        for target in LINK.findall(text):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                yield f"{page.relative_to(root)}: no '{target}'"
        for target in PATH.findall(text):
            if "NAME" not in target and not (root / target).exists():
                yield f"{page.relative_to(root)}: no `{target}`"


def main():
    root = pathlib.Path(sys.argv[1])
    found = list(broken(root))
    # Negative control: the patterns match a link and a path.
    assert LINK.findall("see [x](docs/gone.md#part)") == ["docs/gone.md"] and PATH.findall("`src/gone/x.h`") == ["src/gone/x.h"]
    print("\n".join(found) or "all there")
    raise SystemExit(1 if found else 0)


main()
