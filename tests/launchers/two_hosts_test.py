"""Two hosts of two ranks each, with a 1 Gbit/s link: bytes over the link, step times, and a link that is cut.

The hosts are network namespaces; the kernel counts the bytes sent over the link. Ranks 0 and 1 are on the first host.
"""

import time

import jobs
import networks
from jobs import RANKS

LINK_BYTES_PER_SECOND = 1e9 / 8
TIMEOUT = 4  # timeout of an operation, in seconds
WARM_STEPS, LAST_STEP = 2, 7
DIRECT = "all_reduce=direct,all_gather=direct,reduce_scatter=direct"


class Measured:
    """Per step: seconds, and bytes sent by each interface of a host, the larger value of the two hosts."""

    def __init__(self, steps, before, after):
        self.seconds = (after[0] - before[0]) / steps
        self.link, self.loopback = (max(b - a for a, b in zip(before[k], after[k])) / steps for k in (1, 2))


class TwoHostsTest(jobs.Case):
    @classmethod
    def setUpClass(cls):
        cls.pair = networks.Pair("1gbit")
        cls.addClassCleanup(cls.pair.remove)

    def start(self, command, **changes):
        env = dict(TESSERA_WORLD_SIZE=RANKS, TESSERA_LOCAL_WORLD_SIZE=2, TESSERA_MASTER=f"{self.pair.ADDRESSES[0]}:29400",
                   TESSERA_TOKEN="swordfish", TESSERA_TIMEOUT=f"{TIMEOUT}s", TESSERA_ALGO=DIRECT)
        env.update(changes)
        return jobs.Job([jobs.start(self.pair.hosts[r // 2].command(command), jobs.environment(**env, TESSERA_RANK=r, TESSERA_LOCAL_RANK=r % 2))
                         for r in range(RANKS)])

    def command(self, strategy, backend, steps):
        return self.training("train", "--strategy", strategy, "--backend", backend, "--global-batch", RANKS, "--seq-len", 32,
                             model="gpt-mini", steps=steps)

    def wait_for_step(self, job, step):
        for line in job.processes[0].stdout:
            if line.startswith(f"step {step} "):
                return time.monotonic(), *([host.counters(name).sent for host in self.pair.hosts] for name in (self.pair.INTERFACE, "lo"))
        self.fail(job.processes[0].stderr.read())

    def measure(self, strategy, backend):
        with self.start(self.command(strategy, backend, LAST_STEP)) as job:
            before = self.wait_for_step(job, WARM_STEPS)
            after = self.wait_for_step(job, LAST_STEP)
            self.assert_good(job.finish())
        return Measured(LAST_STEP - WARM_STEPS, before, after)

    def formulas(self, strategy):
        """Bytes that a rank sends per step, by the table of docs/comparison.md, as compare prints them."""
        ended = jobs.run(self.training("compare", "--strategies", strategy, "--ranks", RANKS, "--global-batch", RANKS, "--seq-len", 32, "--json",
                                       self.path("c.json"), model="gpt-mini", steps=1))
        self.assert_good(ended)
        return self.read_json("c.json")["runs"][0]["formula_bytes_per_step"]

    def test_bench_measures_ranks_on_several_hosts(self):
        # Its worlds use one TESSERA_MASTER, one after the other.
        command = [jobs.TOOL, "bench", "--cluster", self.path("cluster.json"), "--ranks", str(RANKS), "--backends", "tcp", "--max-bytes", "64K",
                   "--factor", "8", "--iterations", "1"]
        with self.start(command, TESSERA_TIMEOUT="60s") as job:
            self.assert_good(job.finish(500))
        self.assertEqual([one["ranks"] for one in self.read_json("cluster.json")["communicators"]], [1, 2, 4])

    def test_hsdp_is_faster_than_fsdp_by_what_crosses_the_link(self):
        # fsdp: two of the three peers of each of two ranks are on the other host. hsdp: the other replica is.
        flat, cut = self.formulas("fsdp"), self.formulas("hsdp")
        expected = {"fsdp": 2 * (flat["all_gather"] + flat["reduce_scatter"]) * 2 / 3, "hsdp": 2 * cut["all_reduce"]}
        within = 2 * (cut["all_gather"] + cut["reduce_scatter"])  # the shard axis, on each host

        fsdp = self.measure("fsdp", "tcp")
        hsdp = self.measure("hsdp", "shm+tcp")
        over_tcp = self.measure("hsdp", "tcp")
        for measured, strategy in ((fsdp, "fsdp"), (hsdp, "hsdp"), (over_tcp, "hsdp")):
            # When rank 0 ends a step, others may be some units ahead or behind: a part of one of the five steps.
            self.assertGreater(measured.link, 0.9 * expected[strategy], strategy)
            self.assertLess(measured.link, 1.15 * expected[strategy], strategy)
            # No step is faster than its bytes at the link's rate (except for the limiter's token bucket and the reading of the clock).
            self.assertGreater(measured.seconds, 0.9 * expected[strategy] / LINK_BYTES_PER_SECOND, strategy)
        # shm+tcp: the shard axis does not use the network, the replicate axis does. The control is tcp for both.
        self.assertLess(hsdp.loopback, 0.01 * within)
        self.assertGreater(over_tcp.loopback, 0.9 * within)

        saved = (expected["fsdp"] - expected["hsdp"]) / LINK_BYTES_PER_SECOND
        differences = [fsdp.seconds - hsdp.seconds]
        # Compute hides a part of both, and memory at 2 GB/s adds some time: half to twice the prediction. Other programs that take
        # the cores make both slower by chance, so a pair outside of that is measured again.
        while not 0.5 * saved < differences[-1] < 2 * saved and len(differences) < 3:
            differences.append(self.measure("fsdp", "tcp").seconds - self.measure("hsdp", "shm+tcp").seconds)
        print(f"fsdp minus hsdp: {', '.join(f'{seconds:.2f}' for seconds in differences)} s a step; the bytes predict {saved:.2f} s")
        self.assertGreater(differences[-1], 0.5 * saved)
        self.assertLess(differences[-1], 2 * saved)

    def test_broken_link_is_error_that_names_peer(self):
        for strategy, backend in (("fsdp", "tcp"), ("hsdp", "shm+tcp")):
            with self.start(self.command(strategy, backend, 1000)) as job:
                self.wait_for_step(job, WARM_STEPS)
                self.pair.cut()
                self.addCleanup(self.pair.mend)
                begin = time.monotonic()
                ended = [jobs.finish(process, 30) for process in job.processes]
            # The timeout, the status queries after it, and the same again for ranks that wait for ranks waiting for the link.
            self.assertLess(time.monotonic() - begin, 3 * TIMEOUT)
            for rank, one in enumerate(ended):
                self.assertEqual(one.code, 1, (rank, one.err))
                self.assertEqual(len(one.err.splitlines()), 1, one.err)
                other = "[23]" if rank < 2 else "[01]"
                self.assertRegex(one.err, rf"^tessera: rank {rank}: .*(rank {other} |rank \d \(global rank {other}\) )"
                                          r"(is not responding|died|is lost)")
            self.pair.mend()

    def test_shm_across_the_hosts_is_one_clear_line(self):
        with self.start(self.command("fsdp", "shm", 1)) as job:
            ended = [jobs.finish(process, 30) for process in job.processes]
        for one in ended:
            self.assertEqual((one.code, one.out), (2, ""))
            self.assertRegex(one.err, r"^tessera: shm needs all ranks on one host: rank 2 is on host \S+, rank 0 on \S+; use backend auto\n$")

    def test_several_hosts_need_a_master(self):
        with self.start(self.command("fsdp", "tcp", 1), TESSERA_MASTER="", TESSERA_RUN_ID=self.mark()) as job:
            ended = [jobs.finish(process, 30) for process in job.processes]
        for one in ended:
            self.assertEqual((one.code, one.out), (2, ""))
            self.assertRegex(one.err, r"^tessera: init: the tessera launcher says that 2 of 4 ranks are on this host: across hosts set "
                                      r"TESSERA_MASTER=host:port .* and TESSERA_TOKEN [^\n]*\n$")


if __name__ == "__main__":
    jobs.main()
