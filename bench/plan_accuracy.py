#!/usr/bin/env python3
"""How far `tessera plan` is from `tessera compare` on this machine.

    bench/plan_accuracy.py build/release [--backends shm,tcp] [--ranks 2,4] [--models A,B] [--rounds 3] [--markdown]
                           [--network RATE | --link LATENCY,RATE] [--max-bytes 64M]

For each backend and number of ranks `bench --cluster` measures the machine. Then `compare` trains each model in several
rounds, and `plan` predicts the same steps from the measured cluster. `odd` is a model of 5 blocks of width 112, of which
bench --cluster measures neither width nor depth. A row has the median over the rounds of the medians of the steps, its
lowest and highest, the plan, and the plan's error. Leave the machine alone meanwhile.

With --network each rank is on a host of its own (a network namespace; needs root) behind a switch, at RATE in each
direction, in the units of tc: 1gbit. With --link, compare's links are that slow, and the plan is for the same link.
"""
import argparse
import atexit
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile

ODD = {"model_type": "gpt2", "n_layer": 5, "n_embd": 112, "n_head": 4, "n_positions": 128, "n_ctx": 128, "vocab_size": 256,
       "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
# Compare pins these, so they are measured; without TESSERA_ALGO bench --cluster measures those of train.
ALGORITHMS = ",".join(f"{operation}=direct" for operation in ("all_reduce", "all_gather", "reduce_scatter"))
STEPS = {"gpt-mini": 10}
USUAL_STEPS = 60


def run(tool, *arguments, **environment):
    done = subprocess.run([tool, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment})
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, arguments))}: {done.stdout.strip()}")


