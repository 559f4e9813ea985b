"""Checks the litmus programs with GenMC: the protocols hold, and each negative control breaks them.

    python3 tests/litmus/check.py path/to/genmc [PROGRAM ...]
"""

import pathlib
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent


def controls_of(text):
    """The numbers in the comment "Controls: 1 ...; 2 ..."."""
    listed = re.search(r"^// Controls: (.*?)^#include", text, re.S | re.M).group(1).replace("\n// ", " ")
    return [int(number) for number in re.findall(r"(?:^|; )(\d) ", listed)]


def run(genmc, program, control):
    """Whether GenMC found an error, and what it said of the executions or of the error."""
    command = [genmc, "--disable-estimation", "--", f"-DCONTROL={control}", f"-I{HERE}", str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    said = ended.stdout + ended.stderr
    explored = sum(int(n) for n in re.findall(r"executions explored: (\d+)", said))
    if "No errors were detected" in said and explored > 0:
        return False, f"{explored} executions"
    error = re.search(r"^Error: (.*)", said, re.M) or re.search(r"^Error detected: (.*)", said, re.M)
    if error is None:
        raise SystemExit(f"{program.name}, control {control}: GenMC did not check it:\n{said}")
    return True, error.group(1)


def main():
    genmc, *names = sys.argv[1:]
    failed = 0
    for program in sorted(HERE.glob("*.c")):
        if names and program.stem not in names:
            continue
        for control in [0, *controls_of(program.read_text())]:
            begin = time.monotonic()
            found, said = run(genmc, program, control)
            good = found == (control != 0)
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {program.stem:18} {f'control {control}' if control else '':10}"
                  f" {time.monotonic() - begin:5.1f} s  {said}", flush=True)
    sys.exit(failed > 0)


main()
