"""Networks with faults: the ranks start nevertheless, or each says in time which rank is not reached where, and why.

The hosts are network namespaces with a link between them.
"""

import re
import tempfile

import jobs
import networks

PORT = 29400
TIMEOUT = 4  # seconds


class Case(jobs.Case):
    def setUp(self):
        super().setUp()
        self.pair = networks.Pair()
        self.addCleanup(self.pair.remove)
        self.near, self.far = self.pair.hosts
        self.address, self.far_address = self.pair.ADDRESSES
        self.master = f"{self.address}:{PORT}"

    def run_on(self, *hosts, backend="tcp", places=None, **common):
        """One rank on each of these hosts; `places`: more variables for each."""
        common = {**dict(TESSERA_WORLD_SIZE=len(hosts), TESSERA_MASTER=self.master, TESSERA_TOKEN="swordfish", TESSERA_RUN_ID=self.mark(),
                         TESSERA_TIMEOUT=f"{TIMEOUT}s"), **common}
        command = self.training("train", "--backend", backend, "--global-batch", len(hosts), steps=1)
        ranks = [jobs.start(host.command(command), jobs.environment(**{**common, **(places[r] if places else {}), "TESSERA_RANK": r}))
                 for r, host in enumerate(hosts)]
        with jobs.Job(ranks):
            return [jobs.finish(rank, 60) for rank in ranks]

    def assert_start(self, *hosts, **options):
        for ended in self.run_on(*hosts, **options):
            self.assert_good(ended)

    def assert_errors(self, patterns, *hosts, code=1, seconds=TIMEOUT + 2, **options):
        """One line from each rank that matches its pattern; code 0: 1 or 2."""
        for pattern, ended in zip(patterns, self.run_on(*hosts, **options), strict=True):
            self.assertEqual(len(ended.err.splitlines()), 1, ended)
            self.assertIn(ended.code, (code,) if code else (1, 2), ended)
            self.assertRegex(ended.err, pattern)
            self.assertLess(ended.seconds, seconds)


class NoFaultTest(Case):
    """The control: the same hosts and commands."""

    def test_two_hosts(self):
        for backend in ("tcp", "auto"):
            self.assert_start(self.near, self.near, self.far, self.far, backend=backend)


class LoopbackTest(Case):
    DOWN = r"the loopback interface of {} is down, by which the ranks on it connect \(ip link set lo up\)\n$"

    def setUp(self):
        super().setUp()
        self.near.ip("link", "set", "lo", "down")

    def test_ranks_on_other_hosts_start(self):
        self.assert_start(self.near, self.far)

    def test_ranks_on_one_host_start_over_shared_memory(self):
        self.assert_start(self.near, self.near, backend="auto", TESSERA_MASTER="")

    def test_ranks_on_one_host_say_why_not(self):
        self.assert_errors(["tcp: " + self.DOWN.format("this rank's host")] * 2, self.near, self.near, TESSERA_MASTER="")

    def test_a_master_on_the_host_is_not_reached(self):
        for master in (self.master, f"127.0.0.1:{PORT}"):
            place = "TESSERA_MASTER=" + re.escape(master)
            self.assert_errors(["rank 1 did not connect at " + place + ".*" + self.DOWN.format("rank 0's host"),
                                "found no rank 0 .*" + place + ": " + self.DOWN.format("this rank's host")],
                               self.near, self.near, TESSERA_MASTER=master)

    def test_the_host_is_named_to_all(self):
        self.assert_errors(["rank 2: tcp: " + self.DOWN.format("this rank's host")] * 4, self.far, self.far, self.near, self.near,
                           TESSERA_MASTER=f"{self.far_address}:{PORT}")


