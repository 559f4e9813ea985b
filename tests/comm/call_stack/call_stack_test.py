"""What docs/collectives.md says of the way from a call to the bytes, compared with recorded call stacks of a debug build.

    call_stack_test.py PROGRAM PAGE BACKENDS...     PROGRAM is test_comm_rank
"""

import os
import pathlib
import re
import subprocess
import sys
import unittest
import uuid

PROGRAM, PAGE, BACKENDS = None, None, ()
MOST = {"shm": 7, "tcp": 10, "ucx": 10}  # objects entered


def environment(rank, backend, run):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    return {**clean, "TESSERA_RANK": str(rank), "TESSERA_WORLD_SIZE": "2", "TESSERA_LOCAL_RANK": str(rank), "TESSERA_LOCAL_WORLD_SIZE": "2",
            "TESSERA_RUN_ID": run, "TESSERA_BACKEND": backend, "TESSERA_TIMEOUT": "90s"}


def recorded(backend, function):
    run = uuid.uuid4().hex
    peer = subprocess.Popen([PROGRAM, "abandon"], env=environment(1, backend, run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        recorder = pathlib.Path(__file__).with_name("recorder.py")
        done = subprocess.run(["gdb", "-q", "-nx", "-batch", "-x", recorder, "--args", PROGRAM, "abandon"], text=True, capture_output=True,
                              timeout=120, env={**environment(0, backend, run), "POINT": function})
    finally:
        peer.kill()
        peer.wait()
    found = re.search(r"^entered: (.*)$", done.stdout, re.M)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return found[1].split(" > ")


class CallStackTest(unittest.TestCase):
    def test_the_page_shows_the_objects_that_are_entered(self):
        shown = {}  # by backend: classes, then the function
        for line in re.findall(r"^((?:shm|tcp|ucx) .*(?:\n {4,}.*)*)", PAGE.read_text(), re.M):
            backend, *way = re.split(r"\s+>\s+|\s+", line.strip())
            shown[backend] = way
        for backend in BACKENDS:
            with self.subTest(backend):
                *classes, function = shown[backend]
                self.assertEqual(recorded(backend, {"reduce_tree": "tessera::comm::reduce_tree"}.get(function, function)), classes)
                self.assertLessEqual(len(classes), MOST[backend])

    def test_another_function_is_on_another_way(self):  # the control
        self.assertNotEqual(recorded("tcp", "tessera::comm::reduce_tree"), recorded("tcp", "sendmsg"))


if __name__ == "__main__":
    PROGRAM, PAGE, BACKENDS = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
    unittest.main(argv=sys.argv[:1])
