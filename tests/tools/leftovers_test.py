"""Files that killed ranks leave: removed by their launcher or the next one, but never files still in use.

    leftovers_test.py TOOL
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "harness"))
import processes  # noqa: E402

TOOL = None
WAITS = ("train", "--model", "gpt-nano", "--steps", "1", "--backend", "tcp", "--data", __file__)  # ... for a rank that is never started


PRIVATE = f"/tmp/tessera-{os.geteuid()}"


def job_files():
    try:
        return set(os.listdir(PRIVATE))
    except FileNotFoundError:  # the last run has removed it
        return set()


def of_process(pid):
    """The rendezvous file that this process wrote."""
    for name in job_files():
        try:
            with open(os.path.join(PRIVATE, name), encoding="ascii") as file:
                if file.read().split()[3] == str(pid):
                    return name
        except (OSError, IndexError):
            pass
    return None


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)
    return found


def first_rank(run):
    env = {**os.environ, "TESSERA_RANK": "0", "TESSERA_WORLD_SIZE": "2", "TESSERA_RUN_ID": f"leftovers-{os.getpid()}-{run}"}
    return subprocess.Popen([TOOL, *WAITS], env=env, preexec_fn=processes.die_with_parent)


def next_start():
    subprocess.run([TOOL, "run", "-n", "1", "--", "true"], check=True, timeout=30)


class GuardTest(unittest.TestCase):
    """The directory of a guard's socket can disappear before the guard runs, since a run removes it when it is empty."""

    def stays(self, folder):
        guard = subprocess.Popen([os.path.join(os.path.dirname(TOOL), "tessera-modules", "rank-guard"), os.path.join(folder, "guard"), "0", "0", "1"],
                                 preexec_fn=processes.die_with_parent)
        try:
            wait_for(lambda: os.path.exists(os.path.join(folder, "guard")) or guard.poll() is not None)
            return guard.poll() is None
        finally:
            guard.kill()
            guard.wait()

    def test_makes_its_directory(self):
        with tempfile.TemporaryDirectory() as parent:
            self.assertTrue(self.stays(os.path.join(parent, "gone")))

    def test_leaves_one_that_others_can_enter(self):  # the control
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            self.assertFalse(self.stays(folder))


class LeftoversTest(unittest.TestCase):
    def test_next_start_removes_rendezvous_file_of_dead_process(self):
        dead, alive = first_rank("dead"), first_rank("alive")
        try:
            left, used = (wait_for(lambda p=process: of_process(p.pid)) for process in (dead, alive))
            dead.kill()
            dead.wait()
            self.assertIn(left, job_files())  # negative control: a killed process can't remove it itself
            next_start()
            self.assertNotIn(left, job_files())
            self.assertIn(used, job_files())
        finally:
            for process in (dead, alive):
                process.kill()
                process.wait()
        next_start()
        self.assertNotIn(used, job_files())

    def test_launcher_interrupted_in_rendezvous_leaves_no_file(self):
        before = job_files()
        script = f"echo $$; if [ $TESSERA_RANK = 0 ]; then exec '{TOOL}' {' '.join(WAITS)}; fi; exec sleep 60"
        run = subprocess.Popen([TOOL, "run", "-n", "2", "--", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=processes.end_with_parent)
        pids = dict(run.stdout.readline().split() for _ in range(2))
        wait_for(lambda: of_process(int(pids["[0]"])))
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=20)
        self.assertFalse([name for name in job_files() - before if of_process(int(pids["[0]"])) == name])

    def read_only(self, *folders):
        """Two ranks of a container in which these folders can't be written."""
        mounts = " && ".join(f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}" for folder in folders)
        command = f"{mounts} && exec {TOOL} {' '.join(WAITS)} --ranks 2 --threads 1"
        return subprocess.run(["unshare", "--map-root-user", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)

    def test_ranks_meet_in_dev_shm_where_tmp_is_read_only(self):
        done = self.read_only("/tmp")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_says_what_to_do_where_both_are_read_only(self):  # the control
        done = self.read_only("/tmp", "/dev/shm")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("make one of them writable, or set TESSERA_MASTER", done.stderr)

    def test_removes_unused_segments(self):
        if os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC:
            self.skipTest("other processes may be there that are not seen from here")
        names = [f"/dev/shm/{prefix}{os.getpid()}" for prefix in ("mpich_shar_tmp", "vader_segment.host.", "ucx_shm_posix_", "sm_segment.")]
        other = f"/dev/shm/somebody_elses_{os.getpid()}"
        for name in (*names, other):
            with open(name, "wb") as file:
                file.write(b"x" * 4096)
        try:
            with open(names[0], "rb"):
                next_start()
                self.assertEqual([os.path.exists(name) for name in names], [True, False, False, False])
            next_start()
            self.assertEqual([os.path.exists(name) for name in (names[0], other)], [False, True])
        finally:
            for name in (*names, other):
                if os.path.exists(name):
                    os.unlink(name)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
