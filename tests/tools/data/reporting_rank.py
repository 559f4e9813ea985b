"""A failing rank of the tool: prints the error, then reports its begin and end together (tools/launch/rank_watch.h).
reporting_rank.py FILE: rank 1 fails first; the others fail once rank 1 has created FILE."""

import os
import socket
import sys
import time

said = sys.argv[1]
is_first = os.environ["OMPI_COMM_WORLD_RANK"] == "1"
with socket.socket(socket.AF_UNIX) as launcher:
    launcher.connect("\0" + os.environ["TESSERA_LAUNCH_SOCKET"])
    deadline = time.monotonic() + 20
    while not is_first and not os.path.exists(said) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.write(2, b"tessera: disk full\n" if is_first else b"tessera: all_reduce: rank 1 was lost\n")
    launcher.send(b"begin 0\nend 1\n")
    if is_first:
        open(said, "w").close()
sys.exit(1)
