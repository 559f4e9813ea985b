"""Networks for tests: namespaces that count as hosts, with a link between two of them. Needs root; removed afterwards."""

import collections
import os
import subprocess
import unittest

import jobs

Counters = collections.namedtuple("Counters", "received sent")


def ip(*arguments):
    done = subprocess.run([jobs.program("ip"), *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        if "not permitted" in done.stderr or "denied" in done.stderr:
            raise unittest.SkipTest(f"needs the right to make network namespaces (root): ip {' '.join(arguments)}: {done.stderr.strip()}")
        raise AssertionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """A network namespace with a loopback interface."""

    made = 0

    def __init__(self):
        Host.made += 1
        self.name = f"tessera-{os.getpid()}-{Host.made}"
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")

    def command(self, command):
        return [jobs.program("ip"), "netns", "exec", self.name, *command]

    def counters(self, interface):
        """Bytes since the interface was created."""
        done = subprocess.run(self.command(["cat", "/proc/net/dev"]), capture_output=True, text=True, timeout=20, check=True)
        fields = next(line for line in done.stdout.splitlines() if line.strip().startswith(interface + ":")).split(":")[1].split()
        return Counters(int(fields[0]), int(fields[8]))

    def ip(self, *arguments):
        return ip("-n", self.name, *arguments)

    def drop_connections(self, interface, to=None, but=None):
        """Drops TCP connections that come in by the interface: those to the port `to`, or all but those of the port `but`."""
        self.ip("rule", "add", "pref", "100", "lookup", "local")
        for side in ("sport", "dport") if but else ():
            self.ip("rule", "add", "pref", "40", "iif", interface, "ipproto", "tcp", side, str(but), "lookup", "local")
        self.ip("rule", "add", "pref", "50", "iif", interface, "ipproto", "tcp", *(("dport", str(to)) if to else ()), "blackhole")
        self.ip("rule", "delete", "pref", "0")  # else it accepts them first

    def accept_connections(self):
        """Ends drop_connections()."""
        self.ip("rule", "add", "pref", "0", "lookup", "local")
        while any(line.startswith(("40:", "50:", "100:")) for line in self.ip("rule").splitlines()):
            for preference in ("40", "50", "100"):
                if any(line.startswith(preference + ":") for line in self.ip("rule").splitlines()):
                    self.ip("rule", "delete", "pref", preference)

    def remove(self):
        ip("netns", "delete", self.name)


class Pair:
    """Two hosts and a link with a limited rate in each direction."""

    ADDRESSES = ("10.77.13.1", "10.77.13.2")
    INTERFACE = "wire0"

    def __init__(self, rate="1gbit"):
        self.hosts = []
        try:
            for _ in self.ADDRESSES:
                self.hosts.append(Host())
            first, second = (host.name for host in self.hosts)
            ip("-n", first, "link", "add", self.INTERFACE, "type", "veth", "peer", "name", self.INTERFACE, "netns", second)
            for host, address in zip(self.hosts, self.ADDRESSES):
                ip("-n", host.name, "address", "add", address + "/24", "dev", self.INTERFACE)
                ip("-n", host.name, "link", "set", self.INTERFACE, "up")
                subprocess.run([jobs.program("tc"), "-n", host.name, "qdisc", "add", "dev", self.INTERFACE, "root", "tbf", "rate", rate,
                                "burst", "256k", "latency", "50ms"], check=True, timeout=20)
        except BaseException:
            self.remove()
            raise

    def cut(self):
        ip("-n", self.hosts[0].name, "link", "set", self.INTERFACE, "down")

    def mend(self):
        ip("-n", self.hosts[0].name, "link", "set", self.INTERFACE, "up")

    def remove(self):
        for host in self.hosts:
            host.remove()
        self.hosts = []
