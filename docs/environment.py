"""Writes docs/environment.md from the output of the program.

    environment.py TOOL             writes the page
    environment.py TOOL --check     fails if the page differs
"""

import json
import os
import pathlib
import re
import subprocess
import sys

from markdown import wrapped

TARGET = pathlib.Path(__file__).with_suffix(".md")


def page(tool):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    done = subprocess.run([tool, "info", "--json"], env=clean, text=True, stdout=subprocess.PIPE, timeout=60, check=True)
    lines = ["# Environment variables", "",
             "Written by `docs/environment.py` from `tessera info --json`; `tessera info --env` shows the values that are set now.",
             "An option of the command line overrides the variable of the same name. Durations are written `500ms`, `6s`, `2m`,",
             "sizes `64K`, `8M`, `1G`.", "", "| variable | default | meaning |", "|---|---|---|"]
    for variable in json.loads(done.stdout)["env"]:
        default = f"`{variable['default']}`" if variable["default"] else ""
        lines.append(f"| `{variable['name']}` | {default} | {variable['help'].replace('|', chr(92) + '|')} |")
    return wrapped(lines)


def same(written, wanted):
    """Compares pages. The page comes from a build with all modules; in other builds a module's variables may be missing."""
    lines = wanted.splitlines()
    of_modules = re.compile(r"\| `TESSERA_(NCCL|UCX|MPI)_")
    return [line for line in written.splitlines() if line in lines or not of_modules.match(line)] == lines


wanted = page(sys.argv[1])
if "--check" in sys.argv:
    good = TARGET.is_file() and same(TARGET.read_text(), wanted)
    assert not same(wanted + "| `TESSERA_GONE` | | |\n", wanted) and not same(wanted.replace("5m", "6m"), wanted)  # controls
    raise SystemExit(0 if good else f"{TARGET} is old: run docs/environment.py TOOL")
TARGET.write_text(wanted)
