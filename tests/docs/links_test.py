"""Every link to a file or to a heading and every path in backticks in the Markdown pages exists."""

import pathlib
import re
import sys
import tempfile

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?[^)]*\)")
PATH = re.compile(r"`((?:src|backends|plugins|tools|examples|assignments|tests|bench|docs|scripts|cmake|\.ci)/[\w./-]*)`")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", flags=re.M)


def prose(page):
    """The page's text without blocks of code: brackets and # in them are no links and headings."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page):
    """The fragments of the page's headings, as GitHub derives them."""
    found = set()
    for heading in HEADING.findall(prose(page)):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        base = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number, name = 0, base
        while name in found:  # repeated headings are numbered
            number += 1
            name = f"{base}-{number}"
        found.add(name)
    return found


def broken_link(page, target, fragment):
    """What is wrong with a link on the page, or ""."""
    if re.match(r"[a-z]+:", target):
        return ""
    file = page.parent / target if target else page
    if not file.exists():
        return f"no '{target}'"
    if fragment and file.suffix == ".md" and fragment not in anchors(file):
        return f"no heading '#{fragment}' in '{target or page.name}'"
    return ""


def broken(root):
    for page in sorted([*root.glob("*.md"), *(root / "docs").glob("**/*.md"), *(root / "assignments").glob("**/*.md")]):
        text = prose(page)
        for target, fragment in LINK.findall(text):
            if problem := broken_link(page, target, fragment):
                yield f"{page.relative_to(root)}: {problem}"
        for target in PATH.findall(text):
            if "NAME" not in target and not (root / target).exists():
                yield f"{page.relative_to(root)}: no `{target}`"


def negative_control():
    """Pages with a dead link of each kind beside good ones: only the dead ones are reported."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "docs").mkdir()
        (root / "docs" / "a.md").write_text(
            "# One `two_three`, four\n\n## Again\n\n## Again\n\n```\n# code\n```\n\n"
            "[x](#again-1) [x](#again-2) [x](#code) [x](gone.md#part) `src/gone/x.h` `docs/a.md`\n")
        (root / "b.md").write_text("[x](docs/a.md#one-two_three-four 'title') [x](docs/a.md#one) [x](https://a.b/c#d)\n")
        found = list(broken(root))
    expected = ["b.md: no heading '#one' in 'docs/a.md'", "docs/a.md: no heading '#again-2' in 'a.md'",
                "docs/a.md: no heading '#code' in 'a.md'", "docs/a.md: no 'gone.md'", "docs/a.md: no `src/gone/x.h`"]
    assert found == expected, found


def main():
    negative_control()
    found = list(broken(pathlib.Path(sys.argv[1])))
    print("\n".join(found) or "all there")
    raise SystemExit(1 if found else 0)


main()
