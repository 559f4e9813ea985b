"""The lessons of docs/learn, done as a student does them: learn_test.py TOOL PAGE [--write], or learn_test.py --registered NAMES.

Every line of a `console` block that starts with "$ " is run, in order, in a folder of the lesson, and what it prints is compared with the
lines below it: "..." stands for any lines, <ms> for a number, and runs of spaces are equal. Losses and hashes are the same on every
processor. A comment

    <!-- check FILE EXPRESSION == VALUE -->        also !=, <, >, and: in A..B

evaluates an expression over a JSON file that a command has written; FILE may be `arithmetic`, for an expression without names. Every
number of an answer (what is below <details>) must be in a check or in the outputs of the page. --write replaces outputs that are no
longer so.

Negative controls, in each run: the page with another digit in an output, in a check and in an answer, and a check whose file no command
has written, must fail.
"""

import ast
import json
import operator
import os
import pathlib
import re
import subprocess
import sys
import tempfile

LIMIT = 60  # seconds, for a command
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
CHECK = re.compile(r"<!-- check (\S+) (.+?) -->", re.S)
ANSWER = re.compile(r"<details>(.*?)</details>", re.S)
MARKER = re.compile(r"^\d\. ", re.M)  # of a list
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")
PARTS = ("Predict", "Run", "Check", "What would have to be different", "Remember")  # of every lesson
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow}
FUNCTIONS = {"sum": lambda values: sum(values.values() if isinstance(values, dict) else values), "len": len, "max": max, "min": min, "abs": abs, "round": round}
COMPARISONS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}


class Wrong(Exception):
    """What a page says is not so."""


def evaluate(expression, document, folder):
    """The value of an expression whose names are keys of the document; file("other.json") is another document."""
    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return document[node.id]
        if isinstance(node, ast.Attribute):
            return value(node.value)[node.attr]
        if isinstance(node, ast.Subscript):
            return value(node.value)[value(node.slice)]
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Call) and node.func.id == "file":
            return json.loads((folder / node.args[0].value).read_text())
        if isinstance(node, ast.Call):
            return FUNCTIONS[node.func.id](*(value(argument) for argument in node.args))
        if isinstance(node, (ast.List, ast.Tuple)):
            return [value(element) for element in node.elts]
        raise Wrong(f"'{expression}' has a part that checks don't know")
    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (KeyError, IndexError, TypeError, SyntaxError) as error:
        raise Wrong(f"'{expression}': {error!r}") from error


def check(file, text, folder):
    """Raises Wrong unless the claim holds."""
    path = folder / file
    if file != "arithmetic" and not path.exists():
        raise Wrong(f"check {file} {text}: no command above has written {file}")
    document = {} if file == "arithmetic" else json.loads(path.read_text())
    if between := re.fullmatch(r"(.+) in (\S+)\.\.(\S+)", text):
        value = evaluate(between[1], document, folder)
        if not float(between[2]) <= value <= float(between[3]):
            raise Wrong(f"check {file} {text}: it is {value}")
        return
    parts = re.fullmatch(r"(.+?) (==|!=|<|>) (.+)", text)
    if not parts:
        raise Wrong(f"check {file} {text}: no comparison")
    left, right = (evaluate(part, document, folder) for part in (parts[1], parts[3]))
    equal = parts[2] == "==" and isinstance(left, float) and isinstance(right, (int, float)) and abs(left - right) <= 1e-9 * abs(right)
    if not equal and not COMPARISONS[parts[2]](left, right):
        raise Wrong(f"check {file} {text}: it is {left}, not {parts[2]} {right}")


def commands(block):
    """(command, expected lines) of a console block; a backslash continues a command."""
    found = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append([line[2:], []])
        elif found and found[-1][0].endswith("\\") and not found[-1][1]:
            found[-1][0] = found[-1][0][:-1] + line
        elif found:
            found[-1][1].append(line)
        elif line:
            raise Wrong(f"'{line}' is above any command")
    return found


def same(lines, printed):
    """Whether a command printed the lines of a page."""
    text = ""
    for line in lines:
        if line.strip() == "...":
            text += r"(?:[^\n]*\n)*?"
            continue
        words = [re.escape(word).replace("<ms>", r"\d+(?:\.\d+)?") for word in line.split()]
        text += r"[ \t]*" + r"[ \t]+".join(words) + r"[ \t]*\n"
    return re.fullmatch(text, printed) is not None


