"""The tests' browser ends with all its processes, so its folder can be removed at once.

    browser_test.py BROWSER
"""

import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import unittest

from browser import Browser

PROGRAM = None


def network_process_of(browser):
    """The child that writes to the profile, whose end the browser itself does not wait for."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == browser.process.pid and b"network.mojom.NetworkService" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:  # The process has ended in between.
            continue
    raise RuntimeError("the browser has no process for its network")


def runs(process):
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class BrowserTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.browser = Browser(PROGRAM, scratch.name)
        self.child = network_process_of(self.browser)
        os.kill(self.child, signal.SIGSTOP)

    def test_close_waits_for_a_child_that_is_late(self):
        late = threading.Timer(2, os.kill, (self.child, signal.SIGCONT))
        late.start()
        start = time.monotonic()
        self.browser.close()
        self.assertGreater(time.monotonic() - start, 1)
        self.assertFalse(runs(self.child))
        late.join()

    def test_close_ends_a_child_that_is_stuck(self):
        self.browser.close(patience=1)
        self.assertFalse(runs(self.child))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("no Chromium on this machine; scripts/setup --tests installs it")
    PROGRAM = sys.argv.pop(1)
    unittest.main(verbosity=2)
