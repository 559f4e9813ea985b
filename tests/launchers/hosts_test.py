"""`tessera run --hosts` over a real sshd: values, environment, deaths of ranks, sessions, links and launchers, and bad input.

Two network namespaces are the hosts a and b; the launcher runs on a. Ranks 0 and 1 are on a, 2 and 3 on b.
"""

import os
import pathlib
import re
import shutil
import signal
import time

import jobs
import ssh_hosts

SLEEPER = ("--", "sh", "-c", "echo pid $$; exec sleep 100")


class HostsTest(jobs.Case):
    @classmethod
    def setUpClass(cls):
        cls.hosts = ssh_hosts.SshHosts()
        cls.addClassCleanup(cls.hosts.remove)

    def run_tool(self, *arguments, env=None, **how):
        return jobs.run(self.hosts.command(*arguments, **how), jobs.environment(**(env or {})), 60)

    def start(self, *arguments):
        """The launcher and its mark; the program prints "pid N"."""
        mark = self.mark()
        job = jobs.start(self.hosts.command("--forward", "MARK", *arguments), jobs.environment(MARK=mark))
        self.addCleanup(lambda: jobs.end(job) if job.returncode is None else None)
        pids = {}
        while len(pids) < 4:
            line = job.stdout.readline()
            self.assertTrue(line, job.poll() is None or job.communicate())
            tag, _, pid = line.split()
            pids[int(tag.strip("[]"))] = int(pid)
        return job, mark, pids

    def moved(self):
        """Bytes over the link between the hosts so far."""
        return sum(self.hosts.pair.hosts[0].counters(self.hosts.pair.INTERFACE))

    def ended(self, job, mark, code, last, seconds=15):
        """The launcher ends in time with this last line, and leaves nothing behind on any host."""
        end = jobs.finish(job, seconds)
        self.assertEqual(end.code, code, end.err)
        self.assertRegex(end.err.splitlines()[-1], f"^tessera: {last}$")
        self.assertTrue(ssh_hosts.nothing_left(self.hosts, mark))
        return end

    def test_ranks_are_numbered_by_host_and_get_listed_variables(self):
        script = ("echo $TESSERA_RANK $TESSERA_WORLD_SIZE $TESSERA_LOCAL_RANK $TESSERA_LOCAL_WORLD_SIZE $TESSERA_ALGO/$GIVEN/$KEPT $PWD;"
                  " readlink /proc/self/ns/net; echo to errors >&2; cat")
        env = dict(TESSERA_ALGO="all_reduce=ring", GIVEN="a b 'c' $d", KEPT="secret")
        end = self.run_tool("--forward", "GIVEN", "--directory", self.folder, "--", "sh", "-c", script, env=env)
        self.assertEqual(end.code, 0, end.err)
        places = sorted(line for line in end.out.splitlines() if "net:" not in line)
        self.assertEqual(places, [f"[{r}] {r} 4 {r % 2} 2 all_reduce=ring/a b 'c' $d/ {self.folder}" for r in range(4)])
        spaces = dict(line.split(" ", 1) for line in end.out.splitlines() if "net:" in line)
        self.assertEqual((spaces["[0]"], spaces["[2]"]), (spaces["[1]"], spaces["[3]"]))
        self.assertNotEqual(spaces["[0]"], spaces["[2]"])
        self.assertEqual(sorted(end.err.splitlines()), [f"[{r}] to errors" for r in range(4)])

    def test_training_ends_with_the_bits_of_one_host(self):
        words = self.training("train", "--json", self.path("t.json"))  # backend auto over hosts, shm on one
        before = self.moved()
        self.assert_good(self.run_tool("--", *words))
        self.assertGreater(self.moved() - before, 1 << 20)  # the ranks of the two hosts exchange gradients
        with open(self.path("t.json"), encoding="utf-8") as file:
            far = file.read().splitlines()[-1]
        self.assert_good(jobs.run([*words, "--ranks", "4"]))
        with open(self.path("t.json"), encoding="utf-8") as file:
            here = file.read().splitlines()[-1]
        self.assertIn("final_parameters_hash", here)
        self.assertEqual(far, here)

    def test_sums_over_hosts_are_right(self):
        program = [jobs.TOOL, "bench", "all_reduce", "--check", "--max-bytes", "64", "--factor", "8", "--iterations", "2", "--json", self.path("b.json")]
        for backend in ("auto", "tcp"):  # auto: what hosts get without a variable
            self.assert_good(self.run_tool("--no-tag", "--", *program, *(() if backend == "auto" else ("--backends", backend))))
            results = self.read_json("b.json")["results"]
            self.assertTrue(results)
            self.assertEqual({one["wrong"] for one in results}, {0})

    def test_hostfile_and_logs(self):
        file = self.path("hosts")
        with open(file, "w", encoding="ascii") as out:
            out.write("# two forms\na slots=1   # Open MPI's\n\nb:3\n")
        end = self.run_tool("--no-tag", "--log-dir", self.path("logs"), "--", "sh", "-c", "echo $TESSERA_RANK of $TESSERA_LOCAL_WORLD_SIZE",
                            hosts=("--hostfile", file))
        self.assertEqual((end.code, sorted(end.out.split("\n"))), (0, ["", "0 of 1", "1 of 3", "2 of 3", "3 of 3"]), end.err)
        with open(self.path("logs/rank-2.log"), encoding="ascii") as log:
            self.assertEqual(log.read(), "2 of 3\n")
        end = self.run_tool("-n", "3", "--", "sh", "-c", "echo $TESSERA_LOCAL_WORLD_SIZE", hosts=("--hosts", "a,b"))
        self.assertEqual((end.code, sorted(end.out.split("\n"))), (0, ["", "[0] 2", "[1] 2", "[2] 1"]), end.err)

    def test_killed_rank_is_named_with_its_host(self):
        job, mark, pids = self.start(*SLEEPER)
        self.assertEqual(len(self.hosts.far_sides()), 4)  # control of nothing_left(): two starters with their guards
        self.assertGreaterEqual(len(ssh_hosts.marked(mark)), 4)
        os.kill(pids[3], signal.SIGKILL)
        self.ended(job, mark, 1, r"host b: rank 3 was killed by signal 9 \(SIGKILL\)")

    def test_failed_rank_is_named_with_its_last_words(self):
        end = self.run_tool("--", "sh", "-c", "[ $TESSERA_RANK = 1 ] && { echo broken >&2; exit 5; }; exec sleep 100")
        self.assertEqual((end.code, end.err.splitlines()[-1]), (1, "tessera: host a: rank 1 ended with code 5: broken"))

    def test_killed_rank_of_the_tool_is_the_cause_and_not_those_that_miss_it(self):
        words = self.training("train", "--backend", "tcp", steps=100000)
        mark = self.mark()
        job = jobs.start(self.hosts.command("--forward", "MARK", "--", *words), jobs.environment(MARK=mark))
        for line in job.stdout:
            if "step 3 " in line:
                break
        os.kill(jobs.pids_by_rank(mark)[2], signal.SIGKILL)
        self.ended(job, mark, 1, r"host b: rank 2 was killed by signal 9 \(SIGKILL\)")

    def test_killed_session_of_sshd(self):
        job, mark, pids = self.start(*SLEEPER)
        far = ssh_hosts.parent_of(pids[2])
        self.assertIn(far, self.hosts.far_sides())
        os.kill(ssh_hosts.parent_of(far), signal.SIGKILL)
        self.ended(job, mark, 1, r"host b: the connection is lost.*")

    def test_killed_starter_on_a_host(self):
        job, mark, pids = self.start(*SLEEPER)
        os.kill(ssh_hosts.parent_of(pids[1]), signal.SIGKILL)
        # Its guard kills by the name of the run; here the hosts share their processes, so that it finds those of b and ssh, too.
        self.ended(job, mark, 1, r"host [ab]: (the connection is lost|rank \d was killed).*")

    def test_process_that_outlives_ssh_does_not_delay_the_end(self):
        script = pathlib.Path(self.folder, "ssh")  # as a ProxyCommand that stays: it has the streams of the connection
        script.write_text("#!/bin/sh\n[ \"$3\" = -G ] || sleep 40 &\nexec ssh \"$@\"\n")
        script.chmod(0o755)
        end = self.run_tool("--", "sh", "-c", "echo said $TESSERA_RANK", ssh=script)
        self.assertEqual((end.code, sorted(end.out.splitlines())), (0, [f"[{r}] said {r}" for r in range(4)]), end.err)
        self.assertLess(end.seconds, 20)

    def test_cut_link(self):
        job, mark, _ = self.start(*SLEEPER)
        self.hosts.pair.cut()
        self.addCleanup(self.hosts.pair.mend)
        end = jobs.finish(job, 40)
        self.assertEqual((end.code, end.err.splitlines()[-1][:36]), (1, "tessera: host b: the connection is l"), end.err)
        self.assertTrue(ssh_hosts.nothing_left(self.hosts, mark, 60))

    def test_interrupts(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            job, mark, _ = self.start(*SLEEPER)
            job.send_signal(number)
            self.ended(job, mark, 1, rf"stopped by signal {number.value} \({number.name}\)", 8)

    def test_ranks_that_ignore_the_interrupt(self):
        job, mark, _ = self.start("--", "sh", "-c", "trap '' INT TERM; echo pid $$; while :; do sleep 1; done")
        job.send_signal(signal.SIGINT)
        self.ended(job, mark, 1, r"stopped by signal 2 \(SIGINT\)", 8)

    def test_killed_launcher_leaves_nothing(self):
        job, mark, _ = self.start("--", "sh", "-c", "setsid sleep 100 & echo pid $$; wait")
        job.kill()
        job.communicate()
        self.assertTrue(ssh_hosts.nothing_left(self.hosts, mark))

    def test_token_is_on_no_command_line(self):
        _, mark, pids = self.start(*SLEEPER)
        with open(f"/proc/{pids[2]}/environ", "rb") as file:
            environment = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
        token = environment[b"TESSERA_TOKEN"].decode()
        self.assertGreaterEqual(len(token), 32)
        self.assertEqual(self.hosts.processes(token), [])
        self.assertTrue(self.hosts.processes("sleep", "100"))  # control of processes()
        self.assertRegex(environment[b"TESSERA_MASTER"].decode(), r"^10\.77\.13\.1:\d+$")

    def test_bad_input_is_one_line(self):
        other = self.path("other")
        with open(other, "w", encoding="ascii") as file:
            file.write("#!/bin/sh\necho c hello 9.9.9 elsewhere\nread order\n")
        os.chmod(other, 0o755)
        folder = dict(hosts=("--hosts", "a,b"))
        cases = [
            (dict(hosts=("--hosts", "a,nohost.invalid")), r"host nohost.invalid: no connection: ssh: Could not resolve hostname .*; check: ssh .*"),
            (dict(config=self.hosts.wrong_config, **folder), r"host [ab]: no connection: .*Permission denied \(publickey.*\).*; check: ssh .*"),
            (dict(tool="/nowhere/tessera", **folder), r"host [ab]: can't run '/nowhere/tessera' there \(code 127\): .*; install tessera .*"),
            (dict(tool=other, **folder), rf"host [ab]: '{other}' there is tessera 9\.9\.9, here it is .*; install the same version, .*"),
            (dict(hosts=("--hosts", "a,-oProxyCommand=x")), r"--hosts: '-oProxyCommand=x' is no host; write host or host:slots"),
            (dict(hosts=("--hosts", "a:x")), r"--hosts: slots.*'x'.*"),
            (dict(hosts=("--hosts", "a:2,b:1", "-n", "9")), r"run: 9 ranks don't fit into the 3 slots of the hosts; .*"),
            (dict(hosts=("--hostfile", "/nowhere")), r"--hostfile: can't read '/nowhere': No such file or directory; .*"),
            (dict(hosts=()), r"--ssh, --remote-tessera, .* are for ranks on hosts; give --hosts or --hostfile"),
        ]
        for how, expected in cases:
            end = self.run_tool("--", "true", **how)
            self.assertEqual(end.code, 2, (how, end.err))
            self.assertRegex(end.err, f"^tessera: {expected}\n$")
        for arguments, expected in [(("--", "no-such-program"), r"host [ab]: can't start 'no-such-program': .*"),
                                    (("--directory", "/nowhere", "--", "true"), r"host [ab]: can't enter the directory '/nowhere': .*"),
                                    (("--address", "10.9.9.9:x", "--", "true"), r"host a: --address.*")]:
            end = self.run_tool(*arguments)
            self.assertEqual(end.code, 2, end.err)
            self.assertRegex(end.err, f"^tessera: {expected}\n$")
        end = jobs.run([jobs.TOOL, "run", "--hosts", "a", "--ssh", "/no/ssh", "--", "true"])
        self.assertEqual(end.code, 2)
        self.assertRegex(end.err, r"^tessera: run: can't start '/no/ssh': .*; install openssh-client, or give --ssh\n$")

    def test_name_that_leads_to_loopback(self):
        end = self.run_tool("--address", "127.0.0.1", "--", "true")
        self.assertEqual(end.code, 2, end.err)
        self.assertRegex(end.err, r"^tessera: host a: the rendezvous' address is 127\.0\.0\.1:\d+ there, which host b can't reach; .*\n$")

    def test_many_ranks(self):
        end = self.run_tool("--", "sh", "-c", "echo here", hosts=("--hosts", "a:32,b:32"))
        self.assertEqual(end.code, 0, end.err)
        self.assertEqual(sorted(re.findall(r"^\[(\d+)\] here$", end.out, re.M), key=int), [str(r) for r in range(64)])

    def test_output_that_is_not_read_ends_nothing(self):
        job, _, _ = self.start("--", "sh", "-c", "echo pid $$; sleep 2; yes | head -c 400000")
        time.sleep(2)
        end = jobs.finish(job, 60)
        self.assertEqual(end.code, 0, end.err)
        self.assertEqual(len(re.findall(r"\] y$", end.out, re.M)), 4 * 200000)

    def page(self):
        """docs/rendezvous.md, whose commands these tests run."""
        return (pathlib.Path(__file__).parents[2] / "docs" / "rendezvous.md").read_text(encoding="utf-8")

    def test_mpirun_line_of_the_page(self):
        line = re.search(r"^\$ (mpirun.openmpi .*) \./train$", self.page(), re.M)[1].split()
        line[1:1] = ["--mca", "plm_rsh_args", f"-F {self.hosts.config}", "--bind-to", "none", "--mca", "oob_tcp_if_include", "wire0"]
        env = jobs.environment(TESSERA_MASTER=f"{self.hosts.pair.ADDRESSES[0]}:29400", TESSERA_TOKEN="4e1c5f0a9b7d2638", TESSERA_BACKEND="auto")
        before = self.moved()
        end = jobs.run(self.hosts.on_first(*line, *self.training("train", "--json", self.path("m.json"))), env, 60)
        self.assertEqual(end.code, 0, end.err)
        with open(self.path("m.json"), encoding="utf-8") as file:
            self.assertIn("final_parameters_hash", file.read())
        self.assertGreater(self.moved() - before, 1 << 20)

    def test_kubernetes_manifest_of_the_page(self):
        manifest = re.search(r"```yaml\n(.*?)```", self.page(), re.S)[1]
        command = re.search(r'command: \[sh, -c, "(.*) tessera train"\]', manifest)[1]
        env = dict(re.findall(r'\{name: (TESSERA_\w+), value: "(.*)"\}', manifest), TESSERA_TOKEN="4e1c5f0a9b7d2638")
        self.assertEqual(env["TESSERA_WORLD_SIZE"], re.search(r"completions: (\d+)", manifest)[1])
        name = env["TESSERA_MASTER"].split(":")[0]
        files = []
        for host in self.hosts.pair.hosts:  # `ip netns exec` puts this file in the place of /etc/hosts
            folder = pathlib.Path("/etc/netns") / host.name
            folder.mkdir(parents=True)
            self.addCleanup(shutil.rmtree, folder)
            files.append(folder / "hosts")
            files[-1].write_text("127.0.0.1 localhost\n", encoding="ascii")
        pods = []
        for index in (1, 0):
            words = [jobs.TOOL, *self.training("train", "--global-batch", "4")[1:]]
            pod = self.hosts.pair.hosts[index].command(["sh", "-c", f'{command} "$@"', "sh", *words])
            pods.append(jobs.start(pod, jobs.environment(**env, JOB_COMPLETION_INDEX=index)))
            self.addCleanup(lambda one=pods[-1]: jobs.end(one) if one.returncode is None else None)
            time.sleep(1)  # the first pod's name is there when it runs
            for file in files:
                with open(file, "a", encoding="ascii") as out:
                    out.write(f"{self.hosts.pair.ADDRESSES[0]} {name}\n")
        ends = [jobs.finish(pod, 40) for pod in pods]
        self.assertEqual([end.code for end in ends], [0, 0], [end.err for end in ends])
        self.assertIn("step 3 ", ends[1].out)


if __name__ == "__main__":
    jobs.main()
