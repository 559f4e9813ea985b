"""The grader keeps a program's whole output, however it is written, and of one that prints without end the end."""

import pathlib
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "assignments"))

from grading.worlds import MOST_OUTPUT, run_limited  # noqa: E402


def run(program, limit=20):
    return run_limited([sys.executable, "-u", "-c", program], limit)


def main():
    many = "import sys, time\nfor i in range(100):\n  sys.stdout.write(f'{i} '); sys.stdout.flush(); time.sleep(0.001)"
    if run(many) != (0, "".join(f"{i} " for i in range(100))):
        return "an output of many small writes is not whole"
    code, text = run(f"print('first'); print('x' * {3 * MOST_OUTPUT}); print('last'); raise SystemExit(3)")
    if code != 3 or "first" in text or len(text) != MOST_OUTPUT or not text.endswith("x\nlast\n"):
        return f"of a long output not its end is kept: code {code}, {len(text)} characters"
    code, text = run("while True: print('spam' * 100)", 1)
    if code is not None or "spam" not in text:
        return f"a program that prints without end is not stopped: code {code}"
    begin = time.monotonic()
    left = "import subprocess, sys; print('ended', flush=True); subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
    if run(left) != (0, "ended\n") or time.monotonic() - begin > 15:
        return "the grader waits for a process that a program left behind"
    return 0


if __name__ == "__main__":
    sys.exit(main())
