"""Makes deliberate mistakes in a scratch copy of the tree, one at a time, and says which of them the tests see.

    mutate.py [--only REGEX] [--list] [--jobs N] [--keep-going] [--limit SECONDS] [--no-control] [--results FILE]
    mutate.py --random N [--seed S] ...   # N mistakes that random_mistakes.py makes, instead of those of the table
    mutate.py --coverage                  # which lines the tests execute, for --random; an hour

By hand, not in CI: a mistake costs a compilation and its tests. The copy is a worktree of HEAD in build/mutation/tree with
a build folder of its own; with ccache its first build is cheap. For a mistake only the programs that its tests name are
built; before one counts as survived, everything is, and the tests run again. Every mistake ends as one of

    caught           a test failed, or its own deadline reported a hang
    survived         all tests passed: one is missing
    timeout          a test did not end in time, and no other failed: a hang that nobody reports
    does not build   the mistake is none that a compiler lets pass
    does not apply   the text that it changes is not there (once) any more

Exit code 0: all were caught. Without --keep-going it stops at the first that was not.
"""

import argparse
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import random_mistakes
import table

SCRATCH = table.ROOT / "build" / "mutation"
TREE = SCRATCH / "tree"
BUILD = TREE / "build" / "release"
LOG = SCRATCH / "log"
EXECUTED = SCRATCH / "executed.json"


def run(command, limit=None, **options):
    """Runs the command; returns exit code and output. Code None: killed after `limit` seconds, with its child processes."""
    process = subprocess.Popen(list(map(str, command)), text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True, **options)
    try:
        out, _ = process.communicate(timeout=limit)
        return process.returncode, out
    except subprocess.TimeoutExpired:
        return None, stop(process)
    except BaseException:
        stop(process)
        raise


def stop(process):
    """Kills a process and its group, and returns its output."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return process.communicate()[0]


def require(command, **options):
    code, out = run(command, **options)
    if code != 0:
        sys.exit(f"mutate.py: {' '.join(map(str, command))} failed:\n{out[-4000:]}")
    return out


def only_one():
    """Locks a file for the lifetime of this process: two runs would make their mistakes in the same tree."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    lock = open(SCRATCH / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"mutate.py: another run uses {TREE}; wait for it, or end it")
    return lock


def prepare(jobs):
    """Checks out HEAD in the scratch tree and builds it."""
    head = require(["git", "-C", table.ROOT, "rev-parse", "HEAD"]).strip()
    if (TREE / ".git").exists():
        require(["git", "-C", TREE, "reset", "--hard", head])
    else:
        require(["git", "-C", table.ROOT, "worktree", "prune"])
        require(["git", "-C", table.ROOT, "worktree", "add", "--detach", "--force", TREE, head])
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    require(["cmake", "--preset", "release", *launcher, "-DTESSERA_TESTS=ON", "-DTESSERA_EXAMPLES=OFF", "-DTESSERA_BENCH=OFF"], cwd=TREE)
    require(["ninja", "-C", BUILD, f"-j{jobs}"])


def measure_coverage(jobs):
    """Builds the scratch tree for gcov, runs its tests and writes EXECUTED: numbers of lines by file."""
    build = TREE / "build" / "coverage"
    require(["cmake", "-S", TREE, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=--coverage -O0", "-DTESSERA_TESTS=ON",
             "-DTESSERA_EXAMPLES=OFF", "-DTESSERA_BENCH=OFF", "-DTESSERA_CUDA=OFF"])
    require(["ninja", "-C", build, f"-j{jobs}"])
    run(["ctest", "--test-dir", build, "-j", jobs, "-L", "unit|world|tools|backends", "--timeout", 600])  # slow tests may fail here
    executed = {}
    for data in build.rglob("*.gcda"):
        for line in require(["gcov", "--json-format", "--stdout", data], cwd=data.parent).splitlines():
            for file in json.loads(line)["files"]:
                path = pathlib.Path(os.path.realpath(build / file["file"]))
                if path.is_relative_to(TREE):
                    lines = executed.setdefault(str(path.relative_to(TREE)), set())
                    lines.update(one["line_number"] for one in file["lines"] if one["count"] > 0)
    EXECUTED.write_text(json.dumps({file: sorted(lines) for file, lines in sorted(executed.items())}))


def chosen_mistakes(options):
    if options.random is None:
        return [one for one in table.load() if re.search(options.only, one.name) or re.search(options.only, one.file)]
    executed = json.loads(EXECUTED.read_text()) if EXECUTED.exists() else None
    if executed is None:
        print("mutate.py: which lines the tests execute is not known (--coverage); any line may change")
    return [one for one in random_mistakes.generate(options.random, options.seed, executed) if re.search(options.only, one.file)]


def failures_in(output):
    """The tests that failed, and those that CTest ended at their timeout."""
    failed, late = [], []
    for line in output.splitlines():
        seen = re.search(r"Test +#\d+: (\S+).*\*\*\*(\w+)", line)
        if seen:
            (late if seen[2].startswith("Timeout") else failed).append(seen[1])
    return failed, late


