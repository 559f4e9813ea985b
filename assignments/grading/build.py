"""Finds the build of Tessera and the interpreter, and compiles a student's file with the harness of its assignment."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import subprocess
import sys

ASSIGNMENTS = pathlib.Path(__file__).resolve().parent.parent
ROOT = ASSIGNMENTS.parent
CPP = ASSIGNMENTS / "grading" / "cpp"
FLAGS = ["-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-Wall", "-Wextra"]
COMMON = ["recorder.cpp", "fact.cpp", "grading.cpp", "memory.cpp"]  # of every program
TRAINING = ["model.cpp", "reference.cpp"]  # of those that train


class CannotGrade(Exception):
    """The grader lacks something; not the student's fault."""


class DoesNotBuild(Exception):
    """The student's file does not compile; the text is the compiler's."""


def find_build(given: str | None) -> pathlib.Path:
    """The build folder, which has the tool, the library and its headers."""
    chosen = given or os.environ.get("TESSERA_BUILD_DIR")
    candidates = [pathlib.Path(chosen)] if chosen else [ROOT / "build" / "release", *sorted((ROOT / "build").glob("*"))]
    for candidate in candidates:
        if (candidate / "tessera").is_file() and (candidate / "include" / "tessera").exists():
            return candidate.resolve()
    raise CannotGrade(f"no build of Tessera in {', '.join(map(str, candidates[:1]))}; run scripts/setup, or pass --build DIR")


def compiler_of(build: pathlib.Path) -> list[str]:
    """The compiler that the library was built with, and the flags of its sanitizer."""
    cache = (build / "CMakeCache.txt").read_text()
    found = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.+)$", cache, re.M)
    sanitizer = re.search(r"^TESSERA_SANITIZE:\w+=(\S+)$", cache, re.M)
    return [found[1] if found else "c++", *([f"-fsanitize={sanitizer[1]}"] if sanitizer else [])]


def run_compiler(command: list[str]) -> None:
    done = subprocess.run(command, text=True, errors="replace", capture_output=True, check=False)
    if done.returncode < 0 or re.search(r"fatal error: \w+ signal terminated|No space left", done.stderr):
        raise CannotGrade(f"the compiler was stopped: {done.stderr.strip()[-200:]}")
    if done.returncode != 0:
        raise DoesNotBuild(done.stderr)


class Builder:
    """Compiles into a folder of the build, where objects of the harness are kept for the next time."""

    def __init__(self, build: pathlib.Path):
        self.build = build
        self.folder = build / "assignments"
        self.folder.mkdir(exist_ok=True)
        self.compiler = compiler_of(build)
        self.includes = [f"-I{build / 'include'}", f"-I{ASSIGNMENTS}"]

    def _object(self, source: pathlib.Path, target: pathlib.Path, flags: list[str]) -> None:
        partial = target.with_suffix(f".{os.getpid()}.o")
        run_compiler([*self.compiler, *FLAGS, *flags, *self.includes, "-c", str(source), "-o", str(partial)])
        partial.replace(target)

    def _kept_object(self, name: str) -> pathlib.Path:
        """An object of the grader, compiled again if a header of the grader, of an assignment or of the library is newer."""
        source = CPP / name
        target = self.folder / f"{source.stem}.o"
        headers = [*CPP.glob("*.h"), *ASSIGNMENTS.glob("*/*.h"), self.build / "libtessera.so"]
        newest = max(path.stat().st_mtime for path in [source, *headers])
        if not target.exists() or target.stat().st_mtime < newest:
            try:
                self._object(source, target, [])
            except DoesNotBuild as error:
                raise CannotGrade(f"the grader's {name} does not compile:\n{error}") from None
        return target

    def program(self, harness: str, student: pathlib.Path, public: pathlib.Path) -> pathlib.Path:
        """The program of a student's file, linked with a harness. `public`: the folder with the assignment's header."""
        trains = "reference.h" in (CPP / harness).read_text()
        key = hashlib.sha256(str(student.resolve()).encode()).hexdigest()[:12]
        target = self.folder / f"{student.stem}-{key}"
        own = target.with_suffix(".student.o")
        parts = [self._kept_object(name) for name in [*COMMON, *(TRAINING if trains else ()), harness]]
        self._object(student, own, [f"-I{public}"])
        run_compiler([*self.compiler, str(own), *map(str, parts), f"-L{self.build}", "-ltessera", "-ltessera-comm",
                      f"-Wl,-rpath,{self.build}", "-pthread", "-o", str(target)])
        own.unlink()
        return target


    def module(self, source: pathlib.Path, target: pathlib.Path) -> None:
        """A plug-in of a student's file."""
        run_compiler([*self.compiler, *FLAGS, "-fPIC", "-shared", "-fvisibility=hidden", *self.includes, str(source), "-o", str(target),
                      f"-L{self.build}", "-ltessera", "-ltessera-comm"])


def interpreter(given: str | None) -> str:
    """A Python that has NumPy and the package: the given one, TESSERA_PYTHON's, this one, or that of python/test."""
    chosen = given or os.environ.get("TESSERA_PYTHON")
    candidates = [chosen] if chosen else [sys.executable, str(ROOT / "build" / "python" / "venv" / "bin" / "python")]
    reasons = []
    for candidate in candidates:
        try:
            done = subprocess.run([candidate, "-c", "import numpy, tessera; tessera.init"], text=True, capture_output=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return candidate
        reasons.append(f"{candidate} can't run ranks: {(done.stderr.strip().splitlines() or ['it does not start'])[-1]}")
    raise CannotGrade(f"{'; '.join(reasons)}; install both with pip install numpy ./python, or pass --interpreter")
