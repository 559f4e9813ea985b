"""Where the processes of a world on one host listen, as the kernel lists it: at the loopback interface only.

    listening_test.py TOOL
"""

import collections
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "harness"))
import processes  # noqa: E402

TOOL = None
RANKS = 2
Listener = collections.namedtuple("Listener", "address port")


def below(process):
    """The process and its descendants."""
    children = collections.defaultdict(list)
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            children[int(entry.read_text(errors="replace").rsplit(")", 1)[1].split()[1])].append(int(entry.parent.name))
        except OSError:
            pass
    found, todo = [], [process]
    while todo:
        found.append(todo.pop())
        todo += children[found[-1]]
    return found


def sockets_of(process):
    for entry in pathlib.Path(f"/proc/{process}/fd").glob("*"):
        try:
            yield os.readlink(entry)
        except OSError:
            pass


def address_of(text):
    """Of /proc/net/tcp or tcp6: groups of 4 bytes in the order of this host."""
    data = b"".join(bytes.fromhex(text[i:i + 8])[::-1] for i in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def listeners(process):
    """All TCP sockets in the state LISTEN of this process and its descendants."""
    mine = {name for one in below(process) for name in sockets_of(one)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.add(Listener(address_of(address), int(port, 16)))
    return found


def is_loopback(listener):
    return listener.address == "::1" or listener.address.startswith("127.")


class ListeningTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.data = os.path.join(folder.name, "text")
        pathlib.Path(self.data).write_text("It was a bright cold day in April. " * 300)

    def start(self, *launcher, backend, ranks=True, steps=1_000_000, **environment):
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TESSERA_", "UCX_", "OMPI_", "LD_PRELOAD"))}
        clean.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", TESSERA_TIMEOUT="30s", **environment)
        command = [*launcher, TOOL, "train", "--model", "gpt-nano", "--steps", str(steps), "--global-batch", str(RANKS), "--seq-len", "16",
                   "--data", self.data, "--backend", backend, *(["--ranks", str(RANKS)] if ranks else [])]
        run = subprocess.Popen(command, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=processes.end_with_parent)
        self.addCleanup(lambda: (run.terminate(), run.communicate(timeout=30)))
        return run

    def while_training(self, run):
        for line in run.stdout:
            if line.startswith("step 2 "):
                return listeners(run.pid)
        self.fail(run.stderr.read())

    def is_available(self, backend):
        done = subprocess.run([TOOL, "info"], capture_output=True, text=True, timeout=60, check=True)
        return any(line.split()[1:3] == [backend, "available"] for line in done.stdout.splitlines() if line.startswith("backend"))

    def test_ranks_of_one_host_listen_at_the_loopback_interface_only(self):
        for backend in ("shm", "tcp", "ucx", "mpi"):
            if not self.is_available(backend):
                continue
            with self.subTest(backend):
                found = self.while_training(self.start(backend=backend))
                self.assertEqual({one for one in found if not is_loopback(one)}, set())
                if backend in ("ucx", "mpi"):
                    self.assertTrue(found, "the test would see a listener")

    def test_settings_of_the_user_win(self):  # the control, too: such listeners are seen
        addresses = [name for name in os.listdir("/sys/class/net") if name != "lo" and
                     "inet " in subprocess.run(["ip", "-4", "address", "show", "up", "dev", name], capture_output=True, text=True, check=False).stdout]
        for backend in ("ucx", "mpi"):
            if not addresses or not self.is_available(backend):
                continue
            with self.subTest(backend):
                found = self.while_training(self.start(backend=backend, UCX_NET_DEVICES="all", OMPI_MCA_btl="self,tcp"))
                self.assertTrue([one for one in found if not is_loopback(one)], found)

    @unittest.skipUnless(shutil.which("mpirun.mpich"), "needs MPICH's launcher")
    def test_a_launcher_that_the_user_starts_listens_everywhere(self):  # as docs/security.md says
        run = self.start("mpirun.mpich", "-n", str(RANKS), backend="mpi", ranks=False)
        self.assertTrue([one for one in self.while_training(run) if not is_loopback(one)])


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
