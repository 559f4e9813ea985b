"""Access to the ranks that an MPI launcher has started."""

import os
import re
import shutil
import subprocess

VARIABLES = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK"}


def open_mpi_is_new():
    """Whether Open MPI is version 5 or newer, which has another launcher."""
    if shutil.which("mpirun.openmpi") is None:
        return False
    said = subprocess.run(["mpirun.openmpi", "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return int(re.search(r"\) (\d+)\.", said)[1]) >= 5


# The launcher must not end the remaining ranks when one dies or ends with another code than 0.
KEEP_GOING = {"openmpi": ["--runtime-options", "error-nonzero-status=0,recoverable"] if open_mpi_is_new() else
                         ["--mca", "orte_abort_on_non_zero_status", "0", "--enable-recovery"],
              "mpich": ["-disable-auto-cleanup"]}


def pid_of(variant, marker, rank):
    """The pid of that rank among the processes that have TEST_MARKER=`marker` in their environment."""
    wanted = {f"TEST_MARKER={marker}".encode(), f"{VARIABLES[variant]}={rank}".encode()}
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                if wanted <= set(file.read().split(b"\0")):
                    return int(process)
        except OSError:
            pass
    raise AssertionError(f"no rank {rank}")