class Runner:
    def __init__(self, jobs, limit):
        self.jobs, self.limit = jobs, limit
        self.tests = table.Tests(BUILD)
        lines = require(["ninja", "-C", BUILD, "-t", "targets", "all"]).splitlines()
        self.outputs = {line.rpartition(": ")[0] for line in lines}

    def targets(self, names):
        """The programs in the commands of these tests, and the modules that programs load by name."""
        found = {"tessera_modules"}
        for name in names:
            entry, _, case = name.partition("::")
            matching = [entry] if case else [known for known in self.tests.commands if re.search(entry, known)]
            for known in matching:
                for word in self.tests.commands[known] or ():
                    if word.startswith(f"{BUILD}/"):
                        found.add(word[len(str(BUILD)) + 1:])
        return sorted(found & self.outputs)

    def test(self, names):
        """Runs tests of the table in order up to the first that fails; returns (failed, not ended)."""
        late = []
        for name in names:
            entry, _, case = name.partition("::")
            # In random order, since CTest begins with the slowest tests, and the first failure is enough.
            command = [*self.tests.commands[entry], case] if case else [
                "ctest", "--test-dir", BUILD, "-j", self.jobs, "--no-tests=error", "--stop-on-failure", "--schedule-random", "-R", name]
            code, out = run(command, self.limit)
            LOG.write_text(out)
            if case:
                failed, hung = [], []
            else:
                failed, hung = failures_in(out)
            if failed or (code not in (0, None) and not hung):
                return failed or [name], late
            late += hung or ([name] if code is None else [])
        return [], late

    def try_one(self, one):
        problem = table.problem_of(one, TREE)
        if problem:
            return "does not apply", problem
        path = TREE / one.file
        before = path.read_text()
        try:
            path.write_text(before.replace(one.find, one.replace))
            for targets in (self.targets(one.tests), []):
                code, out = run(["ninja", "-C", BUILD, f"-j{self.jobs}", *targets])
                if code != 0:
                    errors = [line for line in out.splitlines() if "error:" in line]
                    return "does not build", errors[0] if errors else out[-300:]
                failed, late = self.test(one.tests)
                if failed or late:
                    break
        finally:
            path.write_text(before)
        if failed:
            return "caught", f"{failed[0]}" + (f" and {len(failed) - 1} more" if len(failed) > 1 else "")
        return ("timeout", ", ".join(late)) if late else ("survived", "")

    def control(self, chosen):
        """Checks that the tests pass without a mistake: otherwise a failure would prove nothing."""
        failed, late = self.test(sorted({test for one in chosen for test in one.tests}))
        if failed or late:
            sys.exit(f"mutate.py: fails without a mistake: {', '.join(failed + late)}; see {LOG}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="mistakes whose name or file matches")
    parser.add_argument("--list", action="store_true", help="say what is in the table, and end")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="compilations and tests at a time")
    parser.add_argument("--keep-going", action="store_true", help="go on after one that was not caught")
    parser.add_argument("--limit", type=float, default=400, metavar="SECONDS", help="for each of a mistake's tests")
    parser.add_argument("--results", type=pathlib.Path, metavar="FILE", help="add each outcome to it, and leave out what it has")
    parser.add_argument("--no-control", action="store_true", help="don't run the tests without a mistake first")
    parser.add_argument("--random", type=int, metavar="N", help="N random mistakes instead of the table")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of --random")
    parser.add_argument("--coverage", action="store_true", help="find out which lines the tests execute, and end")
    options = parser.parse_args()
    chosen = chosen_mistakes(options)
    if not chosen:
        sys.exit(f"mutate.py: --only {options.only}: no mistake is called so; --list shows them")
    if options.list:
        for one in chosen:
            print(f"{one.name:40} {one.file}: {one.why}")
        return 0
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ends running tests, too
        signal.signal(ending, lambda *_: sys.exit("mutate.py: interrupted"))
    if options.results and options.results.exists():
        known = {line.split()[0] for line in options.results.read_text().splitlines() if line.strip()}
        chosen = [one for one in chosen if one.name not in known]
    lock = only_one()  # noqa: F841
    prepare(options.jobs)
    if options.coverage:
        measure_coverage(options.jobs)
        return 0
    runner = Runner(options.jobs, options.limit)
    if not options.no_control:
        Runner(options.jobs, None).control(chosen)
    counts = {}
    for number, one in enumerate(chosen, 1):
        begin = time.monotonic()
        outcome, detail = runner.try_one(one)
        counts[outcome] = counts.get(outcome, 0) + 1
        print(f"[{number}/{len(chosen)}] {outcome:15} {one.name:40} {time.monotonic() - begin:4.0f} s  {detail}", flush=True)
        if options.results:
            with options.results.open("a") as results:
                results.write(f"{one.name} {outcome} {detail}".rstrip() + "\n")
        if outcome != "caught" and not options.keep_going:
            break
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return 0 if set(counts) <= {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main())
