"""Each row of the table in docs/security.md names tests that exist.

    security_test.py BUILD_FOLDER
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "mutation"))
import table  # noqa: E402


def problems(page, tests):
    rows = [row.split(" | ") for row in page.split("## What is protected")[1].split("\n## ")[0].splitlines() if row.startswith("| ")][2:]
    assert len(rows) >= 10, rows
    for row in rows:
        named = re.findall(r"`([\w.:]+)`", row[-1])
        yield from (f"{row[0]}: {tests.problem_of(one)}" for one in named if tests.problem_of(one))
        if not named:
            yield f"{row[0]}: no test"


page = (ROOT / "docs" / "security.md").read_text()
tests = table.Tests(sys.argv[1])
found = list(problems(page, tests))
print("\n".join(found) or "all there")
assert list(problems(page.replace("`tools.listening`", "`tools.nothing`"), tests)) and list(problems(page.replace("`tools.listening`", ""), tests))  # controls
raise SystemExit(len(found) > 0)
