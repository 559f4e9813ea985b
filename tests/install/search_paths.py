"""Search paths of ELF files: search_paths.py FOLDER..; an empty or relative entry is the current directory of who runs the program.

As a module: bad_entries(folder).
"""

import pathlib
import re
import subprocess
import sys


def entries_of(file):
    """The entries of RPATH and RUNPATH."""
    listing = subprocess.run(["readelf", "--dynamic", "--wide", str(file)], capture_output=True, text=True, check=True).stdout
    return [entry for path in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", listing) for entry in path.split(":")]


def is_elf(file):
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as opened:
        if opened.read(4) != b"\x7fELF":
            return False
        opened.seek(16)
        return opened.read(2) in (b"\2\0", b"\3\0")  # executables and shared objects, of either byte order that we build for


def bad_entries(folder):
    """(files examined, [(file, entry), ...])."""
    files = [file for file in sorted(pathlib.Path(folder).rglob("*")) if is_elf(file)]
    return len(files), [(str(file), entry) for file in files for entry in entries_of(file) if not entry.startswith(("/", "$ORIGIN"))]


def main():
    failed = False
    for folder in sys.argv[1:]:
        count, bad = bad_entries(folder)
        print(f"{folder}: {count} files, {len(bad)} entries that are empty or relative")
        for file, entry in bad:
            print(f"{file}: '{entry}'")
        failed |= bool(bad) or count == 0
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
