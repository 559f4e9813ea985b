"""Prints what a student's wrap() returns: wrap_answers.py FILE, then the situation in the order of NAMES."""

import runpy
import sys

NAMES = ("ranks", "blocks", "block_parameters", "root_parameters", "forward_seconds", "backward_seconds", "latency", "bytes_per_second",
         "unsharded_bytes")


def main():
    values = [float(text) if "." in text or "e" in text else int(text) for text in sys.argv[2:]]
    try:
        units = runpy.run_path(sys.argv[1])["wrap"](dict(zip(NAMES, values)))
        print("units:", *units)
    except Exception as error:  # noqa: BLE001  (the grader reports it)
        print(f"error: {type(error).__name__}: {error}")
        return 1
    return 0


sys.exit(main())
