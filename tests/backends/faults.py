"""Ranks that die or stop during operations, over one backend: the other ranks report it in time and stay alive.

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


def start(program, run, timeouts):
    ranks = []
    for rank in range(RANKS):
        env = dict(os.environ, TESSERA_RANK=str(rank), TESSERA_WORLD_SIZE=str(RANKS), TESSERA_RUN_ID=run,
                   TESSERA_TIMEOUT=timeouts[rank])
        ranks.append(subprocess.Popen([program, "forever"], env=env, stdout=subprocess.PIPE, text=True,
                                      preexec_fn=die_with_parent))
    for rank in ranks:
        line = rank.stdout.readline()
        assert line == "ready\n", line
    return ranks


def endings(ranks, skip, patience):
    """The number, output and exit code of all ranks except `skip`."""
    deadline = time.monotonic() + patience
    found = []
    for number, rank in enumerate(ranks):
        if number != skip:
            out, _ = rank.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            found.append((number, out.strip(), rank.returncode))
    return found


def attempt(program, name, victim, sent, patience, pattern, timeouts=("60s",) * RANKS):
    """Sends the signal `sent` to `victim`. All other ranks must report it with `pattern` and name no other rank."""
    ranks = start(program, f"faults-{os.getpid()}-{name}", timeouts)
    try:
        ranks[victim].send_signal(sent)
        begin = time.monotonic()
        for number, words, code in endings(ranks, victim, patience):
            assert re.search(pattern, words) and code == 3, (name, number, words, code)
            assert set(re.findall(r"rank (\d)", words)) == {str(victim)}, (name, number, words)
        print(f"{name}: said by all after {time.monotonic() - begin:.2f} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def main():
    program = sys.argv[1]
    for victim in (1, 1, 0):
        attempt(program, f"killed-{victim}", victim, signal.SIGKILL, 20, rf"PeerLost: .*rank {victim}")
    attempt(program, "stopped", 1, signal.SIGSTOP, 30, r"Timeout: .*rank 1 is not responding", ["3s"] * RANKS)
    # Control messages go through rank 0: no other rank is blamed for its silence ...
    attempt(program, "stopped-hub", 0, signal.SIGSTOP, 30, r"Timeout: .*rank 0 is not responding", ["3s"] * RANKS)
    # ... nor is a rank that has left because of it.
    attempt(program, "stopped-hub-and-a-leaver", 0, signal.SIGSTOP, 40, r"Timeout: .*rank 0 is not responding",
            ["60s", "2s", "9s"])


main()
