"""Writes docs/algorithms.md and its pictures from the schedules.

    algorithms.py PRINT_SCHEDULES             writes the page and docs/algorithms/*.svg
    algorithms.py PRINT_SCHEDULES --check     fails if one of them differs

The statements about each algorithm (bytes, messages in a row, roundings) are checked against its schedules, too.
"""

import collections
import json
import math
import pathlib
import subprocess
import sys

from markdown import wrapped

PAGE = pathlib.Path(__file__).with_suffix(".md")
FOLDER = pathlib.Path(__file__).with_suffix("")
ROW, COLUMN, LEFT, TOP = 26, 88, 62, 14


def log(n):
    return int(math.log2(n))


def ones(n):
    return sum(bin(i).count("1") for i in range(n))


# algorithm: numbers of ranks in the pictures; messages in a row; most bytes that a rank sends, as parts of N; description
ABOUT = {
    "all_reduce=direct": ((4,), ("2", lambda n: 2), ("2 (n-1)/n", lambda n: 2 * (n - 1) / n),
                          "Rank j owns slice j: it receives that slice from all others, adds all at once, and sends the sum to all."),
    "all_reduce=symmetric": ((4,), ("1", lambda n: 1), ("(n-1)", lambda n: n - 1),
                             "Each rank sends all its data to all others and adds: the lowest latency for a few bytes on a few ranks."),
    "all_reduce=recursive_doubling": ((8, 6), ("log2 n", log), ("log2 n", log),
                                      "Partners at distance 1, 2, 4, ... exchange their sums. If n is no power of two, some neighbors "
                                      "form pairs: one sends its data to the other first, and receives the result at the end. The pairs "
                                      "are nodes of the sum tree, so its order is kept for any n."),
    "all_reduce=rabenseifner": ((8,), ("2 log2 n", lambda n: 2 * log(n)), ("2 (n-1)/n", lambda n: 2 * (n - 1) / n),
                                "Recursive halving, then doubling: at distance 1, 2, 4, ... each partner adds one half of the slices that "
                                "both have; then the sums return by the same steps."),
    "all_reduce=tree": ((8,), ("2 log2 n", lambda n: 2 * log(n)), ("log2 n", log),
                        "Sums go up the sum tree, the result goes down. Segments are pipelined."),
    "all_reduce=ring": ((4,), ("2 (n-1)", lambda n: 2 * (n - 1)), ("2 (n-1)/n", lambda n: 2 * (n - 1) / n),
                        "Slice j starts at rank j + 1 and goes around the ring twice: first it is summed, then the sum is distributed. Each "
                        "rank sends to one neighbor and receives from the other."),
    "reduce_scatter=direct": ((4,), ("1", lambda n: 1), ("(n-1)/n", lambda n: (n - 1) / n),
                              "The first half of all_reduce=direct."),
    "reduce_scatter=recursive_halving": ((8,), ("log2 n", log), ("(n-1)/n", lambda n: (n - 1) / n),
                                         "The first half of rabenseifner. The blocks are sorted first, so that the halves at distance 1, 2, 4, ... "
                                         "are contiguous and the order of the tree is kept."),
    "reduce_scatter=ring": ((4,), ("n-1", lambda n: n - 1), ("(n-1)/n", lambda n: (n - 1) / n), "The first half of all_reduce=ring."),
    "all_gather=direct": ((4,), ("1", lambda n: 1), ("(n-1)/n", lambda n: (n - 1) / n), "Each rank sends its part to all others."),
    "all_gather=recursive_doubling": ((8,), ("log2 n", log), ("(n-1)/n", lambda n: (n - 1) / n),
                                      "Partners at distance 1, 2, 4, ... exchange all parts that they have so far."),
    "all_gather=bruck": ((6,), ("log2 n, rounded up", lambda n: math.ceil(math.log2(n))), ("(n-1)/n", lambda n: (n - 1) / n),
                         "Each rank sends all parts that it has to the rank 1, 2, 4, ... below: the fewest rounds possible for any n. Parts "
                         "arrive where they belong, so nothing is moved afterwards; a message that passes the end of the ring is split."),
    "all_gather=ring": ((4,), ("n-1", lambda n: n - 1), ("(n-1)/n", lambda n: (n - 1) / n), "The second half of all_reduce=ring."),
    "broadcast=direct": ((4,), ("1", lambda n: 1), ("(n-1)", lambda n: n - 1), "The root sends to all others."),
    "broadcast=binomial": ((8,), ("log2 n", log), ("log2 n", log), "Down the sum tree: each rank that has the data forwards it."),
    "broadcast=pipelined": ((4,), ("n-1, and segments", None), ("1", lambda n: 1),
                            "A chain that forwards each segment on arrival: no rank sends more than N."),
    "reduce=direct": ((4,), ("1", lambda n: 1), ("1", lambda n: 1), "All others send to the root, which adds all at once."),
    "reduce=binomial": ((8,), ("log2 n", log), ("1", lambda n: 1),
                        "Up the sum tree. The root owns each node that contains it, so no root needs an additional hop."),
    "gather=direct": ((4,), ("1", lambda n: 1), ("1/n", lambda n: 1 / n), "All others send to the root."),
    "gather=binomial": ((8,), ("log2 n", log), ("1/2", lambda n: 1 / 2), "Up the tree: a rank forwards the parts of its subtree as one message."),
    "scatter=direct": ((4,), ("1", lambda n: 1), ("(n-1)/n", lambda n: (n - 1) / n), "The root sends to all others."),
    "scatter=binomial": ((8,), ("log2 n", log), ("(n-1)/n", lambda n: (n - 1) / n), "Down the tree: half of the parts first."),
    "all_to_all=direct": ((4,), ("1", lambda n: 1), ("(n-1)/n", lambda n: (n - 1) / n), "All exchanges at once."),
    "all_to_all=pairwise": ((4,), ("n-1", lambda n: n - 1), ("(n-1)/n", lambda n: (n - 1) / n),
                            "One exchange after the other: to the rank d above, from the rank d below, d = 1, 2, ..."),
    "all_to_all=bruck": ((8,), ("log2 n, rounded up", lambda n: math.ceil(math.log2(n))),
                         ("1/2 log2 n", lambda n: ones(n) / n),
                         "A block for the rank i above moves by the binary digits of i, packed with others of that digit: few messages, "
                         "but each byte moves several times."),
    "barrier=dissemination": ((8, 6), ("log2 n, rounded up", lambda n: math.ceil(math.log2(n))), ("0", lambda n: 0),
                              "Empty messages to the rank 1, 2, 4, ... above: after round k, a rank knows that 2^k ranks have arrived."),
}

