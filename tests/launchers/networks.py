"""Networks for tests: namespaces that count as hosts, with a link between two of them or a switch. Needs root; removed afterwards."""

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


class Star:
    """Hosts on one switch. Every port has the same rate in each direction, unless slow() changes it."""

    INTERFACE, MTU = "wire0", "9000"  # large frames: headers are less than a hundredth of the bytes that tc counts

    def __init__(self, hosts, mbit):
        self.hosts, self.mbit, self.switch = [], mbit, Host()
        try:
            self.switch.ip("link", "add", "switch", "mtu", self.MTU, "type", "bridge")
            self.switch.ip("link", "set", "switch", "up")
            for number in range(hosts):
                host, port = Host(), f"port{number}"
                self.hosts.append(host)
                host.ip("link", "add", self.INTERFACE, "mtu", self.MTU, "type", "veth", "peer", "name", port, "mtu", self.MTU, "netns",
                        self.switch.name)
                host.ip("address", "add", self.address(number) + "/24", "dev", self.INTERFACE)
                host.ip("link", "set", self.INTERFACE, "up")
                self.switch.ip("link", "set", port, "master", "switch", "up")
                self.limit(number, mbit)
        except BaseException:
            self.remove()
            raise

    def address(self, number):
        return f"10.77.14.{number + 1}"

    @staticmethod
    def tc(host, *arguments):
        done = subprocess.run([jobs.program("tc"), "-n", host.name, *arguments], capture_output=True, text=True, timeout=20, check=False)
        if done.returncode != 0:
            raise AssertionError(f"tc {' '.join(arguments)}: {done.stderr.strip()}")

    def limit(self, number, mbit):
        """The rate of a host's port, in both directions."""
        for host, interface in ((self.hosts[number], self.INTERFACE), (self.switch, f"port{number}")):
            self.tc(host, "qdisc", "replace", "dev", interface, "root", "handle", "1:", "tbf", "rate", f"{mbit}mbit", "burst", "20k",
                    "latency", "400ms")

    def limit_link(self, a, b, mbit):
        """The rate between two hosts, in both directions; that of their other links is unchanged."""
        for here, there in ((a, b), (b, a)):
            device = ("dev", self.INTERFACE)
            self.tc(self.hosts[here], "qdisc", "replace", *device, "root", "handle", "2:", "htb", "default", "1")
            for number, rate in ((1, self.mbit), (2, mbit)):
                self.tc(self.hosts[here], "class", "add", *device, "parent", "2:", "classid", f"2:{number}", "htb", "rate", f"{rate}mbit",
                        "burst", "20k", "cburst", "20k")
            self.tc(self.hosts[here], "filter", "add", *device, "parent", "2:", "protocol", "ip", "u32", "match", "ip", "dst",
                    self.address(there) + "/32", "flowid", "2:2")

    def restore(self):
        for number in range(len(self.hosts)):
            self.tc(self.hosts[number], "qdisc", "delete", "dev", self.INTERFACE, "root")
            self.limit(number, self.mbit)

    def remove(self):
        for host in [self.switch, *self.hosts]:
            host.remove()
        self.hosts = []