class LinkLocalTest(Case):
    def setUp(self):
        super().setUp()
        self.far.ip("link", "set", self.pair.INTERFACE, "down")
        self.far.ip("link", "set", self.pair.INTERFACE, "name", "other0")
        self.far.ip("link", "set", "other0", "up")
        jobs.wait(lambda: "tentative" not in self.near.ip("address", "show") + self.far.ip("address", "show"), 20)
        line = self.near.ip("-6", "-o", "address", "show", "dev", self.pair.INTERFACE)
        self.local = re.search(r"fe80::[0-9a-f:]+", line).group()

    def test_each_host_names_its_own_interface(self):
        places = [dict(TESSERA_MASTER=f"[{self.local}%{name}]:{PORT}") for name in (self.pair.INTERFACE,) * 2 + ("other0",) * 2]
        for backend in ("tcp", "auto"):
            self.assert_start(self.near, self.near, self.far, self.far, backend=backend, places=places)

    def test_without_an_interface(self):
        self.assert_errors([rf"TESSERA_MASTER=\[{self.local}\]:{PORT}: a link-local address needs the interface .* \[{self.local}%eth0\]"] * 2,
                           self.near, self.far, code=2, seconds=2, TESSERA_MASTER=f"[{self.local}]:{PORT}")

    def test_with_the_interface_of_another_host(self):
        line = f"%{self.pair.INTERFACE}\\]:{PORT}: this host has no interface '{self.pair.INTERFACE}'; it has: lo, other0\n$"
        self.assert_errors(["rank 1 did not connect", line], self.near, self.far, code=0, TESSERA_MASTER=f"[{self.local}%{self.pair.INTERFACE}]:{PORT}")


class EqualHostsTest(Case):
    """Cloned machines have equal identities: their ranks start as those of different hosts."""

    def test_ranks_start(self):
        for backend in ("tcp", "auto", "shm+tcp"):
            self.assert_start(self.near, self.near, self.far, self.far, backend=backend, TESSERA_HOST_ID="clone")
            self.assert_start(self.far, self.near, self.far, self.near, backend=backend, TESSERA_HOST_ID="clone",
                              TESSERA_MASTER=f"{self.far_address}:{PORT}")

    def test_shared_memory_is_refused(self):
        self.assert_errors([r"shm needs all ranks on one host: rank 1 is on host clone \(rank 1's\), rank 0 on clone \(rank 0's\)"] * 2,
                           self.near, self.far, code=2, seconds=2, backend="shm", TESSERA_HOST_ID="clone")

    def test_ranks_of_one_host_share_memory(self):
        self.assert_start(self.near, self.near, backend="shm", TESSERA_HOST_ID="clone")


class ContainersTest(Case):
    def test_containers_of_one_network_share_memory_without_common_files(self):
        # As the containers of a pod: a network namespace, and files of their own.
        private = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
        with tempfile.NamedTemporaryFile("w", dir="/var/tmp", encoding="ascii") as data:
            data.write(jobs.TEXT)
            data.flush()
            self.text = data.name
            self.run_privately(private)

    def run_privately(self, private):
        for backend, hosts in (("shm", (self.near,) * 2), ("shm+tcp", (self.near, self.near, self.far, self.far))):
            command = self.training("train", "--backend", backend, "--global-batch", len(hosts), steps=1)
            common = dict(TESSERA_WORLD_SIZE=len(hosts), TESSERA_MASTER=self.master, TESSERA_TOKEN="swordfish", TESSERA_TIMEOUT=f"{TIMEOUT}s")
            with jobs.Job([jobs.start(host.command([*private, *command]), jobs.environment(**common, TESSERA_RANK=r))
                           for r, host in enumerate(hosts)]) as job:
                self.assert_good(job.finish(60))


class DroppedTest(Case):
    def test_connections_to_the_master(self):
        self.near.drop_connections(self.pair.INTERFACE, to=PORT)
        place = "TESSERA_MASTER=" + re.escape(self.master)
        self.assert_errors(["rank 1 did not connect at " + place, "found no rank 0 .*" + place + r": Connection timed out \(does a firewall"],
                           self.near, self.far)

    def test_connections_between_ranks(self):
        self.far.drop_connections(self.pair.INTERFACE, but=PORT)
        self.assert_errors([rf"not connected within 3s to rank 1 at {re.escape(self.far_address)}:\d+: no answer \(does a firewall"] * 2,
                           self.near, self.far)

    def test_a_blackhole(self):
        self.far.ip("route", "add", "blackhole", self.address + "/32")
        self.assert_errors(["rank 1 did not connect", rf"found no rank 0 .*: Invalid argument \(does a route .*ip route get {re.escape(self.address)}\)"],
                           self.near, self.far)


if __name__ == "__main__":
    jobs.main()
