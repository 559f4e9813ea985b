"""A copy of the source tree and its build, which takes from a finished build what a change of the copy leaves as it is.

CMake configures the copy with the settings of the finished build. Each compilation of the copy whose command and inputs are
those of the finished build is replaced by a link to its output there; the others run, and everything is linked anew.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess

JOBS = 2
OUTPUT = re.compile(r" -o (\S+) -c ")


class Failed(Exception):
    """A step that failed; the text says which one, and what it printed."""


def run(what, command, **options):
    """Runs the command; raises Failed, with the end of its output, unless it succeeds. Returns its output."""
    done = subprocess.run(command, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **options)
    if done.returncode != 0:
        raise Failed(f"{what}:\n{done.stdout[-4000:]}")
    return done.stdout


def commands(build, targets):
    """The commands that make these targets, in order, as (output, command); output is '' unless the command compiles."""
    for command in run("ninja", ["ninja", "-C", build, "-t", "commands", *targets]).splitlines():
        found = OUTPUT.search(command)
        if not command.startswith("ninja: "):
            yield found[1] if found else "", command


def inputs(build, outputs):
    """The files that each output of a build was compiled from, by output."""
    found = {}
    for line in run("ninja", ["ninja", "-C", build, "-t", "deps", *outputs]).splitlines():
        if line.startswith("    "):
            found[name].append(line.strip())
        elif line.endswith("(VALID)"):
            name = line.partition(": ")[0]
            found[name] = []
    return found


class ScratchBuild:
    def __init__(self, root, build, folder):
        self.root, self.build = root, build
        self.tree = folder / "tree"
        self.out = self.tree / build.relative_to(root) if build.is_relative_to(root) else folder / "build"
        shutil.copytree(root, self.tree, symlinks=True,
                        ignore=lambda at, names: {name for name in names if name in (".git", "build", "__pycache__") or pathlib.Path(at, name) == build})
        self.same_files = {}

    def moved(self, text):
        """The text with the folders of the copy."""
        return text.replace(str(self.build), str(self.out)).replace(str(self.root), str(self.tree))

    def apply(self, patch):
        """Applies a patch, without fuzz."""
        run("the patch does not apply", ["patch", "-p1", "--fuzz=0", "--batch", "--forward", "--no-backup-if-mismatch"], input=patch, cwd=self.tree)

    def configure(self):
        self.out.mkdir(parents=True)
        (self.out / "CMakeCache.txt").write_text(self.moved((self.build / "CMakeCache.txt").read_text()))
        for compiler in (self.build / "CMakeFiles").glob("[0-9]*"):  # what CMake knows of the compilers
            shutil.copytree(compiler, self.out / "CMakeFiles" / compiler.name)
        run("CMake does not configure it", ["cmake", "-S", self.tree, "-B", self.out])

    def programs(self, tests):
        """The outputs of the build that the commands of these tests contain."""
        listed = json.loads(run("ctest", ["ctest", "--test-dir", self.build, "--show-only=json-v1", "-R", tests]))["tests"]
        words = {os.path.relpath(word, self.build) for test in listed for word in test["command"] if word.startswith(f"{self.build}/")}
        for listing in self.out.rglob("CTestTestfile.cmake"):  # CTest shows no commands of programs that are not built
            for name, command in re.findall(r"^add_test\(\[=\[(.+?)\]=\] (.+)\)$", listing.read_text(), re.M):
                if re.search(tests, name):
                    words |= {os.path.relpath(word, self.out) for word in re.findall(r'"([^"]+)"', command) if word.startswith(f"{self.out}/")}
        outputs = run("ninja", ["ninja", "-C", self.out, "-t", "targets", "all"])
        return sorted(words & set(re.findall(r"^(.+): ", outputs, re.M)))

    def is_same(self, path):
        """Whether a file that the finished build read is the same in the copy."""
        real = os.path.realpath(self.build / path)
        if real not in self.same_files:
            twin = pathlib.Path(self.moved(real))
            made = real.startswith(f"{self.build}/") and not twin.exists()  # by the build: its own command decides
            self.same_files[real] = str(twin) == real or made or (
                twin.exists() and self.moved(pathlib.Path(real).read_text(errors="replace")) == twin.read_text(errors="replace"))
        return self.same_files[real]

    def make(self, targets):
        """Builds the targets. Returns the objects that it compiled."""
        steps = list(commands(self.out, targets))
        known = {output: command for output, command in commands(self.build, ["all"]) if output}
        read = inputs(self.build, [output for output, _ in steps if output in known])
        self.same_files.clear()
        stale = []
        for output, command in steps:
            if not output:
                continue
            made = self.out / output
            made.parent.mkdir(parents=True, exist_ok=True)
            made.unlink(missing_ok=True)
            if self.moved(known.get(output, "")) == command and output in read and all(map(self.is_same, read[output])):
                made.symlink_to(self.build / output)
            else:
                stale.append((output, command))
        with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
            list(pool.map(self.shell, [command for _, command in stale]))
        for output, command in steps:
            if not output:
                self.shell(command)
        return [output for output, _ in stale]

    def shell(self, command):
        uncached = {**os.environ, "CCACHE_DISABLE": "1"}  # the copy has a new path each time: a cache would only grow
        run("it does not build", command, shell=True, cwd=self.out, env=uncached)

    def test(self, tests):
        """Runs the tests whose names match."""
        run("a test fails", ["ctest", "--test-dir", self.out, "--parallel", str(JOBS), "--no-tests=error", "--output-on-failure", "-R", tests])
