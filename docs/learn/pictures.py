"""The pictures of the lessons, drawn from simulated steps and from the operations' definitions: pictures.py TOOL [--check].

Simulated times are the same on every machine, so --check compares the files with what would be drawn.
"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
STYLE = """<style>
:root{color-scheme:light dark}
svg{--paper:#fff;--ink:#1c2024;--soft:#5c6670;--line:#d8dde2;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--hot:#c2210b;--pale:#b5d4e8;--r0:#cfe4f3;--r1:#fbdcc4;--r2:#c5ebdc;--r3:#ead3e8;--all:#fff0a8}
@media (prefers-color-scheme:dark){svg{--paper:#15181b;--ink:#e6e9ec;--soft:#9aa5b0;--line:#333a41;--c0:#3d9bd8;--c1:#ee7733;--c2:#2fbf93;--hot:#ff6a52;--pale:#2a4a5e;--r0:#1d4a6b;--r1:#6b3d17;--r2:#14533f;--r3:#57365a;--all:#5c4f10}}
text{font:13px system-ui,sans-serif;fill:var(--ink)} .n{font-size:12px} .s{fill:var(--soft);font-size:12px} .b{font-weight:600} .m{text-anchor:middle} .e{text-anchor:end}
.paper{fill:var(--paper)} .line{stroke:var(--line);fill:none}
</style><defs><pattern id="hot" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" style="fill:var(--paper)"/><rect width="3" height="6" style="fill:var(--hot)"/></pattern></defs>
"""
COLORS = ("var(--c0)", "var(--c1)", "var(--c2)")
DASHES = ("", ' stroke-dasharray="7 3"', ' stroke-dasharray="2 3"')


def plan(tool, *arguments):
    """The runs that `tessera plan` simulates."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "plan.json"
        subprocess.run([tool, "plan", "--model", "gpt-tall", "--ranks", "4", *arguments, "--json", file], check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text())["runs"]


def trace(tool, *arguments, model="gpt-tall"):
    """The events of one simulated step."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "trace.json"
        subprocess.run([tool, "plan", "--model", model, "--ranks", "4", *arguments, "--trace", file], check=True, stdout=subprocess.DEVNULL)
        events = json.loads(file.read_text())["traceEvents"]
    issued = {kind: [event["args"]["unit"] for event in events if event.get("cat") == kind] for kind in ("unshard_issue", "reduce_issue")}
    spans = [event for event in events if event["ph"] == "X"]
    for event in spans:  # transfers of one kind are in the order of their calls
        if event["cat"] == "transfer" and event["args"]["bytes"] > 1000:
            event["unit"] = issued["unshard_issue" if event["name"] == "all_gather" else "reduce_issue"].pop(0)
    return spans


def svg(width, height, title, description, body):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="t d"><title id="t">{title}</title>'
            f'<desc id="d">{description}</desc>\n{STYLE}<rect class="paper" width="{width}" height="{height}"/>\n' + "\n".join(body) + "\n</svg>\n")


def text(x, y, content, kind=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{content}</text>'


def bar(x, y, width, height, fill, title):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{height}" style="fill:{fill}"><title>{title}</title></rect>'


def timeline(tool):
    link = ("--link", "20us,100MB/s")
    steps = {name: trace(tool, "--strategies", name, *link) for name in ("ddp", "fsdp")}
    end = {name: run["step_ms"]["median"] for name, run in zip(steps, plan(tool, "--strategies", "ddp,fsdp", *link))}
    left, scale = 110, 860 / max(end.values())
    body = [text(12, 22, "One step of gpt-tall on 4 ranks, a link of 100 MB/s", "b"),
            text(12, 42, "Red hatching: computation waits, so communication is exposed. The link is busy beside computation elsewhere.", "s")]
    for row, (name, events) in enumerate(steps.items()):
        top = 64 + 130 * row
        exposed = sum(event["dur"] for event in events if event["cat"].endswith("_wait")) / 1e3
        body.append(text(12, top + 14, name, "b"))
        body.append(text(left, top + 14, f"step {end[name]:.3f} ms, of which {exposed:.3f} ms are waits", "s"))
        for label, y in (("computation", top + 40), ("link", top + 72)):
            body.append(text(left - 8, y + 4, label, "s e"))
        for event in events:
            x, width, kind = left + event["ts"] / 1e3 * scale, event["dur"] / 1e3 * scale, event["cat"]
            title = f'{event["name"]}: {event["dur"] / 1e3:.3f} ms'
            if kind in ("forward", "optimizer_step") or kind == "backward":
                body.append(bar(x, top + 28, width, 22, "var(--c0)" if kind == "forward" else "var(--c2)", title))
            elif kind.endswith("_wait"):
                body.append(bar(x, top + 28, width, 22, "url(#hot)", title))
            elif kind == "transfer" and event["args"]["bytes"] > 1000:
                body.append(bar(x, top + 60, width - 0.8, 22, "var(--c1)", f'{event["name"]} of {event["unit"]}, {event["args"]["bytes"]:,} B'))
                body.append(f'<text x="{x + width / 2:.1f}" y="{top + 75}" class="m" style="fill:#fff;font-size:{"11" if width > 30 else "8"}px">{event["unit"]}</text>')
    # Spans of the root enclose those of its units: waits are drawn above them.
    body.sort(key=lambda shape: "#hot" in shape)
    axis = 64 + 130 * 2
    for at in range(0, math.ceil(max(end.values())), 5):
        x = left + at * scale
        body += [f'<path class="line" d="M{x:.1f} {axis - 30}v6"/>', text(x, axis - 10, at, "s m")]
    body.append(text(left + 860, axis + 8, "ms", "s e"))
    for i, (color, label) in enumerate((("var(--c0)", "forward"), ("var(--c2)", "backward, update"), ("var(--c1)", "transfer"), ("url(#hot)", "wait"))):
        body += [bar(left + 150 * i, axis + 20, 14, 14, color, label), text(left + 150 * i + 20, axis + 32, label, "s")]
    return svg(1000, axis + 48, "Timelines of ddp and fsdp", "Under fsdp computation waits 25 ms for all-gathers and reductions, under ddp 19 ms for reductions.", body)


def chart(title, description, caption, xs, ticks, lines, unit, values=(10, 20, 50, 100, 200, 500)):
    """Lines over a logarithmic x and y, with a rule at each of the values; each point is a simulated step."""
    left, top, width, height = 70, 60, 700, 300
    low, high = math.log10(min(min(line) for line in lines.values())), math.log10(max(max(line) for line in lines.values()))
    low, high = low - 0.05, high + 0.05
    def place(x, y):
        return (left + width * (math.log10(x) - math.log10(xs[0])) / (math.log10(xs[-1]) - math.log10(xs[0])),
                top + height * (high - math.log10(y)) / (high - low))
    body = [text(12, 22, title, "b"), text(12, 42, caption, "s")]
    for value in values:
        if low <= math.log10(value) <= high:
            y = place(xs[0], value)[1]
            body += [f'<path class="line" d="M{left} {y:.1f}h{width}"/>', text(left - 8, y + 4, f"{value} ms", "s e")]
    for value, label in ticks:
        x = place(value, 10 ** low)[0]
        body += [f'<path class="line" d="M{x:.1f} {top}v{height}"/>', text(x, top + height + 18, label, "s m")]
    body.append(text(left + width, top + height + 38, unit, "s e"))
    for i, (name, ys) in enumerate(lines.items()):
        points = [place(x, y) for x, y in zip(xs, ys)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        body.append(f'<path d="{path}" style="fill:none;stroke:{COLORS[i]};stroke-width:2.5"{DASHES[i]}><title>{name}</title></path>')
        y = top + 20 + 22 * i
        body.append(f'<path d="M{left + width + 16} {y - 4}h28" style="fill:none;stroke:{COLORS[i]};stroke-width:2.5"{DASHES[i]}/>')
        body.append(text(left + width + 52, y, name))
    return svg(1000, top + height + 50, title, description, body)


def wraps(tool):
    names = {"a unit for each block": "block", "one unit": "none", "a unit for 2 blocks": "h.0+h.1;h.2+h.3;h.4+h.5;h.6+h.7"}
    latencies = [20, 50, 100, 200, 500, 1000, 2000, 5000]
    lines = {name: [] for name in names}
    for latency in latencies:
        runs = plan(tool, "--strategies", "fsdp", "--wraps", ",".join(names.values()), "--link", f"{latency}us,1GB/s")
        for name, run in zip(names, runs):
            lines[name].append(run["step_ms"]["median"])
    ticks = [(20, "20 us"), (100, "100 us"), (500, "500 us"), (1000, "1 ms"), (5000, "5 ms")]
    return chart("What should be a unit? gpt-tall, fsdp, 4 ranks, 1 GB/s", "At low latency a unit for each block is fastest, at high latency one unit.",
                 "Each operation costs the latency once: many small units pay it often, one large unit has nothing to overlap with.",
                 latencies, ticks, lines, "latency of the link")


def crossover(tool):
    names = ("ddp", "fsdp", "hsdp")
    rates = [5, 10, 20, 50, 100, 200, 330, 500, 1000]
    lines = {name: [] for name in names}
    for rate in rates:
        runs = plan(tool, "--strategies", ",".join(names), "--link", f"20us,{rate}MB/s", "--hosts", "2", "--link-intra", "5us,5GB/s")
        for name, run in zip(names, runs):
            lines[name].append(run["step_ms"]["median"])
    ticks = [(5, "5 MB/s"), (20, "20"), (100, "100"), (330, "330"), (1000, "1 GB/s")]
    return chart("Two hosts with two ranks each: gpt-tall", "Below 100 MB/s between the hosts hsdp is far ahead; from 330 MB/s on all three take as long as they compute.",
                 "Inside a host 5 GB/s. What crosses decides on a slow link; on a fast one, what is computed.", rates, ticks, lines, "rate between the hosts")


RANKS = range(4)
OWN = [[(1, 10, 100, 1000)[rank] * (1 + i) for i in RANKS] for rank in RANKS]  # what each of four ranks begins with
OF_ALL, NOBODY = "var(--all)", "none"


def cells(left, top, rows, fills, width=46, framed=()):
    """A row of numbers for each rank; None is a place that holds nothing. Frames the cells (rank, i)."""
    body = []
    for rank, row in enumerate(rows):
        for i, value in enumerate(row):
            x, y = left + i * width, top + rank * 24
            frame = ";stroke:var(--hot);stroke-width:2" if (rank, i) in framed else ""
            body.append(f'<rect x="{x}" y="{y}" width="{width - 4}" height="20" class="line" style="fill:{fills[rank][i]}{frame}"/>')
            if value is not None:
                body.append(text(x + (width - 4) / 2, y + 14, value, "n m"))
    return body


def of(rank):
    return f"var(--r{rank})"


def operations():
    """(name, what it does, before, fills, after, fills) of each operation, on four ranks."""
    empty, blank = [[None] * 4 for _ in RANKS], [[NOBODY] * 4 for _ in RANKS]
    sums = [sum(OWN[rank][i] for rank in RANKS) for i in RANKS]
    whole = [[of(rank)] * 4 for rank in RANKS]
    first = [OWN[0]] + empty[1:]
    parts = [[OWN[rank][i] if i == rank else None for i in RANKS] for rank in RANKS]
    one = [[of(rank) if i == rank else NOBODY for i in RANKS] for rank in RANKS]
    return [
        ("broadcast", "the root's data, to all", first, whole[:1] + blank[1:], [OWN[0]] * 4, [whole[0]] * 4),
        ("reduce", "the sum, to the root", OWN, whole, [sums] + empty[1:], [[OF_ALL] * 4] + blank[1:]),
        ("all_reduce", "the sum, to all", OWN, whole, [sums] * 4, [[OF_ALL] * 4] * 4),
        ("reduce_scatter", "of the sum to each its part", OWN, whole,
         [[sums[i] if i == rank else None for i in RANKS] for rank in RANKS], [[OF_ALL if i == rank else NOBODY for i in RANKS] for rank in RANKS]),
        ("all_gather", "all parts, to all", parts, one, [[OWN[i][i] for i in RANKS]] * 4, [[of(i) for i in RANKS]] * 4),
        ("all_to_all", "part i of each, to rank i", OWN, whole, [[OWN[i][rank] for i in RANKS] for rank in RANKS], [[of(i) for i in RANKS]] * 4),
        ("send, recv", "from rank 0 to rank 1", first, whole[:1] + blank[1:], [OWN[0], OWN[0]] + empty[2:], [whole[0], whole[0]] + blank[2:]),
        ("gather", "all parts, to the root; scatter is the way back", parts, one, [[OWN[i][i] for i in RANKS]] + empty[1:], [[of(i) for i in RANKS]] + blank[1:]),
    ]


def collectives(_):
    """Each operation: what four ranks hold before it and after it."""
    body = [text(12, 22, "What ranks say to each other: before and after, on four ranks", "b"),
            text(12, 42, "A color for each rank whose number it is; yellow: a sum over all ranks. A row is a rank's memory.", "s")]
    for at, (name, does, before, fills, after, painted) in enumerate(operations()):
        left, top = 64 + 486 * (at % 2), 92 + 142 * (at // 2)
        body += [text(left, top - 12, f'<tspan class="b">{name}</tspan>: {does}'), text(left + 196, top + 50, "→", "m")]
        body += [text(left - 8, top + 24 * rank + 14, f"rank {rank}", "s e") for rank in RANKS]
        body += cells(left, top, before, fills) + cells(left + 212, top, after, painted)
    return svg(1000, 92 + 142 * 4 - 30, "Collectives on four ranks", "For each operation the numbers that each of four ranks holds before it and after it.", body)


def ring_states():
    """The all-reduce of a ring: (what step it was, numbers by rank, whose numbers are in each, cells that have just arrived)."""
    count, now = len(RANKS), [list(row) for row in OWN]
    held = [[{rank} for _ in RANKS] for rank in RANKS]
    yield "start", now, held, []
    for step in range(2 * (count - 1)):
        adds = step < count - 1
        sent = [(rank - 1 - step) % count if adds else (rank - step + count - 1) % count for rank in RANKS]
        before, who = [list(row) for row in now], [list(row) for row in held]
        arrived = []
        for rank in RANKS:
            peer = (rank - 1) % count
            i = sent[peer]
            now[rank][i] = before[peer][i] + (before[rank][i] if adds else 0)
            held[rank][i] = who[peer][i] | (who[rank][i] if adds else set())
            arrived.append((rank, i))
        yield f"step {step + 1}: {'add' if adds else 'copy'}", now, held, arrived


def ring(_):
    """The all-reduce of a ring, step by step: each rank sends one part to the next rank."""
    body = [text(12, 22, "all_reduce by a ring: each rank sends one part to the next rank, 2 (n-1) = 6 times", "b"),
            text(12, 42, "Framed: what has just arrived from the rank above (rank 0: from rank 3). Grey: a sum over some ranks, yellow: over all. "
                         "After step 3 each", "s"),
            text(12, 60, "rank has its part of the sum: that was a reduce_scatter. Steps 4 to 6 pass the parts on: an all_gather.", "s")]
    frames = [(label, [list(row) for row in now], [[OF_ALL if len(who) == 4 else of(rank) if who == {rank} else "var(--line)" for who in row]
                                                   for rank, row in enumerate(held)], arrived) for label, now, held, arrived in ring_states()]
    for at, (label, numbers, fills, arrived) in enumerate(frames):
        left, top = 64 + 240 * (at % 4), 104 + 150 * (at // 4)
        body.append(text(left, top - 12, label, "b"))
        body += [text(left - 8, top + 24 * rank + 14, f"rank {rank}", "s e") for rank in RANKS] if at % 4 == 0 else []
        body += cells(left, top, numbers, fills, framed=arrived)
    return svg(1030, 104 + 150 * 2 - 34, "all_reduce by a ring", "Seven states of four ranks with four numbers each: three steps add, three steps copy.", body)


def ddp(tool):
    """Data parallelism: what each rank has in a step, and when its buckets are on the link."""
    units = ("root", "h.0", "h.1")
    body = [text(12, 22, "DDP: the same weights, other data, one mean gradient", "b"),
            text(12, 42, "A color for each rank: gradients are as large as the weights, and each rank has its own, until all_reduce makes them one (yellow).", "s")]
    names = [list(units) for _ in RANKS]
    stages = (("same weights", [["var(--pale)"] * 3 for _ in RANKS]), ("own gradients", [[of(rank)] * 3 for rank in RANKS]),
              ("mean gradients", [[OF_ALL] * 3 for _ in RANKS]), ("same new weights", [["var(--pale)"] * 3 for _ in RANKS]))
    body += [text(64, 78, "own data", "s"), *cells(64, 92, [[f"batch {rank}"] for rank in RANKS], [[of(rank)] for rank in RANKS], 74)]
    body += [text(56, 92 + 24 * rank + 14, f"rank {rank}", "s e") for rank in RANKS]
    for at, (label, fills) in enumerate(stages):
        left = 206 + 206 * at
        body += [text(left, 78, label, "s"), *cells(left, 92, names, fills, 44)]
        body += [text(left - 39, 142, "→", "m"), text(left - 39, 160, ("forward", "backward", "all_reduce", "update")[at], "s m")]
    events = trace(tool, "--strategies", "ddp", model="gpt-nano")
    end = max(event["ts"] + event["dur"] for event in events)
    left, top, scale = 110, 250, 860 / end
    body += [text(12, top - 26, "One step of gpt-nano: each unit is a bucket, and its all_reduce starts when its backward is done", "b"),
             text(left - 8, top + 16, "computation", "s e"), text(left - 8, top + 48, "link", "s e")]
    buckets = iter(("h.1", "h.0", "root"))
    later = []
    for event in events:
        x, width, kind = left + event["ts"] * scale, event["dur"] * scale, event["cat"]
        name = event["args"].get("unit", "")
        if kind == "transfer" and event["args"]["bytes"] > 1000:
            bucket = next(buckets)
            body += [bar(x, top + 34, width - 6, 22, "var(--all)", f"all_reduce of {bucket}"), text(x + width / 2, top + 49, bucket, "n m")]
        elif kind in ("forward", "backward", "optimizer_step"):
            body.append(bar(x, top, width, 22, "var(--c0)" if kind == "forward" else "var(--c2)", f"{kind} {name}"))
        elif kind == "reduce_wait":
            later.append(bar(x, top, width, 22, "url(#hot)", f"wait for {name}'s reduction: {event['dur'] / 1e3:.3f} ms"))
    body += later
    for i, (color, label) in enumerate((("var(--c0)", "forward"), ("var(--c2)", "backward, update"), ("var(--all)", "all_reduce of a bucket"), ("url(#hot)", "wait"))):
        body += [bar(left + 180 * i, top + 76, 14, 14, color, label), text(left + 180 * i + 20, top + 88, label, "s")]
    return svg(1000, top + 104, "Data parallelism", "Ranks compute gradients of their own data and average them in three buckets while backward goes on.", body)


def latency(tool):
    """An all-reduce of 482,304 bytes on more and more ranks, by algorithm."""
    counts = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    lines = {}
    for algorithm in ("ring", "tree", "direct"):
        link = {"latency_us": 10, "bytes_per_second": 10e9}
        compute = {"kind": "device", "memory_bytes": 16e9, "memory_bytes_per_second": 1e12, "peak_flops": {"f32": 1e13}}
        with tempfile.TemporaryDirectory() as folder:
            cluster, file = pathlib.Path(folder) / "net.json", pathlib.Path(folder) / "plan.json"
            cluster.write_text(json.dumps({"name": "net", "ranks_per_host": 1, "links": {"intra": link, "inter": link},
                                           "algorithms": {"all_reduce": algorithm}, "compute": compute}))
            subprocess.run([tool, "plan", "--model", "gpt-nano", "--ranks", "2", "--global-batch", "2", "--strategies", "ddp", "--wrap", "none",
                            "--scale", ",".join(map(str, counts)), "--cluster", cluster, "--json", file], check=True, stdout=subprocess.DEVNULL)
            lines[algorithm] = [row["runs"][0]["exposed_communication_ms"] for row in json.loads(file.read_text())["scale"]["weak"]]
    return chart("One all_reduce of 482,304 bytes: 10 us and 10 GB/s between any two ranks", "The time of a ring grows with the number of ranks, "
                 "that of a tree with its logarithm, direct stays.",
                 "A ring pays the latency 2 (n-1) times, a tree 2 log2 n times, direct twice; the work for each of its many messages is not counted.",
                 counts, [(2, "2"), (8, "8"), (32, "32"), (128, "128"), (1024, "1,024")], lines, "ranks", (0.1, 0.2, 0.5, 1, 2, 5, 10, 20))


def stacked(left, top, width, parts, most):
    """A bar of parts (value, color, label), side by side; most is the value of the whole width."""
    body, x = [], left
    for value, color, label in parts:
        if value:
            body.append(bar(x, top, width * value / most, 24, color, label))
            x += width * value / most
    return body, x


def memory(tool):
    """What a rank keeps: model state by strategy, and a step's peak with its activations."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "zero.json"
        subprocess.run([tool, "plan", "--parameters", "7.5e9", "--ranks", "64", "--strategies", "ddp,zero1,zero2,fsdp", "--json", file],
                       check=True, stdout=subprocess.DEVNULL)
        table = json.loads(file.read_text())["rows"]
    names = [row["strategy"] for row in table]
    kinds = (("parameter", "var(--c0)", "parameters"), ("gradient", "var(--c1)", "gradients"), ("optimizer", "var(--c2)", "optimizer"))
    body = [text(12, 22, "What a rank keeps", "b"),
            text(12, 42, "7.5 billion parameters in bf16 on 64 ranks: model state, GB. It is sharded from the right: optimizer, gradients, parameters.", "s")]
    most = max(row["model_state_bytes"] for row in table)
    for at, row in enumerate(table):
        y = 56 + 32 * at
        body.append(text(72, y + 16, row["strategy"], "e"))
        bars, x = stacked(84, y, 800, [(row["parts"][kind], color, f"{label}: {row['parts'][kind] / 1e9:.2f} GB") for kind, color, label in kinds], most)
        body += [*bars, text(x + 8, y + 16, f"{row['model_state_bytes'] / 1e9:.1f}", "s")]
    body.append(text(12, 212, "gpt-tall in f32 on 4 ranks, at the peak of a step, MB. Activations belong to a rank's own data: no strategy shards them.", "s"))
    plain = plan(tool, "--strategies", ",".join(names))
    checkpointed = plan(tool, "--strategies", "fsdp", "--checkpoint-activations")
    runs = [*zip(names, plain), ("fsdp, ck.", checkpointed[0])]
    most = max(run["peak_bytes"]["total"] for _, run in runs)
    more = (("unsharded_parameter", "var(--pale)", "unsharded"), ("unsharded_gradient", "var(--pale)", "unsharded gradients"), ("activation", "var(--line)", "activations"))
    for at, (name, run) in enumerate(runs):
        y, peak = 226 + 32 * at, run["bytes_at_peak"]
        body.append(text(72, y + 16, name, "e"))
        bars, x = stacked(84, y, 800, [(peak[kind], color, f"{label}: {peak[kind] / 1e6:.2f} MB") for kind, color, label in (*kinds, *more)], most)
        body += [*bars, text(x + 8, y + 16, f"{run['peak_bytes']['total'] / 1e6:.1f}", "s")]
    for i, (color, label) in enumerate([(color, label) for _, color, label in kinds] + [("var(--pale)", "unsharded for a while"), ("var(--line)", "activations (ck.: recomputed)")]):
        body += [bar(84 + 172 * i, 396, 14, 14, color, label), text(84 + 172 * i + 20, 408, label, "s")]
    return svg(1000, 424, "What a rank keeps", "Model state of ddp, zero1, zero2 and fsdp: 120, 31.4, 16.6 and 1.9 GB; and the peak of a step with its activations.", body)


def explained(tool):
    """What explain says about a step of gpt-nano under fsdp."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "step.json"
        subprocess.run([tool, "explain", "--model", "gpt-nano", "--ranks", "4", "--strategy", "fsdp", "--json", file], check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text())


def shards(tool):
    """The two divisions of the model: wrapped into units, sharded over ranks; and the flat parameter of one unit."""
    units = explained(tool)["units"]
    whole = sum(unit["padded"] for unit in units)
    body = [text(12, 22, "gpt-nano on 4 ranks, divided twice", "b"),
            text(12, 42, "Vertical lines: wrapped into units (when parameters are used). Horizontal lines: sharded over ranks (where they are kept). A row is what a rank keeps.", "s")]
    x = 84
    for unit in units:
        width = 860 * unit["padded"] / whole
        body.append(text(x + width / 2, 70, f"{unit['name']}: {unit['padded']:,}", "m"))
        for rank in RANKS:
            kept = unit["shards"][rank]["end"] - unit["shards"][rank]["begin"]
            body.append(f'<rect x="{x:.1f}" y="{80 + 30 * rank}" width="{width:.1f}" height="30" style="fill:{of(rank)};stroke:var(--paper)"/>')
            body.append(text(x + width / 2, 100 + 30 * rank, f"{kept:,}", "n m"))
        body.append(f'<path d="M{x:.1f} 76v128" style="stroke:var(--ink);stroke-width:2"/>')
        x += width
    body.append(f'<path d="M{x:.1f} 76v128" style="stroke:var(--ink);stroke-width:2"/>')
    body += [text(76, 100 + 30 * rank, f"rank {rank}", "s e") for rank in RANKS]
    block, width = units[1], 64
    tensors = (("ln_1", 2 * width), ("attn.c_attn.weight", 3 * width * width), ("bias", 3 * width), ("attn.c_proj", width * width + width), ("ln_2", 2 * width),
               ("mlp.c_fc.weight", 4 * width * width), ("bias", 4 * width), ("mlp.c_proj.weight", 4 * width * width), ("bias", width))
    if sum(size for _, size in tensors) != block["padded"]:
        raise SystemExit(f"{block['name']} has other tensors")
    body += [text(12, 238, f"The flat parameter of {block['name']}: its tensors one after another, divided into equal shards wherever a bound falls", "b")]
    x, scale = 84, 860 / block["padded"]
    for at, (name, size) in enumerate(tensors):
        body.append(bar(x, 252, size * scale, 26, ("var(--pale)", "var(--line)")[at % 2], f"{name}: {size:,}"))
        if size > 4000:
            body.append(text(x + 5, 269, name, "n"))
        x += size * scale
    for rank, shard in enumerate(block["shards"]):
        left, right = (84 + shard[end] * scale for end in ("begin", "end"))
        body += [bar(left, 286, right - left, 26, of(rank), f"shard of rank {rank}"), text((left + right) / 2, 303, f"rank {rank}: {shard['begin']:,}..{shard['end'] - 1:,}", "n m")]
        if rank:
            body.append(f'<path d="M{left:.1f} 246v72" style="stroke:var(--hot);stroke-width:1.5;stroke-dasharray:4 3"/>')
    body.append(text(76, 269, "tensors", "s e"))
    body.append(text(76, 303, "shards", "s e"))
    body.append(text(84, 336, "Where the ranks do not divide it, padding is added at the end: on 3 ranks 8 elements, for 49,992 = 3 x 16,664.", "s"))
    return svg(1000, 350, "Units and shards", "Every rank keeps a shard of every unit; the bound of a shard may lie inside a tensor.", body)


def states(rows, last):
    """After the first rows: what the parameters and the gradients of each unit are, and which unit computes."""
    found, gradients, computes = {}, {}, None
    for i, row in enumerate(rows[:last + 1]):
        unit = row["unit"]
        if row["event"] == "unshard_issue":
            found[unit] = "coming"
        elif row["event"] in ("forward", "backward"):
            found[unit] = "here"
            computes = unit
            if row["event"] == "backward":
                gradients[unit] = "own data"
        elif row["event"] == "reshard":
            found[unit] = "shard"
            if "reduce-scatter" in row["text"]:
                gradients[unit], computes = "on their way", None
        elif row["event"] == "reduce_wait" and i < last:
            gradients[unit] = "mean"
        elif row["event"] == "optimizer_step":
            computes = None
    return found, gradients, computes


def frames(tool):
    """Eight moments of a step: ranks below each other, units beside each other, a cell for each shard, a strip for gradients."""
    document = explained(tool)
    rows, units, ranks = document["rows"], [unit["name"] for unit in document["units"]], document["ranks"]
    starts = [i for i, row in enumerate(rows) if row["event"] in ("forward", "backward") and not row["text"].endswith(", on")]
    last_reduction = max(i for i, row in enumerate(rows) if "reduce-scatter" in row["text"])
    moments = [("between two steps", -1), *((rows[i]["text"], i) for i in (*starts[:3], *starts[4:6])), ("reduce-scatter root", last_reduction),
               ("the update", len(rows) - 1)]
    body = [text(12, 22, "Eight moments of a step of gpt-nano on 4 ranks: who has which shards, and whose gradients", "b"),
            text(12, 42, "Cells are shards of parameters. Solid: the one that a rank keeps. Pale: others', in an unsharded unit. Hatched: on their way. Framed: the unit that computes.", "s"),
            text(12, 60, "A strip is as wide as the gradients: of one rank's own data, in its color, as wide as the unit; after the reduce-scatter of their mean (yellow), a shard.", "s")]
    cell, gap, row_height = 14, 12, 30
    for frame, (label, last) in enumerate(moments):
        left, top = 58 + 245 * (frame % 4), 104 + 190 * (frame // 4)
        found, gradients, computes = states(rows, last)
        at = f", {rows[last]['at_ms']:.3f} ms" if last >= 0 else ""
        body.append(text(left, top - 16, f"{frame + 1}. {label}{at}", "b"))
        for u, unit in enumerate(units):
            x = left + u * (ranks * cell + gap)
            body.append(text(x + ranks * cell / 2, top + ranks * row_height + 12, unit, "s m"))
            for rank in range(ranks):
                y = top + rank * row_height
                if u == 0:
                    body.append(text(left - 8, y + 13, f"rank {rank}", "s e"))
                for shard in range(ranks):
                    state = "own" if shard == rank else found.get(unit, "shard")
                    fill = {"own": "var(--c0)", "here": "var(--pale)", "coming": "url(#hot)", "shard": "none"}[state]
                    body.append(f'<rect x="{x + shard * cell}" y="{y}" width="{cell - 2}" height="15" class="line" style="fill:{fill}"><title>rank {rank}, {unit}, shard {shard}: {state}</title></rect>')
                whose = gradients.get(unit)
                if whose is None:
                    continue
                begin, width = (rank * cell, cell - 2) if whose == "mean" else (0, ranks * cell - 2)
                fill = {"own data": f"var(--r{rank})", "on their way": "url(#hot)", "mean": OF_ALL}[whose]
                body.append(f'<rect x="{x + begin}" y="{y + 17}" width="{width}" height="8" style="fill:{fill};stroke:var(--soft);stroke-width:.7"><title>rank {rank}, gradients of {unit}: {whose}</title></rect>')
            if unit == computes:
                body.append(f'<rect x="{x - 4}" y="{top - 5}" width="{ranks * cell + 6}" height="{ranks * row_height + 3}" style="fill:none;stroke:var(--c1);stroke-width:2.5"/>')
    return svg(1000, 104 + 190 * 2 - 30, "Eight moments of a step",
               "Every rank keeps a shard of every unit. A unit is unsharded on all ranks before it computes, and resharded after it. Each rank's gradients of its own data "
               "become shards of their mean.", body)


def stage(rank, microbatches, one_by_one, stages=4):
    """What a stage of a pipeline does, in order: (forward, microbatch), as in examples/parallel/pipeline.cpp."""
    ahead = min(microbatches, stages - rank) if one_by_one else microbatches
    actions = [(True, m) for m in range(ahead)]
    for m in range(microbatches):
        actions.append((False, m))
        if m + ahead < microbatches:
            actions.append((True, m + ahead))
    return actions


def pipeline(microbatches, one_by_one):
    """The rows of four stages; a message takes no time. A block's forward of the whole batch takes 40 ms, its backward 80."""
    done, rows, clocks, todo = {}, [[] for _ in range(4)], [0.0] * 4, [stage(r, microbatches, one_by_one) for r in range(4)]
    while any(todo):
        for rank in range(4):
            while todo[rank]:
                forward, m = todo[rank][0]
                needs = (rank - 1, True, m) if forward else (rank + 1, False, m) if rank < 3 else (rank, True, m)
                if needs[0] >= 0 and needs not in done:
                    break
                begin = max(clocks[rank], done.get(needs, 0.0))
                if begin > clocks[rank]:
                    rows[rank].append(("wait", clocks[rank], begin))
                clocks[rank] = begin + (40 if forward else 80) / microbatches
                rows[rank].append(("forward" if forward else "backward", begin, clocks[rank]))
                done[rank, forward, m] = clocks[rank]
                todo[rank].pop(0)
    return [row + [("wait", clocks[rank], max(clocks))] if clocks[rank] < max(clocks) else row for rank, row in enumerate(rows)]


def programs(_):
    """A step of each program of examples/parallel, as its schedule says; an operation takes 2 ms where computing waits for it."""
    wait = 2.0
    def steps(*parts):
        row, at = [], 0.0
        for kind, length in parts:
            row.append((kind, at, at + length))
            at += length
        return [row] * 4
    forward, backward, pause = ("forward", 10.0), ("backward", 20.0), ("wait", wait)
    half = lambda part: (part[0], part[1] / 2)
    shown = {
        "data": steps(*[forward] * 4, *[backward] * 4, ("wait", 2 * wait)),
        "fsdp": steps(*[pause, forward] * 4, *[pause, backward, pause] * 4),
        "tensor": steps(*[half(forward), pause, half(forward), pause] * 4, *[half(backward), pause, half(backward), pause] * 4),
        "model": pipeline(1, False), "gpipe": pipeline(4, False), "1f1b": pipeline(4, True),
        "context": steps(*[pause, forward] * 4, *[backward, pause] * 4, ("wait", 2 * wait))}
    left, scale = 110, 860 / max(row[-1][2] for rows in shown.values() for row in rows)
    body = [text(12, 22, "A step of one model on 4 ranks, seven ways", "b"),
            text(12, 42, "Drawn from the schedules: a block's forward of the whole batch takes 40 ms on one rank, an operation 2 ms. Red hatching: a rank waits.", "s")]
    top = 60
    for name, rows in shown.items():
        end = max(row[-1][2] for row in rows)
        waits = sum(stop - begin for row in rows for kind, begin, stop in row if kind == "wait") / len(rows)
        body += [text(12, top + 14, name, "b"), text(left, top + 14, f"{end:.0f} ms; a rank waits {100 * waits / end:.0f} % of it", "s")]
        for rank, row in enumerate(rows):
            y = top + 22 + 16 * rank
            body.append(text(left - 8, y + 11, f"rank {rank}", "s e"))
            for kind, begin, stop in row:
                fill = {"forward": "var(--c0)", "backward": "var(--c2)", "wait": "url(#hot)"}[kind]
                body.append(bar(left + begin * scale, y, (stop - begin) * scale - 0.8, 13, fill, f"rank {rank}: {kind}, {stop - begin:.0f} ms"))
        top += 96
    for i, (color, label) in enumerate((("var(--c0)", "forward of a block"), ("var(--c2)", "backward"), ("url(#hot)", "wait"))):
        body += [bar(left + 170 * i, top, 14, 14, color, label), text(left + 170 * i + 20, top + 12, label, "s")]
    return svg(1000, top + 28, "Seven timelines of one model", "Data, fully sharded, tensor and context parallel keep all ranks busy; of a pipeline with one microbatch three of four ranks wait.", body)


def main():
    tool, check = sys.argv[1], "--check" in sys.argv
    wrong = []
    for draw in (collectives, ring, ddp, latency, shards, memory, frames, timeline, wraps, crossover, programs):
        file, picture = HERE / f"{draw.__name__}.svg", draw(tool)
        if not check:
            file.write_text(picture)
        elif not file.exists() or file.read_text() != picture:
            wrong.append(file.name)
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: not what the tool simulates; draw anew with docs/learn/pictures.py TOOL")


main()
