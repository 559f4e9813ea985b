"""Each term of the pages and of explain has one definition, that of docs/glossary.md: words_test.py TOOL.

The build makes the table of `info --words` from "Words of explain and the report" there, by tools/cli/words.cmake;
this test reads the section by itself.
"""

import html
import pathlib
import re
import subprocess
import sys
import tempfile

GLOSSARY = pathlib.Path(__file__).parents[2] / "docs" / "glossary.md"
HEADING = "## Words of explain and the report\n"
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
# Heads of explain's columns, and what they are about.
HEADS = {"unit": "unit", "unsharded B": "unsharded", "after forward": "kept after forward", "waits ms": "exposed", "mesh": "mesh", "exposed": "exposed",
         "hidden": "hidden", "optimizer": "optimizer", "Shards of": "shard", "calls": "control", "by formula": "formula"}


def run(*arguments, cwd=None):
    done = subprocess.run(arguments, text=True, capture_output=True, timeout=60, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def words_of(tool):
    lines = run(tool, "info", "--words").splitlines()
    return dict(zip(lines[::2], (line.strip() for line in lines[1::2])))


def entries_of(glossary):
    section = glossary.partition(HEADING)[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| ([a-z][^|]*?) \| (.*?) \|$", section, re.M))


def terms_of_page(page):
    """Each term that a page defines, with its meaning there: under its words, and in the list at the end."""
    used = re.findall(r'<dfn tabindex="0">(.*?)<span role="tooltip">(.*?)</span>', page) + re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)
    return [(html.unescape(name), html.unescape(meaning)) for name, meaning in used]


def terms_of_text(text):
    """The terms of explain: what its rows do, and its heads."""
    steps = text.partition("\nSTEP")[2].partition("\nCOST")[0]
    rows = re.findall(r"^ +\d+\.\d{3}  ([a-z-]+)", steps, re.M)
    actions = set(rows) | {operation for operation in ("reduce-scatter", "all-reduce") if operation in steps} | ({"queued"} if "queued" in steps else set())
    return (actions - {"end"}) | {term for head, term in HEADS.items() if head in text}


def problems(words, glossary, page, texts):
    found = [f"docs/glossary.md: '{name}' is not as in info --words" for name in {*words, *entries_of(glossary)} if entries_of(glossary).get(name) != words.get(name)]
    found += [f"a page: '{name}' is not as in info --words" for name, meaning in terms_of_page(page) if words.get(name) != meaning]
    found += [f"explain: '{term}' is not in info --words" for text in texts for term in terms_of_text(text) if term not in words]
    return sorted(set(found))


def main(tool):
    words, glossary = words_of(tool), GLOSSARY.read_text()
    with tempfile.TemporaryDirectory() as folder:
        texts = [run(tool, "explain", "--strategy", strategy, "--html", "page.html", cwd=folder) for strategy in STRATEGIES]
        page = (pathlib.Path(folder) / "page.html").read_text()
    assert len(terms_of_page(page)) > len(words) and all(len(terms_of_text(text)) > 10 for text in texts)
    # The negative controls: another meaning, a word without an entry, and a term that nobody defines.
    assert problems(words, glossary.replace(words["shard"], "A part."), page, texts)
    assert problems({name: meaning for name, meaning in words.items() if name != "unshard"}, glossary, page, texts)
    assert problems(words, glossary, page.replace("<dfn tabindex=\"0\">unit<", "<dfn tabindex=\"0\">block<"), texts)
    assert problems(words, glossary, page, [texts[0].replace("  update", "  renew")])
    return problems(words, glossary, page, texts)


if __name__ == "__main__":
    found = main(sys.argv[1])
    print("\n".join(found) or "each word has one definition")
    sys.exit(bool(found))
