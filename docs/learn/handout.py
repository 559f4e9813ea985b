"""The page of formulas as a PDF, by a headless Chromium: handout.py OUT.pdf."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser():
    """A browser's program, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def write(out):
    """Writes the PDF. Raises CalledProcessError, or TimeoutExpired after 100 seconds."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run([browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--no-pdf-header-footer",
                        f"--print-to-pdf={out}", (HERE / "formulas.html").as_uri()], check=True, timeout=100, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    if not browser():
        raise SystemExit(f"needs one of {', '.join(BROWSERS)}; or print docs/learn/formulas.html from any browser")
    write(pathlib.Path(sys.argv[1]).resolve())
