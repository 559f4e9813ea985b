"""Runs the command line of the oracle, with a limit that kills all it has started."""

import os
import signal
import subprocess
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
PLANTED = os.path.join(FOLDER, "planted.py")
OPERATIONS = os.path.join(FOLDER, "operations.py")


def oracle(*arguments, limit=90, environment=None, module="tessera.oracle"):
    """(exit code, standard output, standard error)"""
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    variables.update({"OMP_NUM_THREADS": "1", **(environment or {})})
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        # The oracle ends its ranks when it is terminated, which a kill would not let it do.
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        raise AssertionError(f"oracle {arguments} did not end within {limit} s") from None
    return process.returncode, out, err
