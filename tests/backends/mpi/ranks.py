"""Access to the ranks that an MPI launcher has started."""

import os

VARIABLES = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK"}
# The launcher must not end the remaining ranks when one dies.
KEEP_GOING = {"openmpi": ["--mca", "orte_abort_on_non_zero_status", "0", "--enable-recovery"],
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