class Student:
    """Does a lesson, and remembers what commands have printed, so that controls need not run them again."""

    def __init__(self, tool):
        self.folder = tempfile.TemporaryDirectory()
        self.place = pathlib.Path(self.folder.name)
        tool = pathlib.Path(tool).resolve()
        self.environment = {**os.environ, "PATH": f"{tool.parent}:{tool.parent / 'examples'}:{os.environ['PATH']}"}
        self.printed = {}

    def run(self, command):
        if command not in self.printed:
            done = subprocess.run(["bash", "-c", command], cwd=self.place, env=self.environment, text=True, timeout=LIMIT,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode != 0:
                raise Wrong(f"$ {command}\nended with {done.returncode}:\n{done.stdout}")
            self.printed[command] = done.stdout
        return self.printed[command]

    def do(self, page):
        """Raises Wrong at the first claim of the page that doesn't hold."""
        known = ""
        for match in sorted([*BLOCK.finditer(page), *CHECK.finditer(page)], key=re.Match.start):
            if match.re is CHECK:
                check(match[1], " ".join(match[2].split()), self.place)
                known += match[2] + " "
                continue
            for command, expected in commands(match[1]):
                printed = self.run(command)
                known += "\n".join([command, printed, *expected, ""])
                if not same(expected, printed):
                    raise Wrong(f"$ {command}\nprinted\n{printed}\nand not\n" + "\n".join(expected))
        numbers = {number.replace(",", "") for number in NUMBER.findall(known)}
        for answer in ANSWER.findall(page):
            for number in NUMBER.findall(MARKER.sub("", answer)):
                if number.replace(",", "") not in numbers:
                    raise Wrong(f"{number} of an answer is in no check and no output")

    def fill(self, page):
        """The page with the outputs that commands have now, except where lines are left out."""
        def filled(match):
            text = "```console\n"
            for command, lines in commands(match[1]):
                printed = self.run(command)
                if not same(lines, printed) and "..." not in lines:
                    lines = without_times(printed.splitlines())
                text += f"$ {command}\n" + "".join(line + "\n" for line in lines)
            return text + "```"
        return BLOCK.sub(filled, page)


def without_times(lines):
    """Lines of a table of compare, with <ms> for what differs from run to run."""
    timed, result = False, []
    for line in lines:
        if line.endswith("step ms  exposed  tokens/s"):
            timed = True
        elif timed:
            line = re.sub(r"[\d.]+( +)[\d.]+( +)\d+$", r"<ms>\1<ms>\2<ms>", line)
        result.append(line)
    return result


def changed(page, spans):
    """The page with another digit at one place of each kind, as (what, page)."""
    for what, (begin, end) in spans.items():
        digits = [place for place in range(begin, end) if page[place].isdigit()]
        if not digits:
            raise Wrong(f"no digit in {what}")
        place = digits[len(digits) // 2]
        yield what, page[:place] + str((int(page[place]) + 5) % 10) + page[place + 1:]


def controls(student, page):
    """Raises Wrong if a page with a mistake is found right."""
    block = next(match for match in BLOCK.finditer(page) if re.search(r"\n(?!\$ )[^\n]*\d", match[1]))
    line = re.search(r"\n((?!\$ )[^\n]*\d[^\n]*)", block[0])
    claim = next(match for match in CHECK.finditer(page) if match[1] != "arithmetic")
    value = re.search(r"(?:==|!=|<|>|in) (\S*)$", claim[2])
    answer = next(match for match in ANSWER.finditer(page) if NUMBER.search(match[1]))
    number = max(NUMBER.finditer(answer[1]), key=lambda found: len(found[0]))  # the longest: no other figure has its digits
    spans = {"an output": (block.start() + line.start(1), block.start() + line.end(1)),
             "a check": (claim.start(2) + value.start(1), claim.start(2) + value.end(1)),
             "an answer": (answer.start(1) + number.start(), answer.start(1) + number.end())}
    mistakes = dict(changed(page, spans))
    mistakes["a check without a command"] = page[:block.start()] + "<!-- check gone.json x == 1 -->\n" + page[block.start():]
    for what, wrong in mistakes.items():
        try:
            student.do(wrong)
        except Wrong:
            continue
        raise Wrong(f"control: a mistake in {what} is not seen")


def complete(page):
    """Raises Wrong unless the page has the parts of a lesson."""
    for part in PARTS:
        if f"\n## {part}" not in page:
            raise Wrong(f"no heading '{part}'")
    remembered = page.split("\n## Remember")[1]
    if len(re.findall(r"^\d\. ", remembered, re.M)) != 3:
        raise Wrong("a lesson ends with three lines to remember")
    if not (ANSWER.search(page) and CHECK.search(page) and BLOCK.search(page)):
        raise Wrong("a lesson has answers, checks and commands")


def registered(names):
    """Raises Wrong unless these are the lessons of the folder, and the course links each."""
    folder = pathlib.Path(__file__).parents[2] / "docs" / "learn"
    pages = sorted(path.stem for path in folder.glob("[0-9]-*.md"))
    linked = re.findall(r"\]\((\d-\w+)\.md\)", (folder / "README.md").read_text())
    if pages != sorted(names):
        raise Wrong(f"lessons {pages}, but tests of {sorted(names)}")
    if not set(pages) <= set(linked):
        raise Wrong(f"README.md doesn't link {sorted(set(pages) - set(linked))}")


def main():
    if sys.argv[1] == "--registered":
        registered(sys.argv[2:])
        try:
            registered(sys.argv[2:-1])
        except Wrong:
            return
        raise Wrong("control: a lesson without a test is not seen")
    student, path = Student(sys.argv[1]), pathlib.Path(sys.argv[2])
    page = path.read_text()
    if sys.argv[3:] == ["--write"]:
        page = student.fill(page)
        path.write_text(page)
    complete(page)
    student.do(page)
    controls(student, page)


try:
    main()
except Wrong as wrong:
    raise SystemExit(str(wrong))