NO_PARTS = {"all_reduce", "broadcast", "reduce", "barrier"}  # operations whose buffers have no slice per rank

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1c2024; } .line { stroke: #aeb6be; } .of { text-anchor: middle; font-size: 11px; }
  .data { stroke: #1f6fb2; fill: none; stroke-width: 1.4; } .part { stroke: #c25e12; fill: none; stroke-width: 1.4; }
  #d path { fill: #1f6fb2; } #p path { fill: #c25e12; } .sum { fill: #c25e12; } .sign { stroke: #fff; stroke-width: 1.6; }
  @media (prefers-color-scheme: dark) { text { fill: #e6e9ec; } .line { stroke: #5c6670; } .data { stroke: #62aee8; }
    .part { stroke: #ef9a55; } #d path { fill: #62aee8; } #p path { fill: #ef9a55; } .sum { fill: #ef9a55; } .sign { stroke: #15181b; } }
"""


class Run:
    """One algorithm on n ranks: its steps, and when each completes if a message takes one unit of time."""

    def __init__(self, head):
        self.name, self.ranks, self.bytes = head["algorithm"], head["ranks"], head["bytes"]
        self.head, self.steps = head, {}

    def finish(self):
        partner, order = {}, []
        for key, step in self.steps.items():
            if step["kind"] in ("send", "receive"):
                ends = (key[0], step["peer"]) if step["kind"] == "send" else (step["peer"], key[0])
                partner.setdefault((*ends, step["number"]), {})[step["kind"]] = key
        self.messages = [(pair["send"], pair["receive"]) for pair in partner.values()]
        arrives = dict(self.messages)
        self.after, waits = collections.defaultdict(list), collections.Counter()
        for key, step in self.steps.items():
            self.after[key] += [(key[0], follower) for follower in step["followers"]] + ([arrives[key]] if key in arrives else [])
            for follower in self.after[key]:
                waits[follower] += 1
        ready = collections.deque(key for key in self.steps if not waits[key])
        while ready:
            order.append(ready.popleft())
            for follower in self.after[order[-1]]:
                waits[follower] -= 1
                if not waits[follower]:
                    ready.append(follower)
        assert len(order) == len(self.steps), f"{self.name}: steps wait in a circle"
        # Segments of a chain move one after the other: one message at a time between two ranks.
        free, serial = collections.Counter(), self.name.endswith("=pipelined")
        self.done, self.roundings = collections.Counter(), collections.Counter()
        self.sent_at = {}
        for key in order:
            step = self.steps[key]
            if step["kind"] == "send":
                link = (key[0], step["peer"])
                self.sent_at[key] = max(self.done[key], free[link] if serial else 0)
                free[link] = self.sent_at[key] + 1
            if step["kind"] == "reduce":
                self.roundings[key] += 1
            for follower in self.after[key]:
                arrived = self.sent_at[key] + 1 if arrives.get(key) == follower else self.done[key]
                self.done[follower] = max(self.done[follower], arrived)
                self.roundings[follower] = max(self.roundings[follower], self.roundings[key])
        self.hops = max([at + 1 for at in self.sent_at.values()], default=0)
        self.sent = collections.Counter()
        for send, _ in self.messages:
            self.sent[send[0]] += self.steps[send]["bytes"]
        self.most_messages = max(collections.Counter(send[0] for send, _ in self.messages).values(), default=0)

    def added(self, receive):
        return any(self.steps[follower]["kind"] == "reduce" for follower in self.after[receive])


def runs_of(program):
    done = subprocess.run([program], text=True, stdout=subprocess.PIPE, timeout=60, check=True)
    runs = {}
    for line in map(json.loads, done.stdout.splitlines()):
        if "algorithm" in line:
            run = runs[line["algorithm"], line["ranks"]] = Run(line)
        else:
            run.steps[line["rank"], line["step"]] = line
    for run in runs.values():
        run.finish()
    return runs


def share(part):
    """A multiple of N as text, such as 3N/4."""
    for bottom in (1, 2, 3, 4, 6, 8, 12, 16, 24):
        top = part * bottom
        if abs(top - round(top)) < 1e-9:
            return ("N" if round(top) == 1 else f"{round(top)}N") + (f"/{bottom}" if bottom > 1 else "")
    return f"{part:.2f}N"


def picture(run):
    width, height = LEFT + run.hops * COLUMN + 24, TOP + run.ranks * ROW + 22
    x, y = (lambda at: LEFT + at * COLUMN), (lambda rank: TOP + rank * ROW + 6)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
             f'aria-label="{run.name} on {run.ranks} ranks: messages from left to right">', f"<style>{STYLE}</style>", "<defs>"]
    for mark in "dp":
        parts.append(f'<marker id="{mark}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
                     '<path d="M0,0 L8,4 L0,8 z"/></marker>')
    parts.append("</defs>")
    for rank in range(run.ranks):
        parts.append(f'<text x="4" y="{y(rank) + 4}">rank {rank}</text>'
                     f'<path class="line" d="M{LEFT - 8},{y(rank)} H{width - 8}"/>')
    most = collections.defaultdict(collections.Counter)
    for send, receive in sorted(run.messages):
        at, kind, mark = run.sent_at[send], *(("part", "p") if run.added(receive) else ("data", "d"))
        most[at][send[0]] += run.steps[send]["bytes"]
        parts.append(f'<path class="{kind}" marker-end="url(#{mark})" d="M{x(at) + 6},{y(send[0])} L{x(at + 1) - 8},{y(receive[0])}"/>')
    for rank, at in sorted({(key[0], run.done[key]) for key, step in run.steps.items() if step["kind"] == "reduce"}):
        parts.append(f'<circle class="sum" cx="{x(at)}" cy="{y(rank)}" r="6"/>'
                     f'<path class="sign" d="M{x(at) - 3.5},{y(rank)} h7 M{x(at)},{y(rank) - 3.5} v7"/>')
    for at, by_rank in sorted(most.items()):
        if run.bytes:
            label = ("each " if len(by_rank) == run.ranks and len(set(by_rank.values())) == 1 else "≤ ") + share(max(by_rank.values()) / run.bytes)
            parts.append(f'<text class="of" x="{x(at) + COLUMN / 2:.0f}" y="{height - 6}">{label}</text>')
    return "\n".join(parts + ["</svg>\n"])


def check(runs):
    """Checks the statements above against the schedules."""
    for name, (_, (_, hops), (_, part), _) in ABOUT.items():
        for ranks in (4, 8):
            run = runs[name, ranks]
            if hops:
                assert run.hops == hops(ranks), f"{name} on {ranks} ranks: {run.hops} messages in a row"
            sent = max(run.sent.values(), default=0)
            assert sent == round(part(ranks) * run.bytes), f"{name} on {ranks} ranks: {sent} of {run.bytes} bytes"
    assert {name for name, _ in runs} == set(ABOUT), "docs/algorithms.py: an algorithm is missing, or gone"


def page(runs):
    lines = ["# Algorithms", "",
             "Written by `docs/algorithms.py` from the library's schedules (`tessera/comm/schedule.h`): a schedule is a rank's sends, receives,",
             "copies and reductions with their dependencies. One executor runs them all over any transport, and `TESSERA_ALGO` selects them by",
             "operation and size. `shm` has no transport: it has only `direct` and `all_reduce=symmetric`, which read the other ranks' memory.", "",
             "n ranks; N bytes are the larger of a rank's two buffers. *In a row*: the longest chain of dependent messages, the cost of a small call.",
             "*Bytes*: the most that one rank sends, the cost of a large call; at least (n-1)/n N for all_gather and reduce_scatter, and twice that",
             "for all_reduce. *Ordered*: whether the sum is bitwise that of the tree (see [collectives](collectives.md)), as deterministic mode",
             "requires. *Roundings*: how often a half-precision sum is rounded on 8 ranks, by at most half a unit of the last place each time;",
             "deterministic mode requires 1. *Any parts*: supports the `_v` forms.", "",
             "`native` is none of these: the backend's library executes the whole operation ([backends](backends.md#mpi)).", "",
             "| algorithm | in a row | bytes | ordered | roundings | any parts |", "|---|---|---|---|---|---|"]
    for name, (_, (hops, _), (part, _), _) in ABOUT.items():
        run = runs[name, 8]
        adds = any(step["kind"] == "reduce" for step in run.steps.values())
        kept = "" if not adds else ("yes" if run.head["ordered_16"] else "not in 16 bits" if run.head["ordered"] else "no")
        any_parts = "" if name.split("=")[0] in NO_PARTS else "yes" if run.head["unequal"] else "no"
        lines.append(f"| [`{name}`](#{name.replace('=', '')}) | {hops} | {part if part == '0' else (part + ' N').removeprefix('1 ')} | {kept} | "
                     f"{max(run.roundings.values()) if adds else ''} | {any_parts} |")
    lines += ["", "## Diagrams", "",
              "Time goes to the right, an arrow is a message; orange: a partial sum, which is added where it arrives (+); blue: data that does not change.",
              "Below: the bytes that a rank sends at that time. Large data moves in segments of 256 KiB (more in very large calls), each by the same steps:",
              "one is added while the next one arrives. In place, a buffer is written only when its old content is no longer needed: by a dependency, or",
              "because the arriving data can exist only after the old content has arrived elsewhere. A test proves this for every algorithm."]
    for name, (drawn, _, _, text) in ABOUT.items():
        lines += ["", f"### {name}", "", text, ""]
        lines += [f"![{name} on {ranks} ranks](algorithms/{file_of(name, ranks)})" for ranks in drawn]
    return wrapped(lines)


def file_of(name, ranks):
    return f"{name.replace('=', '-')}-{ranks}.svg"


def main():
    runs = runs_of(sys.argv[1])
    check(runs)
    wanted = {PAGE: page(runs)}
    for name, (drawn, *_) in ABOUT.items():
        wanted.update({FOLDER / file_of(name, ranks): picture(runs[name, ranks]) for ranks in drawn})
    old = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    extra = sorted(set(FOLDER.glob("*")) - set(wanted))
    if "--check" in sys.argv:
        raise SystemExit(f"old: {', '.join(map(str, old + extra))}: run docs/algorithms.py PRINT_SCHEDULES" if old or extra else 0)
    FOLDER.mkdir(exist_ok=True)
    for path in extra:
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text)


main()
