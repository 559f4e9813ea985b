"""The table of deliberate mistakes: the change, and the tests that should detect it."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclasses.dataclass(frozen=True)
class Mistake:
    """`find` occurs exactly once in `file`. A test is a regular expression of CTest names, or NAME::CASE: a case of a
    Python test, as unittest spells it."""
    name: str
    file: str
    find: str
    replace: str
    tests: tuple
    why: str  # effect that a user would see


def mistake(name, file, find, replace, tests, why):
    return Mistake(name, file, find, replace, (tests,) if isinstance(tests, str) else tuple(tests), why)


def load():
    """All mistakes, in the order of their files' names."""
    found = []
    for path in sorted((HERE / "mistakes").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"mistakes_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.MISTAKES
    return found


def problem_of(one, root):
    """The reason why the mistake can't be made in the tree below `root`, or ''."""
    path = root / one.file
    if not path.is_file():
        return f"{one.name}: {one.file} is not there"
    count = path.read_text().count(one.find)
    if count != 1:
        return f"{one.name}: its text occurs {count} times in {one.file}, needs once"
    if one.find == one.replace:
        return f"{one.name}: changes nothing"
    return ""


class Tests:
    """The tests of a build folder, by name."""

    def __init__(self, build):
        shown = subprocess.run(["ctest", "--test-dir", str(build), "--show-only=json-v1"], text=True, capture_output=True, check=True)
        self.commands = {test["name"]: test.get("command") for test in json.loads(shown.stdout)["tests"]}
        declared = {program for file in ROOT.glob("tests/**/CMakeLists.txt") for program in re.findall(r"tessera_test\((\w+)", file.read_text())}
        # Left out of this build, for want of CUDA, or not compiled yet: ctest lists the latter as PREFIX_NOT_BUILT. Their cases are unknown.
        self.not_built = {program for program in declared if not any(re.match(rf"{program}(\.|$)", one) for one in self.commands)}

    def problem_of(self, test):
        """The reason why a test of the table doesn't exist, or ''."""
        name, _, case = test.partition("::")
        if not case:
            known = re.match(r"\^?(\w*)", name)[1] in self.not_built or any(re.search(name, one) for one in self.commands)
            return "" if known else f"no test is called {name}"
        if self.commands.get(name) is None:
            return f"no test is called {name}"
        script = next((pathlib.Path(word) for word in self.commands[name] if word.endswith(".py")), None)
        if script is None:
            return f"{name} is no Python test"
        text = script.read_text()
        wanted = re.fullmatch(r"(\w+)\.(test_\w+)", case)
        if wanted and f"class {wanted[1]}(" in text and f"def {wanted[2]}(" in text:
            return ""
        return f"{name} has no case {case}"
