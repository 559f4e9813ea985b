"""A step of the engine, as `tessera plan --json` has it, with the kernels of another framework; timed for any machine."""

import json
import math
import pathlib
import subprocess
import tempfile
from bisect import insort

from published_kernels import KERNEL_GAP, attention_time, product_time
from published_rows import Problem

LAUNCH_BLOCKS = 16  # multiprocessors that a running collective occupies
OPERATION_START = 20e-6  # seconds from the call of a collective to its first byte
SLOWEST_HOST = 0.012  # spread of the hosts' step times: all wait for the slowest
RECORDED = 3  # microbatches: the first, one between and the last
BACKWARD_LAUNCH = 0.4  # host time of a launch by the autograd engine, against one of a module
FORWARD_LOSS = 0.45  # share of the loss's bytes
ACCUMULATION = 6  # bytes for each gradient that is added to a kept one


class Work:
    """Work of a rank between two points of its program, in seconds, as parts whose speed is not known yet."""

    def __init__(self, products=0.0, memory=0.0, gaps=0.0, launches=0.0, host=0.0):
        self.products, self.memory, self.gaps = products, memory, gaps  # at full efficiency; memory-bound; between kernels
        self.launches, self.host = launches, host  # kernel launches of the host, and its further seconds

    def __iadd__(self, other):
        for part in ("products", "memory", "gaps", "launches", "host"):
            setattr(self, part, getattr(self, part) + getattr(other, part))
        return self

    def empty(self):
        return self.products + self.memory + self.gaps + self.launches + self.host == 0


class FrameworkProfile:
    """The kernels that the framework would run for the engine's calls, given in their order.

    A block's kernels that the engine doesn't call the same way are added where it calls its attention: once for each block
    and pass. Products and attention cost what their shapes say; all other calls cost nothing.
    """

    def __init__(self, workload):
        self.of, self.phase, self.begins = workload, "update", False
        self.embedding_done, self.recomputed_products, self.blocks_back = False, 0, 0

    def cost(self, name, kernel, elements):
        w = self.of
        if name in ("linear_forward", "linear_activation_forward"):
            return self.linear_forward(kernel["product"])
        if name == "linear_backward":
            return self.linear_backward(kernel["product"])
        if name in ("attention_forward", "attention_dropout_forward"):
            return (self.block_recomputed if self.phase == "backward" else self.block_forward)(kernel["product"])
        if name in ("attention_backward", "attention_dropout_backward"):
            return self.block_backward(kernel["product"])
        if name in ("embedding_forward", "embedding_backward"):
            return self.embedding(name.endswith("backward"))
        loss = w.tokens * w.vocabulary * w.loss_bytes
        if name == "cross_entropy_forward":
            return self.traffic(loss * FORWARD_LOSS + w.tokens * w.width * 4, 8)
        if name == "cross_entropy_backward":
            self.phase = "backward"
            return self.traffic(loss * (1 - FORWARD_LOSS) + w.tokens * w.width * 8, 10)
        if elements:
            return self.update(elements)
        return Work()

    def product(self, m, n, k, batch, launches):
        time, of_bytes = product_time(self.of.device, m, n, k, batch)
        return Work(products=0 if of_bytes else time, memory=time if of_bytes else 0, gaps=KERNEL_GAP, launches=launches)

    def traffic(self, moved, launches):
        return Work(memory=moved / self.of.device.memory_rate, gaps=KERNEL_GAP * launches, launches=launches)

    def current_block(self):
        return len(self.of.recomputed) - 1 - self.blocks_back % len(self.of.recomputed)

    def linear_forward(self, size):
        m, n, k, _ = size
        if self.phase != "backward":
            return self.product(m, n, k, 1, 1)
        if not self.of.recomputed[self.current_block()]:
            return Work()  # the plan recomputes all blocks, the row only some
        index = self.recomputed_products
        self.recomputed_products += 1
        last = index + 1 == (4 if self.of.gpt2 else 7)
        kept = self.of.recomputation == "selective" and index % 2 == 0
        return Work() if kept or (last and self.of.early_stop) else self.product(m, n, k, 1, 1)

    def linear_backward(self, size):
        m, n, k, count = size
        launches = 1 if n == self.of.vocabulary and k == self.of.width else BACKWARD_LAUNCH
        work = self.product(n, k, m, 1, launches)
        if count == 2:
            work += self.product(m, k, n, 1, launches)
        return work

    def attended(self, size, backward):
        """`size`: positions, positions, the head's width, heads of all sequences."""
        m, _, k, heads = size
        w = self.of
        if w.attention != "unfused":
            return Work(memory=attention_time(w.device, w.attention, heads, m, k, backward), launches=4 if backward else 2)
        work = self.traffic(heads * m * m * (w.style.scores_backward if backward else w.style.scores_forward), 6 if backward else 4)
        for _ in range(2 if backward else 1):
            work += self.product(m, m, k, heads, 1)
            work += self.product(m, k, m, heads, 1)
        return work

    def block_forward(self, size):
        w, style = self.of, self.of.style
        work = self.attended(size, False)
        work += self.traffic(w.tokens * (style.width_forward * w.width + style.hidden_forward * w.feed_forward), style.kernels_forward)
        if w.sharded:
            work += self.traffic(w.gather_copy * w.block_parameters, 2)
            work.host += w.unit_host_s
        return work

    def block_recomputed(self, size):
        w, style, full = self.of, self.of.style, self.of.recomputation == "full"
        if not w.recomputed[self.current_block()]:
            return Work()
        shorter = full and w.early_stop
        moved = w.tokens * ((style.width_forward - (6 if shorter else 0)) * w.width + style.hidden_forward * w.feed_forward)
        work = self.traffic(moved, style.kernels_forward - (1 if shorter else 0))
        if full:
            work += self.attended(size, False)
        return work

    def block_backward(self, size):
        w, style = self.of, self.of.style
        self.recomputed_products, block = 0, self.current_block()
        self.blocks_back += 1
        work = self.attended(size, True)
        work += self.traffic(w.tokens * (style.width_backward * w.width + style.hidden_backward * w.feed_forward), style.kernels_backward)
        work.launches *= BACKWARD_LAUNCH
        if w.recomputed[block]:
            work.host += w.recomputed_host_s
        if not w.sharded:
            if w.microbatches > 1:
                work += self.traffic(ACCUMULATION * w.block_parameters, 0)
            return work
        if w.strategy != "shard_grad_op" and block + 1 < len(w.recomputed):
            work += self.traffic(w.gather_copy * w.block_parameters, 2)
        work += self.traffic(w.reduce_copy * w.block_parameters, 2)
        work.host += w.unit_host_s
        return work

    def embedding(self, backward):
        w = self.of
        elements, table = w.tokens * w.width, w.vocabulary * w.width
        if backward:
            done, self.embedding_done = self.embedding_done, True
            return Work() if done else self.traffic(6 * (elements + table), 5)
        if self.phase == "forward":
            return Work()  # the table of positions
        self.phase, self.begins, self.embedding_done = "forward", True, False
        return self.traffic(6 * elements, 4)

    def update(self, elements):
        first, self.phase = self.phase != "update", "update"
        return self.traffic(elements * self.of.engine_share * self.of.optimizer_bytes, self.of.optimizer_launches if first else 0)


