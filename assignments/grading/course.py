"""The command line of the grader."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys

from grading.build import ASSIGNMENTS, Builder, CannotGrade, DoesNotBuild, find_build, interpreter
from grading.report import Report
from grading.worlds import Worlds

# Number: the folder, the module of the grader, and the name of the student's file without its ending.
COURSE = {
    1: ("1-ring", "ring", "ring"),
    2: ("2-ddp", "ddp", "ddp"),
    3: ("3-zero", "zero", "zero"),
    4: ("4-fsdp", "fsdp", "fsdp"),
    5: ("5-strategy", "strategies", "strategies"),
    6: ("6-wrap", "wrap", "wrap"),
    7: ("7-bug", "bug", "answers"),
}


class Student:
    """A student's file, and how to run it as ranks."""

    def __init__(self, file: pathlib.Path, language: str, options: argparse.Namespace, build: pathlib.Path):
        self.file, self.language, self.options, self.build = file, language, options, build

    def command(self, harness: str) -> list[str]:
        """The command of one rank. Throws DoesNotBuild, CannotGrade."""
        if self.language == "python":
            harness_file = ASSIGNMENTS / "grading" / "ranks" / f"{harness}_ranks.py"
            return [interpreter(self.options.interpreter), str(harness_file), str(self.file)]
        return [str(Builder(self.build).program(f"{harness}_harness.cpp", self.file, ASSIGNMENTS / COURSE[self.options.number][0]))]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="grade", description="Builds or loads your file, runs it over several worlds, and says what is wrong.",
                                     epilog="Exit code: 0 all points, 1 fewer, 2 it can't be graded.")
    parser.add_argument("number", metavar="N", type=int, choices=sorted(COURSE), help="the assignment: " + ", ".join(
        f"{number} ({folder})" for number, (folder, _, _) in COURSE.items()))
    parser.add_argument("file", metavar="FILE", nargs="?", type=pathlib.Path, help="your file; default: the one in the assignment's folder")
    language = parser.add_mutually_exclusive_group()
    language.add_argument("--cpp", dest="language", action="store_const", const="cpp", help="grade C++ (the default, unless FILE ends in .py)")
    language.add_argument("--python", dest="language", action="store_const", const="python", help="grade Python")
    parser.add_argument("--json", metavar="FILE", help="write Gradescope's results.json")
    parser.add_argument("--build", metavar="DIR", help="the build folder of Tessera; default: build/release, or TESSERA_BUILD_DIR")
    parser.add_argument("--interpreter", metavar="PYTHON", help="Python with NumPy and the package; default: TESSERA_PYTHON, or this one")
    parser.add_argument("--limit", metavar="SECONDS", type=float, default=60, help="the longest that one world may take; default: 60")
    parser.add_argument("--keep", metavar="DIR", help="keep what the ranks reported")
    return parser.parse_args(arguments)


def own_file(number: int, language: str) -> pathlib.Path:
    """The file in the assignment's folder that students edit."""
    folder, _, stem = COURSE[number]
    answers = ASSIGNMENTS / folder / f"{stem}.json"  # the same for both languages
    return answers if answers.exists() else ASSIGNMENTS / folder / f"{stem}{'.py' if language == 'python' else '.cpp'}"


def student_of(options: argparse.Namespace) -> Student:
    by_name = "python" if options.file and options.file.suffix == ".py" else "cpp"
    language = options.language or by_name
    file = options.file or own_file(options.number, language)
    if not file.is_file():
        raise CannotGrade(f"there is no file {file}")
    return Student(file, language, options, find_build(options.build))


def grade(options: argparse.Namespace) -> Report:
    """Throws CannotGrade."""
    student = student_of(options)
    module = importlib.import_module(f"grading.{COURSE[options.number][1]}")
    report = Report(f"assignment {options.number}, {COURSE[options.number][0]}: {student.file.name}")
    with Worlds(student.build / "tessera", options.limit, options.keep) as worlds:
        try:
            module.grade(student, worlds, report)
        except DoesNotBuild as error:
            first = [line for line in str(error).splitlines() if "error" in line or "undefined" in line][:3]
            report.tests.clear()
            report.test("it compiles", module.POINTS, first or [str(error)[-500:]])
        if worlds.alone:
            report.remarks.append(f"to see what happened, or in a debugger: {worlds.alone}")
    return report


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        report = grade(options)
    except CannotGrade as error:
        print(f"grade: {error}", file=sys.stderr)
        return 2
    print(report.text())
    if options.json:
        report.write(options.json)
    return 0 if report.score == report.max_score else 1
