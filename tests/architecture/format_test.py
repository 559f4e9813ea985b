"""Every C++ source and header is as clang-format leaves it: format_test.py ROOT CLANG_FORMAT. The options are those of version 14."""

import pathlib
import subprocess
import sys
import tempfile

SUFFIXES = (".cpp", ".h", ".cu", ".cuh")
FOLDERS = ("src", "backends", "plugins", "tools", "examples", "assignments", "tests", "bench", "python")


def unformatted(tool, style, files):
    """Those of `files` that the tool would change."""
    found = []
    for first in range(0, len(files), 50):
        part = [str(file) for file in files[first:first + 50]]
        done = subprocess.run([tool, f"--style=file:{style}", "--dry-run", *part], capture_output=True, text=True, check=True)
        found += [file for file in part if f"{file}:" in done.stderr]
    return found


def main():
    root, tool = pathlib.Path(sys.argv[1]), sys.argv[2]
    style = root / ".clang-format"
    files = sorted(file for folder in FOLDERS for file in (root / folder).rglob("*") if file.suffix in SUFFIXES)
    assert len(files) > 1000, f"{len(files)} files below {root}"
    with tempfile.TemporaryDirectory() as folder:  # the control
        bad = pathlib.Path(folder) / "bad.cpp"
        bad.write_text("int  main( ) { return 0; }\n")
        assert unformatted(tool, style, [bad]) == [str(bad)]
    found = unformatted(tool, style, files)
    assert not found, "run clang-format -i " + " ".join(found)


if __name__ == "__main__":
    main()
