"""Another user of the host takes the names in /tmp that a run would use, which may not hinder it. Needs root, which takes on two other users.

    other_users_test.py TOOL
"""

import glob
import os
import shutil
import socket
import subprocess
import sys
import time
import unittest

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "harness"))
import processes  # noqa: E402

TOOL = None
VICTIM, OTHER = 54321, 54322
USUAL = f"/tmp/tessera-{VICTIM}"


def be(user):
    """For preexec_fn."""
    def become():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        processes.die_with_parent()
    return become


def as_user(user, make):
    """Calls make() as this user."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            be(user)()
            make()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, make


def open_socket():
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(USUAL)


TAKEN = {
    "a folder": lambda: os.mkdir(USUAL, 0o700),
    "a folder for everybody": lambda: (os.mkdir(USUAL), os.chmod(USUAL, 0o777)),
    "a file": lambda: open(USUAL, "x", encoding="utf-8").close(),
    "a link to nothing": lambda: os.symlink("/tmp/tessera-nothing", USUAL),
    "a link to a folder of the victim": lambda: os.symlink(f"/tmp/home-of-{VICTIM}", USUAL),
    "a pipe": lambda: os.mkfifo(USUAL),
    "a socket": open_socket,
}


class OtherUsersTest(unittest.TestCase):
    def setUp(self):
        self.umask = -1  # as it is
        if os.geteuid() != 0:
            self.skipTest("needs root, which takes on two other users")
        try:
            as_user(VICTIM, lambda: os.stat(TOOL))
        except AssertionError:
            self.skipTest(f"other users can't enter the folder of {TOOL}")
        self.home = f"/tmp/home-of-{VICTIM}"
        shutil.rmtree(self.home, ignore_errors=True)  # of a test that was killed
        os.mkdir(self.home, 0o700)
        os.chown(self.home, VICTIM, VICTIM)
        self.addCleanup(shutil.rmtree, self.home)
        self.clear()
        self.addCleanup(self.clear)

    def clear(self):
        for path in glob.glob(USUAL + "*"):
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)

    def environment(self, **changes):
        return {**{name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}, "HOME": self.home,
                "TESSERA_TIMEOUT": "20s", **changes}

    def start(self, rank):
        """A rank that another program has started, so that it finds the others by the file."""
        return subprocess.Popen([TOOL, "train", "--model", "gpt-nano", "--steps", "1", "--global-batch", "2", "--backend", "shm", "--data", __file__],
                                env=self.environment(TESSERA_RANK=str(rank), TESSERA_WORLD_SIZE="2", TESSERA_RUN_ID="other-users"), cwd="/",
                                preexec_fn=be(VICTIM), umask=self.umask, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def world(self):
        """Starts the run, and returns the folders in which its file was seen."""
        one = self.start(1)
        time.sleep(0.2)
        zero = self.start(0)
        seen = set()
        deadline = time.monotonic() + 60
        while None in (zero.poll(), one.poll()) and time.monotonic() < deadline:
            seen |= {os.path.dirname(path) for path in glob.glob(USUAL + "*/job-*") if "." not in os.path.basename(path)}
            time.sleep(0.0005)
        for rank in (zero, one):
            out, err = rank.communicate(timeout=20)
            self.assertEqual(rank.returncode, 0, (out, err))
        return seen

    def test_a_run_uses_the_usual_folder_if_nobody_has_taken_it(self):  # the control
        self.assertLessEqual(self.world(), {USUAL})
        self.assertEqual(glob.glob(USUAL + "*"), [])

    def test_a_umask_that_takes_rights_from_the_owner_hinders_no_run(self):
        for self.umask in (0o177, 0o777, 0o022):
            self.assertLessEqual(self.world(), {USUAL}, oct(self.umask))
            self.assertEqual(glob.glob(USUAL + "*"), [])

    def test_a_run_starts_though_another_user_has_taken_the_name(self):
        for what, take in TAKEN.items():
            with self.subTest(what):
                self.clear()
                as_user(OTHER, take)
                self.assertNotIn(USUAL, self.world())
                self.assertEqual(glob.glob(USUAL + "-*"), [])
                self.assertEqual(os.lstat(USUAL).st_uid, OTHER)
                self.assertEqual(os.listdir(self.home), [], "a link was followed")

    def test_a_run_starts_though_another_user_has_taken_the_other_names_too(self):
        as_user(OTHER, TAKEN["a folder"])
        for i in range(200):
            as_user(OTHER, lambda name=f"{USUAL}-{i:06}": os.mkdir(name, 0o777))
        self.world()

    @unittest.skipUnless(shutil.which("mpirun.mpich"), "needs MPICH's launcher")
    def test_another_user_can_not_take_the_place_of_the_ranks_guard(self):
        run = subprocess.Popen(["mpirun.mpich", "-n", "2", TOOL, "train", "--model", "gpt-nano", "--steps", "1000000", "--global-batch", "2", "--data",
                                __file__], env=self.environment(), cwd="/", preexec_fn=be(VICTIM), stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while not (found := [path for path in glob.glob(USUAL + "/guard-*") if not path.endswith(".lock")]):
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            with socket.socket(socket.AF_UNIX) as control:
                as_user(VICTIM, lambda: control.connect(found[0]))
            with self.assertRaises(AssertionError), socket.socket(socket.AF_UNIX) as other:
                as_user(OTHER, lambda: other.connect(found[0]))
        finally:
            run.terminate()
            run.wait()

    def test_another_user_can_not_read_the_token(self):
        zero = self.start(0)
        try:
            deadline = time.monotonic() + 20
            # Not the temporary name, under which it is written.
            while not (files := [name for name in glob.glob(USUAL + "/job-*") if ".tmp-" not in name]) and time.monotonic() < deadline:
                time.sleep(0.01)
            self.assertEqual(len(files), 1)
            as_user(VICTIM, lambda: open(files[0], encoding="utf-8").close())  # the control
            with self.assertRaises(AssertionError):
                as_user(OTHER, lambda: open(files[0], encoding="utf-8").close())
            with self.assertRaises(AssertionError):
                as_user(OTHER, lambda: os.listdir(USUAL))
        finally:
            zero.kill()
            zero.communicate()


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