class Network:
    """Hosts (network namespaces) on a switch, each with a link of a limited rate in both directions."""

    def __init__(self, hosts, rate):
        atexit.register(self.remove)
        self.names = [f"tessera-{os.getpid()}-{name}" for name in ("switch", *range(hosts))]
        switch, *self.hosts = self.names
        for name in self.names:
            self.do(f"ip netns add {name}")
            self.do(f"ip -n {name} link set lo up")
        self.do(f"ip -n {switch} link add switch up type bridge")
        for i, host in enumerate(self.hosts):
            self.do(f"ip -n {host} link add wire up type veth peer name port{i} netns {switch}")
            self.do(f"ip -n {switch} link set port{i} up master switch")
            self.do(f"ip -n {host} address add {self.address(i)}/24 dev wire")
            for place, interface in ((host, "wire"), (switch, f"port{i}")):
                self.do(f"tc -n {place} qdisc add dev {interface} root tbf rate {rate} burst 32k latency 50ms")

    def do(self, command):
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"--network needs root, ip and tc: {command}: {done.stderr.strip()}")

    def address(self, host):
        return f"10.77.14.{host + 1}"

    def run(self, tool, *arguments, **environment):
        """Runs the tool with a rank on each host. A rank uses the cores that it would use as a rank of one host."""
        cores = sorted(os.sched_getaffinity(0))
        env = dict(os.environ, **environment, TESSERA_WORLD_SIZE=str(len(self.hosts)), TESSERA_MASTER=f"{self.address(0)}:29400", TESSERA_TOKEN="accuracy")
        ranks = []
        for rank, host in enumerate(self.hosts):
            share = len(cores) // len(self.hosts)
            mine = cores[rank * share:(rank + 1) * share] or [cores[rank % len(cores)]]
            ranks.append(subprocess.Popen(["ip", "netns", "exec", host, "taskset", "-c", ",".join(map(str, mine)), tool, *map(str, arguments)],
                                          env=dict(env, TESSERA_RANK=str(rank)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        ended = [(rank.communicate()[0], rank.returncode) for rank in ranks]
        for output, code in ended:
            if code != 0:
                sys.exit(f"{' '.join(map(str, arguments))}: {output.strip()}")

    def remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


class Machine:
    """A backend and a number of ranks, as measured by bench --cluster."""

    def __init__(self, tool, backend, ranks, folder, bench_options=(), network=None, link=None):
        self.tool, self.backend, self.ranks, self.folder, self.link = tool, backend, ranks, pathlib.Path(folder), link
        self.run = network.run if network else run
        self.cluster = self.folder / f"{backend}-{ranks}.json"
        self.run(tool, "bench", "--cluster", self.cluster, "--ranks", ranks, "--backends", backend, *bench_options,
                 TESSERA_ALGO=ALGORITHMS)

    def strategies(self):
        return "ddp,zero1,fsdp" + (",hsdp" if self.ranks >= 4 else "")

    def measured(self, model, steps, *options):
        out = self.folder / "compare.json"
        self.run(self.tool, "compare", "--model", self.file_of(model), "--ranks", self.ranks, "--strategies", self.strategies(),
                 "--steps", steps, "--backend", self.backend, *(["--link", self.link] if self.link else []), *options, "--json", out)
        return {one["strategy"]: one for one in json.loads(out.read_text())["runs"]}

    def planned(self, model, *options):
        out = self.folder / "plan.json"
        run(self.tool, "plan", "--model", self.file_of(model), "--ranks", self.ranks, "--strategies", self.strategies(),
            *(["--link", self.link, "--machine", self.cluster] if self.link else ["--cluster", self.cluster]), *options, "--json", out)
        return {one["strategy"]: one for one in json.loads(out.read_text())["runs"]}

    def rows(self, model, rounds, steps=None):
        return self.rows_of(model, self.rounds(model, rounds, steps))

    def rounds(self, model, rounds, steps=None):
        return [self.measured(model, steps or STEPS.get(model, USUAL_STEPS)) for _ in range(rounds)]

    def rows_of(self, model, measured):
        """(strategy, measured ms by round, planned ms, exposed ms by round, planned exposed ms)"""
        for strategy, plan in self.planned(model).items():
            yield (strategy, [one[strategy]["step_ms"]["median"] for one in measured], plan["step_ms"]["median"],
                   [one[strategy]["exposed_communication_ms"] for one in measured], plan["exposed_communication_ms"])

    def file_of(self, model):
        if model != "odd":
            return model
        file = self.folder / "odd.json"
        file.write_text(json.dumps(ODD))
        return file


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--backends", default="shm,tcp")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--models", default="gpt-nano,gpt-mini,odd")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-bytes", default="64M", help="largest operation that bench --cluster measures; less saves time on slow links")
    slower = parser.add_mutually_exclusive_group()
    slower.add_argument("--network", metavar="RATE")
    slower.add_argument("--link", metavar="LATENCY,RATE")
    parser.add_argument("--markdown", action="store_true", help="the table as docs have it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that networks are removed
    errors = []
    form = ("| {} | {} | {} | {} | {:.2f} ({:.2f} to {:.2f}) | {:.2f} | {:+.1f} % | {:.2f} | {:.2f} |" if options.markdown else
            "{:4} {} {:9} {:6} {:9.3f} ({:.3f} to {:.3f}) {:9.3f} {:+6.1f} % {:9.3f} {:9.3f}")
    heads = ["backend", "ranks", "model", "strategy", "measured ms", "plan ms", "error", "exposed ms", "plan ms"]
    print("| " + " | ".join(heads) + " |\n" + "| -- " * len(heads) + "|" if options.markdown else ", ".join(heads))
    with tempfile.TemporaryDirectory() as folder:
        for backend in options.backends.split(","):
            for ranks in map(int, options.ranks.split(",")):
                network = Network(ranks, options.network) if options.network else None
                machine = Machine(os.path.join(options.build, "tessera"), backend, ranks, folder, ("--max-bytes", options.max_bytes),
                                  network, options.link)
                for model in options.models.split(","):
                    for strategy, measured, planned, exposed, planned_exposed in machine.rows(model, options.rounds):
                        median = statistics.median(measured)
                        errors.append(abs(planned / median - 1))
                        print(form.format(backend, ranks, model, strategy, median, min(measured), max(measured), planned,
                                          100 * (planned / median - 1), statistics.median(exposed), planned_exposed), flush=True)
                if network:
                    network.remove()
    print(f"\nerror of the plan: mean {100 * statistics.mean(errors):.1f} %, at most {100 * max(errors):.1f} %, "
          f"{sum(error <= 0.1 for error in errors)} of {len(errors)} within 10 %")


if __name__ == "__main__":
    main()
