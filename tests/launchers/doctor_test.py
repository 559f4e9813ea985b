"""`tessera doctor` with real faults: a loopback interface that is down, limits, full or missing file systems, hosts over ssh, firewalls.

Namespaces make the faults; two of them with an sshd are the hosts a and b.
"""

import pathlib

import jobs
import ssh_hosts

FAR_SIDE = """#!/usr/bin/env python3
import json, sys, time
def say(**what): print("c " + json.dumps(what), flush=True)
say(version="9.9.9", identity="elsewhere", machine="a slow one", places=[], findings=[])
for line in sys.stdin:
    say(clock=time.time() + 100)
"""


class DoctorCase(jobs.Case):
    def examine(self, command, code, **env):
        """The findings by host and subject, which the printed lines have too. `code`: None where both can be."""
        end = jobs.run([*command, "--json", self.path("found.json")], jobs.environment(**env), 120)
        found = self.read_json("found.json")
        counts = {level: sum(one["level"] == level for one in found["findings"]) for level in ("error", "warning")}
        self.assertEqual(end.code, (1 if counts["error"] else 0) if code is None else code, end)
        self.assertEqual((found["errors"], found["warnings"]), (counts["error"], counts["warning"]))
        self.assertRegex(end.out.splitlines()[-1], rf"^doctor: {counts['error']} errors?, {counts['warning']} warnings?$")
        for one in found["findings"]:
            self.assertIn(one["found"], end.out)
            self.assertIn(one["remedy"], end.out)
        return {(one.get("host", ""), one["subject"]): one for one in found["findings"]}


class OneHostTest(DoctorCase):
    def local(self, setting, code, **env):
        """`setting`: commands of a shell in namespaces of its own, before the doctor."""
        found = self.examine(["unshare", "-mnu", "sh", "-c", setting + '\nexec "$@"', "sh", jobs.TOOL, "doctor"], code, **env)
        return {subject: one for (_, subject), one in found.items()}

    def test_healthy_host(self):
        found = self.local("ip link set lo up; hostname localhost", 0)
        for backend in ("shm", "tcp"):
            self.assertEqual((found[f"backend {backend}"]["level"], found[f"backend {backend}"]["found"]), ("ok", "two ranks sum 1 MiB"))
        for subject in ("memory", "open files", "memory reads"):
            self.assertEqual(found[subject]["level"], "ok", found[subject])
        self.assertNotIn("loopback", found)
        self.assertEqual(found["interfaces"]["level"], "note")  # a namespace without any

    def test_loopback_that_is_down(self):
        found = self.local("true", 1)
        self.assertEqual(found["loopback"]["level"], "error")
        self.assertEqual(found["loopback"]["remedy"], "ip link set lo up")
        self.assertEqual(found["backend tcp"]["level"], "error")
        self.assertIn("loopback", found["backend tcp"]["found"])

    def test_limits_and_file_systems(self):
        found = self.local("ip link set lo up; hostname name-without-address; ulimit -n 256; mount -t tmpfs -o size=1m tmpfs /dev/shm", None)
        self.assertEqual({found[name]["level"] for name in ("open files", "/dev/shm")}, {"warning"})
        self.assertIn("256", found["open files"]["found"])
        self.assertEqual(found["name"]["level"], "note")
        self.assertEqual([found[f"backend {name}"]["level"] for name in ("shm", "tcp")], ["ok", "ok"])
        self.assertRegex(found["backend ucx"]["found"], "^two ranks (fail: .*/dev/shm is full|sum 1 MiB$)")  # 1.13, and 1.18, which needs less
        found = self.local("ip link set lo up; mount -t tmpfs -o ro tmpfs /dev/shm", 1)
        self.assertIn("can't be written", found["/dev/shm"]["found"])

    def test_bad_variable(self):
        found = self.local("ip link set lo up", 1, TESSERA_TIMEOUT="soon")
        self.assertEqual(found["backend shm"]["level"], "error")
        self.assertIn("TESSERA_TIMEOUT", found["backend shm"]["found"])

    def test_options_need_hosts(self):
        end = jobs.run([jobs.TOOL, "doctor", "--remote-tessera", "/x"])
        self.assertEqual((end.code, end.out), (2, ""))
        self.assertRegex(end.err, "^tessera: --ssh, --remote-tessera, .*; give --hosts or --hostfile\n$")


class HostsTest(DoctorCase):
    @classmethod
    def setUpClass(cls):
        cls.hosts = ssh_hosts.SshHosts()
        cls.addClassCleanup(cls.hosts.remove)

    def on_hosts(self, code, names="a,b", **how):
        return self.examine(self.hosts.command(hosts=("--hosts", names), subcommand="doctor", **how), code)

    def test_healthy_hosts(self):
        found = self.on_hosts(0)
        for pair in ("a -> b", "b -> a"):
            self.assertEqual(found[pair, "ports"]["level"], "ok")
            self.assertRegex(found[pair, "ports"]["found"], r"^10\.77\.13\.[12]:\d+ answers$")
        self.assertEqual(found["", "world"]["found"], "a rank on each of 2 hosts sums 1 MiB")
        self.assertEqual({found[host, "backend tcp"]["level"] for host in "ab"}, {"ok"})
        self.assertFalse({("b", "version"), ("b", "clock"), ("b", "machine"), ("b", "identity")} & set(found))
        self.assertEqual(self.hosts.far_sides(), [])

    def test_firewall(self):
        self.hosts.pair.hosts[1].drop_connections(self.hosts.pair.INTERFACE, but=22)
        self.addCleanup(self.hosts.pair.hosts[1].accept_connections)
        found = self.on_hosts(1)
        self.assertEqual(found["a -> b", "ports"]["level"], "error")
        self.assertRegex(found["a -> b", "ports"]["found"], r"^10\.77\.13\.2:\d+: ")
        self.assertNotIn(("", "world"), found)

    def test_host_without_connection(self):
        found = self.on_hosts(1, config=self.hosts.wrong_config)
        self.assertRegex(found["b", "ssh"]["found"], r"^no connection: .*Permission denied")
        found = self.on_hosts(1, tool="/nowhere/tessera")
        self.assertRegex(found["a", "ssh"]["found"], r"^can't run '/nowhere/tessera doctor' there: .*")

    def test_hosts_that_differ(self):
        other = pathlib.Path(self.folder, "other")
        other.write_text(FAR_SIDE)
        other.chmod(0o755)
        found = self.on_hosts(1, tool=other)
        self.assertEqual((found["b", "version"]["level"], found["b", "clock"]["level"]), ("error", "warning"))
        self.assertRegex(found["b", "clock"]["found"], r"^\+(99|100)\.\d s from this host's$")
        self.assertEqual(found["b", "identity"]["found"], "it is the same host as a")
        self.assertEqual(found["a -> b", "ports"]["found"], "it has no address")


if __name__ == "__main__":
    jobs.main()
