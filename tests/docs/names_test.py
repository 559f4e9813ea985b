"""Types and functions that the Markdown pages name in backticks exist in the sources."""

import pathlib
import re
import sys

SOURCES = ("src", "backends", "plugins", "tools", "examples", "assignments", "tests", "bench", "cmake", "python")
NAME = re.compile(r"`((?:\w+::)*[A-Za-z_]\w*)(?:\(\)|\([\w, .]*\))?`")
# Names of PyTorch, NCCL, MPI and the like, which the pages compare with.
OTHERS = re.compile(r"^(torch|nccl|MPI|ucp|uct|cuda|cublas)|^(MixedPrecisionPolicy|CPUOffloadPolicy|ShardedGradScaler|ZeroRedundancyOptimizer"
                    r"|set_requires_gradient_sync|set_requires_all_reduce|no_sync|full_tensor)$")


def names(text):
    """Texts in backticks that look like C++ names: CamelCase, or qualified, or a call."""
    without_code = re.sub(r"^( *```).*?^\1", "", text, flags=re.M | re.S)
    for match in NAME.finditer(without_code):
        name = match[1]
        if re.search(r"[a-z][A-Z]|::|^[A-Z][a-z]+$", name) or match[0].endswith(")`"):
            yield name


def main():
    root = pathlib.Path(sys.argv[1])
    words = set()
    for folder in SOURCES:
        for path in (root / folder).rglob("*"):
            if path.suffix in (".h", ".cpp", ".cu", ".cuh", ".c", ".py", ".cmake", ".txt"):
                words.update(re.findall(r"\w+", path.read_text(errors="replace")))
    found = []
    for page in sorted([*root.glob("*.md"), *(root / "docs").glob("**/*.md"), *(root / "assignments").glob("**/*.md")]):
        if page.name == "glossary.md":  # names of other projects, and words that the project doesn't use
            continue
        for name in names(page.read_text()):
            missing = [part for part in name.split("::") if part not in words]
            if missing and not OTHERS.match(name):
                found.append(f"{page.relative_to(root)}: `{name}`")
    # docs/testing.md lists the properties that occur in test names or comments, P01 to P20.
    listed = set(re.findall(r"^\| (P\d\d): ", (root / "docs" / "testing.md").read_text(), re.M))
    tested = {match for path in (root / "tests").rglob("*.cpp") for match in re.findall(r"\b(P\d\d)(?:_|: )", path.read_text())}
    found += [f"docs/testing.md: {name} is listed or tested, not both" for name in sorted(listed ^ tested)]
    # Negative control: the pattern matches types, qualified names and calls, but not variables and options.
    assert list(names("`Gone` `a::b` `gone(x)` `--gone` `gone` `TESSERA_GONE`")) == ["Gone", "a::b", "gone"]
    print("\n".join(found) or "all there")
    raise SystemExit(1 if found else 0)


main()
