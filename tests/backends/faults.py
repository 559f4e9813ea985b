"""Ranks that die or stop in the middle of their work, over one backend: the others say so in time, and live.

    faults.py PROGRAM      PROGRAM is test_comm_rank; the backend and its settings come from the environment
"""

import os
import re
import signal
import subprocess
import sys
import time

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "harness"))
from processes import die_with_parent  # noqa: E402

RANKS = 3


def start(program, run, timeout):
    ranks = []
    for rank in range(RANKS):
        env = dict(os.environ, TESSERA_RANK=str(rank), TESSERA_WORLD_SIZE=str(RANKS), TESSERA_RUN_ID=run,
                   TESSERA_TIMEOUT=timeout)
        ranks.append(subprocess.Popen([program, "forever"], env=env, stdout=subprocess.PIPE, text=True,
                                      preexec_fn=die_with_parent))
    for rank in ranks:
        line = rank.stdout.readline()
        assert line == "ready\n", line
    return ranks


def endings(ranks, skip, patience):
    """The last words and exit codes of all ranks but one."""
    deadline = time.monotonic() + patience
    found = []
    for number, rank in enumerate(ranks):
        if number != skip:
            out, _ = rank.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            found.append((out.strip(), rank.returncode))
    return found


def attempt(program, name, hurt, timeout, patience, pattern):
    ranks = start(program, f"faults-{os.getpid()}-{name}", timeout)
    try:
        time.sleep(0.3)
        hurt(ranks[1])
        begin = time.monotonic()
        for words, code in endings(ranks, 1, patience):
            assert re.search(pattern, words) and code == 3, (name, words, code)
        print(f"{name}: said by all after {time.monotonic() - begin:.2f} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def main():
    program = sys.argv[1]
    for round in range(3):
        attempt(program, f"killed-{round}", lambda rank: rank.kill(), "60s", 20, r"PeerLost: .*rank 1")
    attempt(program, "stopped", lambda rank: rank.send_signal(signal.SIGSTOP), "3s", 30, r"Timeout: .*rank 1")


main()
