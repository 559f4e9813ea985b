"""The command line: `python -m tessera.oracle`."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import runpy
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from typing import Optional

from tessera.oracle.launch import RunError, run_ranks

EQUAL, DIFFERENT, FAILED = 0, 1, 2

_DESCRIPTION = """\
Runs two trainings, one after the other, and names the first step and tensor at which they differ, with the operation
between ranks that made the difference.

  python -m tessera.oracle a.py b.py                        two scripts
  python -m tessera.oracle train.py --a "--lr 1" --b "--lr 2"   one script with two lists of arguments
  python -m tessera.oracle train.py --env-b TESSERA_BACKEND=tcp  one script in two environments
  python -m tessera.oracle record -o DIR train.py ARGS      records one run; see `record --help`
  python -m tessera.oracle compare DIR_A DIR_B              compares two records; see `compare --help`
"""
_CODES = "exit codes: 0 the trainings are equal, 1 they differ, 2 wrong usage or a run that failed"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(FAILED, f"{self.prog}: {message}; see --help\n")


def _parser(name: str, description: str) -> _Parser:
    return _Parser(
        prog=f"python -m tessera.oracle{name}",
        description=description,
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _joined(arguments: list[str]) -> list[str]:
    """`--a TEXT` as one argument, since argparse takes a text that begins with a dash for an option."""
    result: list[str] = []
    for argument in arguments:
        if result and result[-1] in ("--a", "--b"):
            result[-1] += f"={argument}"
        else:
            result.append(argument)
    return result


def _add_recording(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=_positive, metavar="N", help="processes of a run; default: 1")
    parser.add_argument(
        "--keep-values", type=_count, default=0, metavar="K", help="first elements of each tensor to keep; default: 0"
    )
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="limit of a run; default: none")


def _script(path: str) -> str:
    if not os.path.isfile(path):
        raise RunError(f"run: there is no script {path}")
    return path


def _compare(directory_a: str, directory_b: str) -> int:
    from tessera.oracle.comparison import compare
    from tessera.oracle.report import report

    found = compare(directory_a, directory_b)
    print(report(found))
    print(f"A: {directory_a}\nB: {directory_b}")
    return EQUAL if found.equal else DIFFERENT


def _run_both(arguments: list[str]) -> int:
    parser = _parser("", _DESCRIPTION)
    parser.add_argument("script_a", metavar="A.py", help="script of run A")
    parser.add_argument("script_b", metavar="B.py", nargs="?", help="script of run B; default: A.py")
    for run in "ab":
        parser.add_argument(f"--{run}", default="", metavar="ARGS", help=f"arguments of run {run.upper()}, as one text")
    for run in "ab":
        parser.add_argument(
            f"--env-{run}",
            type=_variable,
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"environment of run {run.upper()}; may be repeated",
        )
    _add_recording(parser)
    parser.add_argument("-o", "--output", metavar="DIR", help="keep the records and outputs in DIR/a and DIR/b")
    options = parser.parse_args(_joined(arguments))
    directory = options.output or tempfile.mkdtemp(prefix="tessera-oracle-")
    scripts = [_script(options.script_a), _script(options.script_b or options.script_a)]
    runs = zip("ab", scripts, (options.a, options.b), (options.env_a, options.env_b))
    for run, script, extra, variables in runs:
        print(f"run {run.upper()}: {script} {extra}".rstrip(), file=sys.stderr, flush=True)
        run_ranks(
            os.path.join(directory, run),
            [script, *shlex.split(extra)],
            options.ranks or 1,
            dict(variables),
            options.keep_values,
            options.timeout,
        )
    return _compare(os.path.join(directory, "a"), os.path.join(directory, "b"))


def _record(arguments: list[str]) -> int:
    parser = _parser(
        " record",
        "Records one run of a script. Where a launcher has set RANK, as in\n"
        "`torchrun -m tessera.oracle record -o DIR train.py`, each process records itself.",
    )
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="directory of the record")
    _add_recording(parser)
    parser.add_argument("--in-place", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py ARGS", help="script and its arguments")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("the script is missing")
    _script(command[0])
    launched = options.in_place or (options.ranks is None and "RANK" in os.environ)
    if not launched:
        run_ranks(options.output, command, options.ranks or 1, {}, options.keep_values, options.timeout, logs=False)
        print(f"recorded: {options.output}", file=sys.stderr)
        return EQUAL
    _record_in_place(options.output, command, options.keep_values)
    return EQUAL


def _record_in_place(directory: str, command: list[str], keep_values: int) -> None:
    """Runs the script in this process and ends the process."""
    from tessera.oracle.recorder import Recorder

    sys.argv = command
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))  # as Python does for a script
    recorder = Recorder(directory, keep_values=keep_values)
    code = 1
    try:
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    recorder.close(complete=code == 0)
    _end(code)


def _end(code: int) -> None:
    """Ends the process in the order in which Python does, but keeps the interpreter.

    A thread of Gloo may still release a tensor, for which it needs the interpreter. If that is gone, the process aborts.
    """
    gc.collect()  # closes the files of the script, whose variables are gone
    getattr(threading, "_shutdown", lambda: None)()  # joins threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _compare_command(arguments: list[str]) -> int:
    parser = _parser(" compare", "Compares two records.")
    parser.add_argument("a", metavar="DIR_A", help="record of run A")
    parser.add_argument("b", metavar="DIR_B", help="record of run B")
    options = parser.parse_args(arguments)
    return _compare(options.a, options.b)


def main(arguments: Optional[list[str]] = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    commands = {"record": _record, "compare": _compare_command}
    if arguments and arguments[0] in commands:
        command, rest = commands[arguments[0]], arguments[1:]
    else:
        command, rest = _run_both, arguments
    if command is _record and "--in-place" in rest:
        return command(rest)  # what the script raises is shown as Python shows it
    # The end of this process ends the ranks that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))
    try:
        return command(rest)
    except KeyboardInterrupt:
        return FAILED
    except Exception as error:
        from tessera.oracle.files import RecordError

        if not isinstance(error, (RunError, RecordError, OSError)):
            traceback.print_exc()  # a fault of this program, which must not look like a difference
        print(f"python -m tessera.oracle: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
