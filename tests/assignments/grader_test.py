"""The grader gives a solution all points, a skeleton none, and takes those of each typical mistake with a message that helps.

    grader_test.py BUILD NUMBER cpp|python [--interpreter PYTHON] [--all] [--only TEXT] [--show]

Of the mistakes the first three and those marked `always` are tried, with --all every one.

Exit code 77: this Python can't run ranks, so that the Python half can't be tested.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "assignments")]
sys.dont_write_bytecode = True

from grading.build import CannotGrade, interpreter  # noqa: E402
from grading.course import COURSE, own_file  # noqa: E402
from mistakes import MISTAKES  # noqa: E402


class Tried:
    """What the grader said of a file."""

    def __init__(self, options, file, folder):
        results = folder / "results.json"
        results.unlink(missing_ok=True)
        command = [sys.executable, str(ROOT / "assignments" / "grade"), str(options.number), str(file), f"--{options.language}",
                   "--build", options.build, "--json", str(results)]
        if options.interpreter:
            command += ["--interpreter", options.interpreter]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.text, self.code = done.stdout + done.stderr, done.returncode
        if not results.exists():
            raise SystemExit(f"{file}: the grader ended with {self.code}:\n{self.text}")
        self.results = json.loads(results.read_text())
        self.tests = self.results["tests"]

    def problem_of(self, mistake):
        """What is wrong with how the grader judged a mistake, or ""."""
        found = [test for test in self.tests if mistake.test in test["name"]]
        if len(found) != 1:
            return f"no test is called like '{mistake.test}'"
        if found[0]["score"] != 0 or found[0]["status"] != "failed":
            return f"'{mistake.test}' keeps its points"
        if not re.search(mistake.message, found[0]["output"], re.S):
            return f"the message does not match {mistake.message!r}: {found[0]['output']}"
        kept = [test for test in self.tests if mistake.keeps and mistake.keeps in test["name"]]
        if mistake.keeps and (len(kept) != 1 or kept[0]["status"] != "passed"):
            return f"'{mistake.keeps}' should keep its points: {kept}"
        return ""


def failures(options, folder):
    skeleton = own_file(options.number, options.language)
    stem, ending = COURSE[options.number][2], skeleton.suffix
    solution = (HERE / "solutions" / f"{stem}{ending}").read_text()
    planted = [one for one in MISTAKES[stem, options.language] if options.only in one.name]
    file = folder / f"{stem}{ending}"

    def tried(text):
        file.write_text(text)
        one = Tried(options, file, folder)
        if options.show:
            print(one.text)
        return one

    if not (options.all or options.only):
        planted = [one for index, one in enumerate(planted) if index < 3 or one.always]
    if not options.only:
        good = tried(solution)
        if good.results["score"] != good.results["max_score"] or good.code != 0:
            yield f"the solution loses points:\n{good.text}"
        empty = Tried(options, skeleton, folder)
        if empty.results["score"] > 0.2 * empty.results["max_score"] or empty.code != 1:
            yield f"the skeleton gets points:\n{empty.text}"
        if len(planted) < 3:
            yield "fewer than three mistakes are planted"
    for one in planted:
        if solution.count(one.find) != 1:
            yield f"{one.name}: its text occurs {solution.count(one.find)} times in the solution"
            continue
        result = tried(solution.replace(one.find, one.replace))
        problem = result.problem_of(one)
        if problem:
            yield f"{one.name}: {problem}\n{result.text}"
        print(f"{one.name}: {'FAILED' if problem else 'found'}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build")
    parser.add_argument("number", type=int)
    parser.add_argument("language", choices=("cpp", "python"))
    parser.add_argument("--interpreter")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    if options.language == "python" and (ROOT / "assignments" / "grading" / "ranks" / f"{COURSE[options.number][1]}_ranks.py").exists():
        try:
            interpreter(options.interpreter)
        except CannotGrade as error:
            print(f"not tested: {error}")
            return 77
    with tempfile.TemporaryDirectory(prefix="tessera-assignments-") as folder:
        found = list(failures(options, pathlib.Path(folder)))
    print("\n".join(found) or "all as they should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
