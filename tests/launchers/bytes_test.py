"""Counted traffic against the kernel's counters of the test's own network: how many bytes were sent, and where."""

import jobs
import networks

STEPS = (3, 23)


class LoopbackTest(jobs.Case):
    def setUp(self):
        super().setUp()
        self.host = networks.Host()
        self.addCleanup(self.host.remove)

    def run_in_host(self, strategy, backend, steps):
        before = self.host.counters("lo").sent
        command = self.training("compare", "--strategies", strategy, "--backend", backend, "--ranks", jobs.RANKS, "--json", self.path("c.json"),
                                steps=steps)
        self.assert_good(jobs.run(self.host.command(command)))
        return self.host.counters("lo").sent - before, self.read_json("c.json")["runs"][0]

    def bytes_per_step(self, strategy, backend):
        """Bytes per step on the wire, by the kernel, and as counted by the ranks; start-up traffic is in neither."""
        few, _ = self.run_in_host(strategy, backend, STEPS[0])
        many, run = self.run_in_host(strategy, backend, STEPS[1])
        return (many - few) / (STEPS[1] - STEPS[0]), jobs.RANKS * sum(run["wire_bytes_per_step"].values())

    def test_network_bytes_equal_traffic_of_tcp_and_shm_sends_none(self):
        for strategy in ("ddp", "fsdp", "hsdp"):
            wire, counted = self.bytes_per_step(strategy, "tcp")
            # Headers and acknowledgements are extra; some ranks count a few bytes less than the maximum.
            self.assertGreater(wire, 0.99 * counted, strategy)
            self.assertLess(wire, 1.10 * counted, strategy)
            silent, same = self.bytes_per_step(strategy, "shm")
            self.assertEqual(same, counted, strategy)
            self.assertLess(silent, 0.01 * counted, strategy)


if __name__ == "__main__":
    jobs.main()
