"""Hosts for tests of `tessera run --hosts`: network namespaces with a real sshd each, and keys made for the test."""

import os
import shutil
import subprocess
import tempfile
import time

import jobs
import networks

SERVER = """Port 22
ListenAddress {address}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/key.pub
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
"""
CLIENT = """Host {names}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
"""


class SshHosts:
    """Two hosts, "a" and "b" in ssh's configuration; `start` runs the tool on the first."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="tessera-ssh-")
        self.servers = []
        self.pair = networks.Pair()
        try:
            self.tool = os.path.join(self.folder, "tessera")  # finds its processes by this path
            os.symlink(jobs.TOOL, self.tool)
            for key in ("key", "host_key", "wrong_key"):
                subprocess.run([jobs.program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", self.path(key)], check=True, timeout=20)
            self.write_client_files()
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # a package's start script makes it
            for name, host, address in zip("ab", self.pair.hosts, self.pair.ADDRESSES):
                config = self.path(f"sshd-{name}")
                self.write(config, SERVER.format(folder=self.folder, address=address))
                self.servers.append(subprocess.Popen(host.command(["/usr/sbin/sshd", "-D", "-e", "-f", config]), stderr=subprocess.DEVNULL))
            for name in "ab":
                jobs.wait(lambda host=name: jobs.run(self.on_first("ssh", "-F", self.config, host, "true")).code == 0, 10)
        except BaseException:
            self.remove()
            raise

    def write_client_files(self):
        with open(self.path("host_key.pub"), encoding="ascii") as file:
            key = " ".join(file.read().split()[:2])
        self.write(self.path("known_hosts"), "".join(f"{address} {key}\n" for address in self.pair.ADDRESSES))
        self.config = self.path("config")
        self.wrong_config = self.path("wrong_config")
        text = "".join(f"Host {name}\n  HostName {address}\n" for name, address in zip("ab", self.pair.ADDRESSES))
        text += CLIENT.format(names="*", folder=self.folder)
        self.write(self.config, text)
        self.write(self.wrong_config, text.replace("/key\n", "/wrong_key\n"))

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, path, text):
        with open(path, "w", encoding="ascii") as file:
            file.write(text)

    def on_first(self, *command):
        return self.pair.hosts[0].command(list(command))

    def command(self, *arguments, hosts=("--hosts", "a:2,b:2"), subcommand="run", ssh="ssh", config=None, tool=None):
        return self.on_first(jobs.TOOL, subcommand, *hosts, "--ssh", f"{ssh} -F {config or self.config}", "--remote-tessera",
                             tool or self.tool, *arguments)

    def processes(self, *words):
        """Processes with all these texts in their command line."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    line = file.read().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if line and all(word in line for word in words):
                found.append(int(pid))
        return found

    def far_sides(self):
        """The starters on the hosts, whose parents are the sessions of sshd."""
        return [pid for pid in self.processes(self.tool, "--as-host") if not self.is_ssh(pid)]

    @staticmethod
    def is_ssh(pid):
        try:
            return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("ssh")
        except OSError:
            return False

    def remove(self):
        for server in self.servers:
            server.kill()
            server.wait()
        self.pair.remove()
        shutil.rmtree(self.folder)


def parent_of(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


def marked(mark):
    """Processes whose environment holds the mark, except the launcher's own and its ssh clients."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if f"MARK={mark}".encode() in file.read():
                    found.append(int(pid))
        except OSError:
            pass
    return found


def nothing_left(hosts, mark, seconds=8):
    deadline = time.monotonic() + seconds
    while (left := marked(mark) + hosts.far_sides()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left == []
