"""`tessera bench --compare`, `--baseline` and the environment in its JSON."""

import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "harness"))
import processes  # noqa: E402

TOOL = None
RUN = ("all_reduce,barrier", "--ranks", "2", "--max-bytes", "64", "--iterations", "20")


def clean_environment(**more):
    prefixes = ("TESSERA_", "UCX_", "OMPI_", "I_MPI_", "MPICH_", "NCCL_")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(prefixes)}, **more}


def bench(*arguments, **environment):
    done = subprocess.run([TOOL, "bench", *map(str, arguments)], text=True, capture_output=True, timeout=300, env=clean_environment(**environment))
    return done.returncode, done.stdout, done.stderr


class FilesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        code, _, err = bench(*RUN, "--json", cls.folder / "measured.json", TESSERA_ALGO="all_reduce=direct", TESSERA_TOKEN="very-private-token", MPICH_PASSWORD="very-private")
        assert (code, err) == (0, ""), err
        cls.text = (cls.folder / "measured.json").read_text()
        cls.measured = json.loads(cls.text)

    def file(self, name, change, host=None):
        """A file whose times are those of a quiet machine: 10 us with rounds 9.9 to 10.1, times `change(row)`."""
        run = copy.deepcopy(self.measured)
        for row in run["results"]:
            factor = change(row)
            row["time_us"]["median"] = 10 * factor
            row["rounds_us"] = [us * factor for us in (9.9, 10, 10, 10, 10.1)]
        run["environment"]["hosts"][0].update(load=0, **(host or {}))
        path = self.folder / name
        path.write_text(json.dumps(run))
        return path

    def compare(self, before, after):
        code, out, err = bench("--compare", before, after, "--json", self.folder / "compared.json")
        self.assertEqual((code, err), (0, ""))
        return out, json.loads((self.folder / "compared.json").read_text())

    def test_environment_describes_host_ranks_and_variables(self):
        found = self.measured["environment"]
        self.assertEqual(list(found), ["version", "command", "hosts", "backends"])
        self.assertEqual(found["command"], "tessera bench " + " ".join(RUN) + f" --json {self.folder}/measured.json")
        host, system = found["hosts"][0], os.uname()
        self.assertEqual((len(found["hosts"]), host["name"], host["kernel"]), (1, system.nodename, f"{system.release} {system.machine}"))
        self.assertEqual((host["cores"], host["memory_bytes"]), (os.cpu_count(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
        self.assertGreaterEqual(host["load"], 0)
        for nic in host["nics"]:
            self.assertEqual(nic["mtu"], int(pathlib.Path("/sys/class/net", nic["name"], "mtu").read_text()))
        self.assertEqual(host["variables"]["TESSERA_ALGO"], "all_reduce=direct")
        self.assertEqual(host["variables"]["MPICH_PASSWORD"], "(secret)")
        self.assertFalse({"TESSERA_RANK", "TESSERA_TOKEN", "TESSERA_MASTER"} & set(host["variables"]))
        self.assertNotIn("very-private", self.text)
        (backend,) = found["backends"]
        self.assertEqual((backend["backend"], [rank["host"] for rank in backend["ranks"]]), ("shm", [0, 0]))
        for rank in backend["ranks"]:
            self.assertTrue(set(rank["cores"]) <= os.sched_getaffinity(0), rank)
            self.assertTrue(rank["cores"])

    def test_each_host_is_described(self):
        ranks, master = [], f"127.0.0.1:{processes.free_port()}"
        for rank, name in enumerate(("here", "there")):
            start = ["unshare", "--map-root-user", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]
            ranks.append(subprocess.Popen(
                [*start, TOOL, "bench", "all_reduce", "--backend", "tcp", "--max-bytes", "8", "--iterations", "3", "--json", self.folder / "two.json"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=clean_environment(TESSERA_RANK=str(rank), TESSERA_WORLD_SIZE="2", TESSERA_LOCAL_RANK="0", TESSERA_LOCAL_WORLD_SIZE="1",
                                      TESSERA_MASTER=master, TESSERA_RUN_ID="two-hosts", TESSERA_TOKEN="0123456789abcdef" * 2, TESSERA_TIMEOUT="60s")))
        for rank in ranks:
            _, err = rank.communicate(timeout=120)
            self.assertEqual((rank.returncode, err), (0, ""))
        found = json.loads((self.folder / "two.json").read_text())["environment"]
        self.assertEqual([host["name"] for host in found["hosts"]], ["here", "there"])
        self.assertEqual([rank["host"] for rank in found["backends"][0]["ranks"]], [0, 1])

    def test_rounds_are_in_the_file(self):
        for row in self.measured["results"]:
            self.assertEqual(len(row["rounds_us"]), 5)
            self.assertTrue(row["time_us"]["min"] <= min(row["rounds_us"]) <= max(row["rounds_us"]) <= row["time_us"]["max"], row)
            low, high = min(row["rounds_us"]), max(row["rounds_us"])
            self.assertIs(row["noisy"], high > 1.5 * low)

    def test_comparison_names_what_changed_beyond_the_noise(self):
        before = self.file("before.json", lambda row: 1)
        factors = {8: 1.3, 16: 0.5, 32: 1.01}
        after = self.file("after.json", lambda row: factors.get(row["bytes"], 1), {"kernel": "7.0"})
        out, found = self.compare(before, after)
        of_size = {bytes: {row["verdict"] for row in found["rows"] if row["bytes"] == bytes} for bytes in (0, 8, 16, 32, 64)}
        same = {"within the noise"}
        self.assertEqual(of_size, {0: same, 8: {"slower"}, 16: {"faster"}, 32: same, 64: same})
        self.assertIn("of 9 rows in both 2 slower, 2 faster, 5 within the noise", out)
        self.assertIn("all_reduce of 8 bytes (shm, out of place): 10.00 -> 13.00 us, 30 % slower", out)
        self.assertEqual(found["environment"], [f"host 0 kernel: {self.measured['environment']['hosts'][0]['kernel']} -> 7.0"])

    def test_equal_files_and_overlapping_rounds_show_no_change(self):
        before = self.file("before.json", lambda row: 1)
        out, found = self.compare(before, before)
        self.assertEqual(({row["verdict"] for row in found["rows"]}, found["environment"]), ({"within the noise"}, []))
        self.assertIn("# environment: no difference", out)
        noisy = json.loads(self.file("noisy.json", lambda row: 1.3).read_text())
        for row in noisy["results"]:
            row["rounds_us"][0] = 10
        (self.folder / "noisy.json").write_text(json.dumps(noisy))
        _, found = self.compare(before, self.folder / "noisy.json")
        self.assertEqual({row["verdict"] for row in found["rows"]}, {"within the noise"})

    def test_comparison_names_a_host_with_other_programs(self):
        before = self.file("before.json", lambda row: 1)
        busy = self.file("busy.json", lambda row: 1)
        run = json.loads(busy.read_text())
        run["environment"]["hosts"][0].update(load=1e4)
        busy.write_text(json.dumps(run))
        _, found = self.compare(before, busy)
        self.assertRegex(found["environment"][0], "^after, .*: the load average was 10000.0 on ")

    def test_a_run_slower_than_its_baseline_fails_and_names_the_rows(self):
        fast = self.file("fast.json", lambda row: 1e-5 if row["bytes"] == 16 else 1e5)
        code, out, err = bench(*RUN, "--baseline", fast, "--max-slowdown", "10%")
        self.assertEqual((code, err.count("\n")), (1, 1), err)
        self.assertIn("2 of 9 rows slower by more than 10 %: all_reduce of 16 bytes (shm, out of place)", err)
        self.assertIn("all_reduce of 16 bytes (shm, in place)", err)
        self.assertEqual(out.count("# slower: "), 2)
        self.assertIn("TESSERA_ALGO: all_reduce=direct -> not there", out)

    def test_a_run_within_its_baseline_passes(self):
        slow = self.file("slow.json", lambda row: 1e5)
        code, out, err = bench(*RUN, "--baseline", slow)
        self.assertEqual((code, err), (0, ""))
        self.assertIn("9 rows compared, 0 slower by more than 5 %", out)
        run = json.loads(self.file("noisy.json", lambda row: 1e-5).read_text())
        for row in run["results"]:
            row["rounds_us"][4] = 1e6  # as slow as anything: no row can be told from it
        (self.folder / "noisy.json").write_text(json.dumps(run))
        code, out, err = bench(*RUN, "--baseline", self.folder / "noisy.json")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(out.count("# within the noise: "), 9)

    def test_mistakes_are_one_line_and_code_2(self):
        good = self.file("good.json", lambda row: 1)
        (self.folder / "other.json").write_text('{"ranks": 2}')
        (self.folder / "text.json").write_text("no json")
        four = json.loads(good.read_text())
        four["ranks"] = 4
        (self.folder / "four.json").write_text(json.dumps(four))
        for row in four["results"]:
            del row["rounds_us"]
        (self.folder / "old.json").write_text(json.dumps(four))
        for number, (change, says) in enumerate((({"environment": {"hosts": -1}}, "environment.hosts"), ({"environment": {"hosts": ["x"]}}, "environment.hosts"),
                                                 ({"environment": {"hosts": [], "backends": "x"}}, "environment.backends"), ({"environment": 3}, "environment"),
                                                 ({"results": [{**json.loads(good.read_text())["results"][0], "bytes": -1}]}, "bytes"),
                                                 ({"results": [{**json.loads(good.read_text())["results"][0], "rounds_us": [-5, 1, 2]}]}, "rounds_us"))):
            bad = self.folder / f"bad-{number}.json"
            bad.write_text(json.dumps({**json.loads(good.read_text()), **change}))
            code, out, err = bench("--compare", good, bad)
            self.assertEqual((code, out, err.count("\n"), says in err, "exception" in err), (2, "", 1, True, False), err)
        for arguments, says in (
            (("--compare", good, self.folder / "none.json"), "none.json"),
            (("--compare", good, self.folder / "other.json"), "is not what `tessera bench --json` writes"),
            (("--compare", self.folder / "text.json", good), "text.json"),
            (("--compare", good, self.folder / "four.json"), "measure both alike"),
            (("--compare", good, self.folder / "old.json"), "--iterations 3 or more"),
            (("--compare", good), "--compare"),
            (("--compare", good, good, "--check"), "--check has no effect with --compare; leave it out"),
            (("--compare", good, good, "--json", good), "is the input"),
            ((*RUN, "--baseline", self.folder / "four.json"), "use --ranks 4"),
            ((*RUN, "--baseline", good, "--dtype", "f64"), "has no row that this run measures"),
            ((*RUN, "--baseline", good, "--cold"), "was measured without --cold"),
            ((*RUN, "--baseline", good, "--aggregate"), "was measured without --aggregate"),
            ((*RUN, "--baseline", good, "--misaligned"), "was measured without --misaligned"),
            ((*RUN, "--baseline", good, "--max-slowdown", "fast"), "give a percentage from 0% to 1000%, such as 5%"),
            ((*RUN, "--max-slowdown", "5%"), "no effect without --baseline"),
            (("all_reduce", "--ranks", "2", "-n", "2", "--baseline", good), "not --iterations 2"),
            (("all_reduce", "--ranks", "2", "--tune", self.folder / "t", "--baseline", good), "leave --baseline out"),
        ):
            code, out, err = bench(*arguments)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), (arguments, out, err))
            self.assertIn(says, err)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
