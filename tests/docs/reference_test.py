"""The API reference can be made, and every public symbol of the installed headers is documented.

    reference_test.py DOXYGEN DOXYFILE
"""

import pathlib
import re
import subprocess
import sys
import tempfile

UNDOCUMENTED = re.compile(r"warning: (.+) is not documented")


def undocumented(doxygen, settings):
    """What Doxygen says about public symbols without documentation."""
    with tempfile.TemporaryDirectory() as folder:
        warnings = pathlib.Path(folder) / "warnings"
        more = f"\nOUTPUT_DIRECTORY = {folder}\nWARN_LOGFILE = {warnings}\nGENERATE_HTML = NO\nGENERATE_XML = YES\n"
        done = subprocess.run([doxygen, "-"], input=settings + more, text=True, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert any(pathlib.Path(folder, "xml").glob("class*Communicator.xml")), "Doxygen has not read the headers"
        return sorted({found[1] for found in map(UNDOCUMENTED.search, warnings.read_text().splitlines()) if found})


def main():
    doxygen, doxyfile = sys.argv[1:]
    settings = pathlib.Path(doxyfile).read_text()
    found = undocumented(doxygen, settings)
    # Negative control: a class, its member and a function without documentation are found, one with it is not.
    with tempfile.TemporaryDirectory() as folder:
        header = pathlib.Path(folder) / "x.h"
        header.write_text("/// A namespace.\nnamespace x {\nclass Gone {\n public:\n  int member;\n};\nint gone();\n/// Good.\nclass Good {};\n/// Good.\nclass Communicator {};\n}\n")
        control = undocumented(doxygen, f"{settings}\nINPUT = {header}\nUSE_MDFILE_AS_MAINPAGE =\n")
        assert [name.split()[1] for name in control] == ["x::Gone", "gone()", "member"], control
    print("\n".join(found) or "all are documented")
    raise SystemExit(1 if found else 0)


main()
