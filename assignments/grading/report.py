"""Points and messages: as text for the student, and as Gradescope's results.json for autograders."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass
class Test:
    name: str
    max_score: float
    problems: list[str]  # none: all points
    note: str = ""  # what was measured

    @property
    def score(self) -> float:
        return 0 if self.problems else self.max_score

    @property
    def output(self) -> str:
        return "\n".join(self.problems or [self.note or "as it should be"])


class Report:
    def __init__(self, title: str):
        self.title = title
        self.tests: list[Test] = []
        self.remarks: list[str] = []  # that cost no points

    def test(self, name: str, points: float, problems: list[str], note: str = "") -> None:
        """Adds a test. Its points are lost if there are problems; the first three are shown."""
        shown = list(dict.fromkeys(problems))
        if len(shown) > 3:
            shown = [*shown[:3], f"... and {len(shown) - 3} more"]
        self.tests.append(Test(name, points, shown, note))

    @property
    def score(self) -> float:
        return sum(test.score for test in self.tests)

    @property
    def max_score(self) -> float:
        return sum(test.max_score for test in self.tests)

    def text(self) -> str:
        lines, shown = [self.title], set()
        for test in self.tests:
            mark = "pass" if not test.problems else "FAIL"
            lines.append(f"  {mark} {test.score:g}/{test.max_score:g}  {test.name}")
            if test.problems and test.problems[0] in shown:
                lines.append("            as above")
            elif test.problems or test.note:
                lines += [f"            {line}" for line in test.output.splitlines()]
            shown.update(test.problems)
        lines += [f"  note: {remark}" for remark in self.remarks]
        lines.append(f"  {self.score:g} of {self.max_score:g} points")
        return "\n".join(lines)

    def results(self) -> dict:
        """As https://gradescope-autograders.readthedocs.io/en/latest/specs/ describes."""
        return {
            "score": self.score,
            "max_score": self.max_score,
            "output": "\n".join([self.title, *self.remarks]),
            "output_format": "text",
            "tests": [
                {"name": test.name, "score": test.score, "max_score": test.max_score, "output": test.output,
                 "status": "failed" if test.problems else "passed"}
                for test in self.tests
            ],
        }

    def write(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.results(), file, indent=1)
            file.write("\n")
