"""The Python half of the assignments: the grader on solutions, skeletons and typical mistakes."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GRADED = (1, 2, 3, 4, 5, 6)


@pytest.mark.skipif(not os.environ.get("TESSERA_TOOL"), reason="TESSERA_TOOL does not name the tool")
@pytest.mark.parametrize("number", GRADED)
def test_graded(number):
    build = pathlib.Path(os.environ["TESSERA_TOOL"]).resolve().parent
    done = subprocess.run([sys.executable, ROOT / "tests" / "assignments" / "grader_test.py", build, str(number), "python",
                           "--interpreter", sys.executable], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
