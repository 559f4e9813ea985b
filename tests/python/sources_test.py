"""What can be said of the Python package without PyTorch, which Debian has only in a version that is too old: its files are
Python, its version is the project's, and its build knows every source. python/test runs the package itself.

    sources_test.py ROOT VERSION
"""

import pathlib
import re
import sys


def problems(root, version):
    package = root / "python"
    found = []
    scripts = sorted(package.rglob("*.py"))
    for path in scripts:
        try:
            compile(path.read_text(), str(path), "exec")
        except SyntaxError as error:
            found.append(f"{path.relative_to(root)}:{error.lineno}: {error.msg}")
    for path in (package / "pyproject.toml", package / "tessera" / "__init__.py"):
        have = re.search(r'^(?:__)?version(?:__)? = "([^"]+)"', path.read_text(), re.M)
        if have is None or have[1] != version:
            found.append(f"{path.relative_to(root)}: its version is not {version}")
    sources = {str(path.relative_to(package)) for path in (package / "src").rglob("*.cpp")}
    listed = set(re.findall(r"src/\S+\.cpp", (package / "CMakeLists.txt").read_text()))
    found += [f"python/CMakeLists.txt: {name} is listed or there, not both" for name in sorted(sources ^ listed)]
    assert len(scripts) > 5 and len(sources) > 5, "the package was not found"
    return found


def main():
    root, version = pathlib.Path(sys.argv[1]), sys.argv[2]
    found = problems(root, version)
    print("\n".join(found) or "all well")
    # Negative control: another version is seen, in both files.
    assert len(problems(root, version + ".1")) == len(found) + 2
    sys.exit(1 if found else 0)


main()
