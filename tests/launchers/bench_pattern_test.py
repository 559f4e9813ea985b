"""`tessera bench --pattern` on eight hosts: a slow link or host is named with its rate, and an even fabric has none.

The hosts are network namespaces on a switch; tc limits the rate of each port.
"""

import jobs
import networks

HOSTS, MBIT, SLOW_MBIT = 8, 40, 10  # so slow that a busy machine keeps up
GBPS = 1e-3 / 8  # of a Mbit/s
BYTES, INCAST_BYTES = 1 << 20, 160 << 10


class BenchPatternTest(jobs.Case):
    @classmethod
    def setUpClass(cls):
        cls.star = networks.Star(HOSTS, MBIT)
        cls.addClassCleanup(cls.star.remove)

    def setUp(self):
        super().setUp()
        self.addCleanup(self.star.restore)

    def bench(self, pattern, *arguments):
        size = INCAST_BYTES if pattern == "incast" else BYTES
        command = [jobs.TOOL, "bench", "--pattern", pattern, "--backend", "tcp", "-e", str(size), "-n", "3", "-w", "0", "--json",
                   self.path("out.json"), *arguments]
        places = dict(TESSERA_WORLD_SIZE=HOSTS, TESSERA_LOCAL_WORLD_SIZE=1, TESSERA_LOCAL_RANK=0, TESSERA_TOKEN="swordfish",
                      TESSERA_MASTER=f"{self.star.address(0)}:29400", TESSERA_TIMEOUT="60s")
        with jobs.Job([jobs.start(host.command(command), jobs.environment(**places, TESSERA_RANK=rank))
                       for rank, host in enumerate(self.star.hosts)]) as job:
            ended = job.finish(600)
        self.assert_good(ended)
        pattern, = self.read_json("out.json")["patterns"]
        self.assertEqual((pattern["unit"], len(pattern["units"]), pattern["bytes"]), ("host", HOSTS, size))
        return pattern, ended.out

    def test_a_slow_link_is_named_with_its_rate(self):
        self.star.limit_link(2, 5, SLOW_MBIT)
        found, text = self.bench("pairs")
        self.assertEqual([part["units"] for part in found["slow"]], [[2, 5], [5, 2]], text)
        for part in found["slow"]:
            self.assertAlmostEqual(part["gbps"] / (SLOW_MBIT * GBPS), 1, delta=0.05)
            self.assertEqual(found["matrix_gbps"][part["units"][0]][part["units"][1]], part["gbps"])
        self.assertAlmostEqual(found["slow"][0]["median_gbps"] / (MBIT * GBPS), 1, delta=0.05)
        self.assertRegex(text, r"(?m)^# Slow        : the link from host 2 \(.+\) to host 5 \(.+\): 0\.001[123]\d+ GB/s, 0\.2\d of the median")
        unseen, text = self.bench("pairs", "--outlier", "1000")  # the control: no rate is so many deviations below the median
        self.assertEqual(unseen["slow"], [], text)
        self.assertLess(unseen["matrix_gbps"][2][5], 1.1 * SLOW_MBIT * GBPS)
        self.assertIn("# Slow        : none\n", text)

    def test_a_slow_host_is_named_and_not_each_of_its_links(self):
        self.star.limit(3, SLOW_MBIT)
        for pattern in ("bisection", "incast"):
            found, text = self.bench(pattern)
            self.assertEqual([part["units"] for part in found["slow"]], [[3]], text)
            self.assertAlmostEqual(found["slow"][0]["gbps"] / (SLOW_MBIT * GBPS), 1, delta=0.05 if pattern == "bisection" else 0.5)

    def test_an_even_fabric_has_nothing_slow_and_an_incast_shares_one_port(self):
        bisection, text = self.bench("bisection")
        self.assertEqual(bisection["slow"], [], text)
        self.assertEqual(sorted(sorted(group["units"]) for group in sum((r["groups"] for r in bisection["rounds"]), [])),
                         [[a, b] for a in range(HOSTS) for b in range(a + 1, HOSTS) for _ in range(2)], "each in both directions")
        for one in bisection["rounds"]:
            self.assertEqual(sorted(sum((group["units"] for group in one["groups"]), [])), list(range(HOSTS)))
            self.assertAlmostEqual(one["sum_gbps"] / (HOSTS / 2 * MBIT * GBPS), 1, delta=0.1)
        incast, text = self.bench("incast")
        for rate in incast["rates"]:  # seven senders, and no more than the rate of one port
            self.assertLess(rate["gbps"], 1.05 * MBIT * GBPS, text)
            self.assertGreater(rate["gbps"], 0.4 * MBIT * GBPS, text)


if __name__ == "__main__":
    jobs.main()
