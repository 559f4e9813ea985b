"""Two ranks of the tool (tools/launch/rank_watch.h): rank 1 fails, its starter then kills rank 0, as mpirun does, and the tool's
launcher, which is stopped meanwhile, finds both events at once.
late_launcher.py FILE: rank 0 writes its process id to FILE."""

import os
import pathlib
import signal
import socket
import sys
import time

file = pathlib.Path(sys.argv[1])
with socket.socket(socket.AF_UNIX) as report:
    report.connect("\0" + os.environ["TESSERA_LAUNCH_SOCKET"])
    report.send(b"begin 0\n")
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        time.sleep(0.2)  # until the launcher has accepted both
        file.with_suffix(".new").write_text(str(os.getpid()))
        file.with_suffix(".new").rename(file)
        time.sleep(60)
    while not file.exists():
        time.sleep(0.01)
    starter = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text(encoding="ascii")
    launcher = int(starter.rsplit(")", 1)[1].split()[1])
    os.kill(launcher, signal.SIGSTOP)
    os.write(2, b"tessera: disk full\n")
    report.send(b"end 1\n")
    os.kill(int(file.read_text()), signal.SIGKILL)
    time.sleep(0.1)
    os.kill(launcher, signal.SIGCONT)
sys.exit(1)
