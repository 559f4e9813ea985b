"""Random mistakes: a statement deleted, a condition negated, an operator swapped or a constant changed, in one line.

They find what those who write tests and the table forget. Lines are drawn evenly over the folders of the product's code, of
those that tests execute if that is known (mutate.py --coverage). The tests are those that the table names for the file, then
all tests of the part of the product.
"""

import functools
import random
import re
import subprocess

import table

FOLDERS = ("src/base", "src/comm", "src/fsdp", "src/nn", "src/plan", "backends", "plugins", "tools")
# What tests each part, the quick ones first. CUDA's kernels are not among the random mistakes.
_COMM = ("^(comm\\.|comm_schedules|comm_rendezvous|conformance\\.)", "^(comm_|collectives|shm\\.|tcp\\.)")
_UNIT = "^tools(_bench)?\\.[A-Z]"  # the tool's GoogleTest cases
_SUITES = {
    "src/base": ("^base", "^(comm|nn)\\.", "^fsdp_(engine|checkpoint|offload)\\.", "^tools\\.(files|options|durability|failure)"),
    "src/comm": (*_COMM, "^fsdp_(engine|equality)\\."),
    "src/fsdp": ("^fsdp_", "^plan", "^tools\\.(training|checkpoint|plan|explain|own_model)"),
    "src/nn": ("^nn(\\.|_[^c])", "^fsdp_(engine|lora|fp8|precision|activation_checkpoint)\\.",
               "^tools\\.(training|checkpoint|lora|files|foreign_files|options|command_line)"),
    "src/plan": ("^plan", "^tools\\.(plan|explain|chakra|why|link|report|bench)"),
    "backends/mpi": ("^mpi", "^conformance"),
    "backends/shm": ("^shm", *_COMM),
    "backends/tcp": ("^tcp", *_COMM),
    "backends/ucx": ("^ucx", "^conformance"),
    "plugins": ("^(collectives|fsdp_(compression|plugin|replica|strateg))", "^tools\\.plugin", "^install"),
    "tools": (_UNIT, "^smoke", "^tools"),
    "tools/bench": (_UNIT, "^(bench|tools\\.(bench|link|listening|products))", "^tools"),
    "tools/doctor": (_UNIT, "^launchers", "^tools"),
    "tools/explain": (_UNIT, "^tools\\.explain", "^docs", "^tools"),
    "tools/launch": (_UNIT, "^tools\\.(launch|failure|postmortem)", "^launchers", "^tools"),
    "tools/plan": (_UNIT, "^tools\\.(plan|chakra|why)", "^docs", "^tools"),
    "tools/report": (_UNIT, "^tools\\.(report|postmortem|divergence)", "^tools"),
}
_SWAPS = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ", " && ": " || ", " || ": " && ",
          " + ": " - ", " - ": " + ", " * ": " / ", "++": "--", "--": "++", "std::min(": "std::max(", "std::max(": "std::min(",
          "+= ": "-= ", "true": "false", "false": "true"}
_STATEMENT = re.compile(r"\s+(?!return\b|throw\b|break\b|continue\b|delete\b)[\w\[\].()>*&:-]+(\(.*\)|\s[-+*/|&^]?=\s.*|\+\+|--);\s*$")
_CONDITION = re.compile(r"(.*\b(?:if|while) \()([^=;]*|[^;]*[=!<>]=[^;]*)(\) .*|\) \{)$")


def _masked(line):
    """The line with the contents of strings, character constants and comments replaced, at the same places."""
    line = re.sub(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', lambda seen: "\x00" * len(seen[0]), line)
    return re.sub(r"//.*", lambda seen: " " * len(seen[0]), line)


def _balanced(text):
    return text.count("(") == text.count(")") and text.count("{") == text.count("}")


def changes_of(line):
    """All mistakes that this line allows: (what, the line with it)."""
    code = _masked(line)
    if not code.strip() or code.lstrip().startswith(("#", "*", "static_assert", "template", "using", "case ", "TESSERA_")):
        return []
    found = []
    if _STATEMENT.fullmatch(code) and _balanced(code):
        found.append(("deleted", ""))
    condition = _CONDITION.fullmatch(code)
    if condition and _balanced(condition[2]):
        begin, end = condition.span(2)
        found.append(("negated", f"{line[:begin]}!({line[begin:end]}){line[end:]}"))
    for old, new in _SWAPS.items():
        for seen in re.finditer(re.escape(old) if not old.isalpha() else rf"\b{old}\b", code):
            found.append((f"{old.strip()} to {new.strip()}", line[:seen.start()] + new + line[seen.end():]))
    for seen in re.finditer(r"(?<![\w.'])\d+(?![\w.'])", code):
        found.append((f"{seen[0]} to {int(seen[0]) + 1}", f"{line[:seen.start()]}{int(seen[0]) + 1}{line[seen.end():]}"))
    return found


def _unique(lines, number, changed):
    """(find, replace): the line and as many lines before it as make it the only one of its file."""
    text = "\n".join(lines)
    for first in range(number, max(-1, number - 12), -1):
        before = lines[first:number]
        find = "\n".join([*before, lines[number], ""])
        if text.count(find) == 1:
            return find, "\n".join([*before, *([changed] if changed else []), ""])
    return None


def _tests_of(file, known):
    """First the tests of the table's mistakes in this file, which are quick, then all of its part of the product."""
    tests = [test for one in known if one.file == file for test in one.tests]
    part = next(part for part in sorted(_SUITES, key=len, reverse=True) if file.startswith(part + "/"))
    return tuple(dict.fromkeys([*tests, *_SUITES[part]]))


@functools.lru_cache(maxsize=None)
def _lines_of(file):
    """All lines of the file, and the numbers, from 0, of those that allow a mistake."""
    lines = (table.ROOT / file).read_text().split("\n")
    return lines, tuple(number for number, line in enumerate(lines) if changes_of(line))


def generate(count, seed, executed=None):
    """`executed`: line numbers by file; None: any line may change."""
    rng = random.Random(seed)
    known = table.load()
    names = subprocess.run(["git", "-C", table.ROOT, "ls-files", *FOLDERS], text=True, capture_output=True, check=True).stdout.split()
    by_folder = {folder: [] for folder in FOLDERS}
    for file in names:
        if not file.endswith((".cpp", ".h")) or "cuda" in file or "/nccl" in file:
            continue
        numbers = _lines_of(file)[1]
        if executed is not None:
            reached = set(executed.get(file, ()))
            numbers = [number for number in numbers if number + 1 in reached]
        places = [(file, number) for number in numbers]
        by_folder[next(folder for folder in FOLDERS if file.startswith(folder + "/"))] += places
    found, used = [], set()
    for turn in range(100 * count):
        if len(found) == count:
            break
        places = by_folder[FOLDERS[turn % len(FOLDERS)]]
        if not places:
            continue
        file, number = rng.choice(places)
        lines = _lines_of(file)[0]
        what, changed = rng.choice(changes_of(lines[number]))
        unique = _unique(lines, number, changed)
        tests = _tests_of(file, known)
        if unique and tests and (file, number) not in used:
            used.add((file, number))
            found.append(table.Mistake(f"random-{seed}-{file}:{number + 1}", file, *unique, tests, f"{what}: {lines[number].strip()}"))
    return found