class Network:
    """Seconds of an operation alone, by the vendor's algorithms, over links inside hosts and between them."""

    def __init__(self, workload, link):
        w = workload
        peers = min(w.ranks_per_host, w.shards if w.sharded else w.ranks)
        leaves = max(w.shards, 1 if w.strategy == "hsdp" else w.ranks) > w.ranks_per_host
        self.world, self.host = w.ranks, w.ranks_per_host if w.ranks > w.ranks_per_host else 0
        hosts_share = 0.95  # of the rate inside a host, where a ring leaves it
        self.port_rate = w.device.link_rate * (0.85 + 0.15 * min(1.0, (peers - 2) / 6)) * (hosts_share if leaves else 1)
        self.host_rate, self.port_latency, self.host_latency = w.host_rate * link, 3.4e-6, 14e-6

    def time(self, kind, size, stride, ranks):
        if ranks == 1:
            return OPERATION_START
        last = self.world - 1
        inside, in_domain = ranks, self.world
        if self.host:
            start = last // self.host * self.host
            inside = (last - max(start, last - (ranks - 1) * stride)) // stride + 1
            in_domain = min(start + self.host, self.world) - start
        spans, both = inside < ranks, kind == "all_reduce"
        communicators = max(1, in_domain // inside)
        crossing = min(-(-ranks // inside), ranks - 1) if spans else 0
        around = crossing * self.host_latency + (ranks - 1 - crossing) * self.port_latency

        def carried(moved):
            return max(moved / self.port_rate if inside > 1 or not self.host else 0, moved * communicators / self.host_rate if spans else 0)

        ring = carried(size * (ranks - 1) / ranks * (2 if both else 1)), around * (2 if both else 1)
        if both:
            hosts = -(-ranks // inside)
            depth = (hosts - 1).bit_length() * (self.host_latency if spans else self.port_latency)
            ring = min(ring, (carried(2 * size), 2 * ((inside - 1) * self.port_latency + depth)), key=sum)
        return OPERATION_START + round(ring[0] * 1e9) / 1e9 + round(ring[1] * 1e9) / 1e9


class Step:
    """The engine's schedule of a workload's step."""

    CLUSTER = {"links": {"intra": {"latency_us": 1, "bytes_per_second": 1e11}, "inter": {"latency_us": 1, "bytes_per_second": 1e11}},
               "compute": {"kind": "device", "memory_bytes": 8e10, "memory_bytes_per_second": 1e12,
                           "peak_flops": {name: 1e14 for name in ("f32", "bf16", "f16", "fp8")}}}

    def __init__(self, workload, tool):
        self.workload, self.recorded = workload, min(workload.microbatches, RECORDED)
        run, parameters = self.plan(tool)
        self.peak_bytes = run["peak_bytes"]["total"]
        if workload.adapted:
            workload.engine_share = (workload.root_parameters + workload.layers * workload.block_parameters) / parameters
        graph = run["graph"] if workload.prefetches else without_backward_prefetch(run["graph"])
        self.tasks, self.operations = [], []  # of operations: kind, bytes, stride, ranks
        self.read(graph)

    def plan(self, tool):
        """One run of `tessera plan`, and the engine's number of parameters."""
        w = self.workload
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "config.json").write_text(json.dumps(w.config()))
            (folder / "cluster.json").write_text(json.dumps({**self.CLUSTER, "name": "published", "ranks_per_host": w.ranks_per_host}))
            arguments = ["--model", folder / "config.json", "--cluster", folder / "cluster.json", "--ranks", w.ranks, "--strategy", w.strategy,
                         "--wrap", "block" if w.overlaps or w.sharded else "none", "--prefetch", 1, "--precision", "bf16", "--clip-norm", 1,
                         "--seq-len", w.seq_len, "--accumulate", self.recorded, "--global-batch", w.sequences * w.ranks * self.recorded,
                         "--json", folder / "plan.json"]
            if self.recorded > 1:
                arguments += ["--reduce-when", "scatter" if w.strategy == "hsdp" else "every" if w.sharded else "last"]
            if w.strategy == "hsdp":
                arguments += ["--mesh", f"{w.ranks // w.shards}x{w.shards}"]
            if w.reduces_f32 and w.sharded:
                arguments += ["--reduce-dtype", "f32"]
            if w.recomputation != "none":
                arguments += ["--checkpoint-activations"]
            try:
                done = subprocess.run([tool, "plan", *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)
            except subprocess.TimeoutExpired:
                raise Problem("tessera plan did not end within 300 s") from None
            if done.returncode != 0:
                *_, line = ["", *done.stderr.strip().splitlines()]
                raise Problem(line.replace(str(folder / "config.json"), "its model").removeprefix("tessera: ") or
                              f"tessera plan ended with code {done.returncode}")
            plan = json.loads((folder / "plan.json").read_text())
        return plan["runs"][0], plan["parameters"]

    def read(self, graph):
        """Tasks are [what each waits for: computing, operations of queue 0, of queue 1; its operation or work; if it begins a microbatch].

        Computing is one sequence, and so are the operations of a queue, so that the last number of each says all. Calls that
        follow each other become one task, but not those of two blocks: the host may be ahead of the device in one and behind
        it in the next.
        """
        profile, numbers, reached = FrameworkProfile(self.workload), {}, []
        seen, joins = (0, 0, 0), False  # what computing has waited for; the next call joins the last task
        for node in graph:
            before = tuple(max((reached[i][part] for i in node["after"]), default=0) for part in range(3))
            if "operation" in node:
                o = node["operation"]
                key = o["kind"], o["bytes"], o["stride"], o["ranks"]
                if key not in numbers:
                    numbers[key] = len(self.operations)
                    self.operations.append(key)
                self.tasks.append((before, numbers[key], None, False))
                queue = 2 if o["stride"] > 1 else 1
                reached.append(tuple(len(self.tasks) if part == queue else 0 for part in range(3)))
                joins = False
                continue
            kernel = node.get("kernel", {})
            work = profile.cost(node["name"], kernel, adam_elements(node["name"], kernel))
            if work.empty():
                reached.append(before)
                continue
            starts = profile.begins or node["name"].startswith(("attention", "cross_entropy"))
            waits = before[1] > seen[1] or before[2] > seen[2]
            seen = tuple(map(max, seen, before))
            if joins and not starts and not waits:
                self.tasks[-1][2].__iadd__(work)
            else:
                self.tasks.append((before, -1, work, profile.begins))
            profile.begins, joins = False, True
            reached.append((len(self.tasks), 0, 0))

    def seconds(self, parameters):
        """`parameters`: a dictionary with products, memory, launch_s, overhead and link."""
        w = self.workload
        hosts = -(-w.ranks // w.ranks_per_host)
        slowest = 1 + SLOWEST_HOST * math.sqrt(2 * math.log(hosts)) if hosts > 1 else 1
        return self.timed(parameters) * slowest + w.step_overhead_s * parameters["overhead"]

    def timed(self, parameters):
        """One pass over the tasks in the order of their issue."""
        network = Network(self.workload, parameters["link"])
        lengths = [network.time(kind, int(size * self.workload.engine_share), stride, ranks) for kind, size, stride, ranks in self.operations]
        launch, products, memory = parameters["launch_s"], 1 / parameters["products"], 1 / parameters["memory"]
        slow = 1 - LAUNCH_BLOCKS / self.workload.device.multiprocessors
        ends, queues, transfers, microbatches, device, host = [0.0], [0.0, 0.0], [], [], 0.0, 0.0
        for (computed, near, far), operation, work, begins in self.tasks:
            ready = max(ends[near], ends[far])
            if begins:
                microbatches.append(max(device, host))
            if operation >= 0:  # the library has one queue for each set of ranks, whichever communicator the engine uses
                queue = 1 if self.operations[operation][2] > 1 else 0
                begin = max(queues[queue], ready, ends[computed], host)
                queues[queue] = end = begin + lengths[operation]
                insort(transfers, (begin, end))
                ends.append(end)
                continue
            # The host launches ahead of the device. Transfers in flight take multiprocessors away.
            begin = max(device, host + launch, ready)
            host += work.launches * launch + work.host
            left = work.products * products + work.memory * memory + work.gaps
            for start, end in transfers:
                if end <= begin:
                    continue
                if start >= begin + left:
                    break
                if start > begin:
                    left -= start - begin
                    begin = start
                if left <= (end - begin) * slow:
                    begin += left / slow
                    left = 0.0
                    break
                left -= (end - begin) * slow
                begin = end
            device = max(begin + left, host + launch)
            if len(transfers) > 24:
                transfers = [transfer for transfer in transfers if transfer[1] > device]
            ends.append(device)
        last, more = max(host, *ends), self.workload.microbatches - self.recorded
        return last + more * (microbatches[-1] - microbatches[-2]) if more > 0 and len(microbatches) > 1 else last


def adam_elements(name, kernel):
    """Elements that a call of Adam updates, else 0. A call has 7 operands."""
    return kernel["size"] / 7 / {"f64": 8, "f32": 4}.get(kernel["dtype"], 2) if name == "adam_step" else 0


def without_backward_prefetch(graph):
    """The same, but in backward a gather is called when the unit before has computed, and the first block's in forward after the
    embedding. All others are as before: the host runs ahead in forward, so that each block's gather overlaps the block before."""
    users, computed, embeddings = {}, {}, []  # the first kernel that waits for each node; the last one of a unit before each kernel
    last = None
    for i, node in enumerate(graph):
        if "kernel" not in node:
            continue
        for earlier in node["after"]:
            users.setdefault(earlier, i)
        computed[i] = last
        last = last if node["name"] == "norm_part" else i
        if node["name"] == "embedding_forward":
            embeddings.append(i)
    keys, late, backward = [], {}, False  # the order, and what a gather waits for in addition
    for i, node in enumerate(graph):
        backward = (backward or node["name"] == "cross_entropy_backward") and node["name"] != "embedding_backward"
        user, key = users.get(i), i
        if user is not None and node.get("operation", {}).get("kind") == "all_gather":
            if backward and computed[user] > i:
                late[i], key = computed[user], user - 0.5
            elif not backward and any(i < embedding < user for embedding in embeddings):
                key = user - 0.5
        keys.append(max([key, *(keys[earlier] for earlier in node["after"])]))
    order = sorted(range(len(graph)), key=lambda i: (keys[i], i))
    places = {old: new for new, old in enumerate(order)}
    return [{**graph[i], "after": sorted({places[earlier] for earlier in [*graph[i]["after"], *([late[i]] if i in late else [])]})} for i in order]
