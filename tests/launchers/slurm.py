"""A one-node Slurm for a test: the real daemons, with all their files in one folder; both are removed at the end."""

import getpass
import os
import re
import socket
import subprocess
import sys
import time

import jobs

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "harness"))
import processes  # noqa: E402

CONFIGURATION = """
ClusterName=tessera
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={control_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def version():
    """Of Slurm, as (23, 11)."""
    said = subprocess.run([jobs.program("slurmd"), "-V"], capture_output=True, text=True, timeout=60, check=False).stdout
    return tuple(int(number) for number in re.search(r" (\d+)\.(\d+)", said).groups())


class Slurm:
    def __init__(self, folder):
        self.folder = folder
        self.daemons = []
        for name in ("state", "spool"):
            os.mkdir(os.path.join(folder, name))
        with open(os.open(self.path("munge.key"), os.O_WRONLY | os.O_CREAT, 0o400), "wb") as key:
            key.write(os.urandom(1024))
        with open(self.path("slurm.conf"), "w", encoding="ascii") as file:
            file.write(CONFIGURATION.format(host=socket.gethostname().split(".")[0], user=getpass.getuser(), folder=folder,
                                            control_port=processes.free_port(), node_port=processes.free_port()))
        if version() >= (23, 11):  # it can be told not to use control groups, which a container may not have or own
            with open(self.path("cgroup.conf"), "w", encoding="ascii") as file:
                file.write("CgroupPlugin=disabled\n")

    def path(self, name):
        return os.path.join(self.folder, name)

    def start(self):
        try:
            self.daemon("munged", "--foreground", "--force",
                        *(f"--{option}={self.path('munge.' + end)}" for option, end in (
                            ("socket", "socket"), ("key-file", "key"), ("log-file", "log"), ("pid-file", "pid"), ("seed-file", "seed"))))
            self.wait(lambda: os.path.exists(self.path("munge.socket")))
            self.daemon("slurmctld", "-D")
            self.daemon("slurmd", "-D")
            self.wait(lambda: self.ask("sinfo", "-h", "-o", "%t") == "idle")
        except BaseException:
            self.stop()
            raise
        return self

    def daemon(self, name, *arguments):
        with open(self.path(name + ".out"), "wb") as out:
            self.daemons.append(subprocess.Popen([jobs.program(name), *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                                 env=self.environment(), preexec_fn=processes.die_with_parent))

    def ask(self, *command):
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip()

    def wait(self, ready, seconds=90):
        deadline = time.monotonic() + seconds
        while not ready():
            ended = [daemon.args[0] for daemon in self.daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"Slurm does not come up; ended: {ended}; {self.logs()}")
            time.sleep(0.05)

    def logs(self):
        texts = []
        for name in sorted(os.listdir(self.folder)):
            if name.endswith((".out", ".log")):
                with open(self.path(name), errors="replace") as file:
                    texts.append(f"{name}: {file.read()[-1000:]}")
        return "\n".join(texts)

    def environment(self, **changes):
        return jobs.environment(SLURM_CONF=self.path("slurm.conf"), **changes)

    def srun(self, *options, ranks=jobs.RANKS):
        return Srun(self, options, ranks)

    def stop(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.daemons = []
        # slurmd leaves the daemons of its job steps running; they end once they have reported their steps, or give up.
        processes.wait_until_gone("SLURM_CONF", self.path("slurm.conf"), 10)


class Srun:
    def __init__(self, cluster, options, ranks):
        self.cluster = cluster
        self.prefix = [jobs.program("srun"), *options, "-n", str(ranks)]

    def start(self, command, **env):
        return jobs.Job([jobs.start([*self.prefix, *command], self.cluster.environment(**env))])
