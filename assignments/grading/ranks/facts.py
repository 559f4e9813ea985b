"""What a rank in Python reports to the grader, and a communicator that records calls: as grading.h and recorder.h do in C++."""

import importlib.util
import json
import os
import sys
import time
import traceback

import numpy as np

import tessera

FOLDER = os.environ.get("GRADE_DIR")  # none: a student runs the ranks alone, and sees the facts
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "send", "recv", "barrier")


def address(array):
    return np.asarray(array).__array_interface__["data"][0]


def extent(array):
    """(address, elements); the array itself is not kept, which would keep its memory."""
    return (0, 0) if array is None else (address(array), np.asarray(array).size)


def load(path):
    """The module of a student's file, which may import the files beside it."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("student", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class DelayedWork:
    """Done when the operation is, and a point in time has come."""

    def __init__(self, work, end):
        self._work, self._end = work, end

    def done(self):
        return self._work.done() and time.monotonic() >= self._end

    def wait(self, timeout=None):
        self._work.wait(timeout)
        time.sleep(max(0.0, self._end - time.monotonic()))

    def __getattr__(self, name):
        return getattr(self._work, name)


class Recorder:
    """Passes everything on and records the calls; it can also make the links slow, and fail."""

    def __init__(self, inner):
        self._inner, self.calls, self.mark, self.calls_left, self.link = inner, [], 0, None, None
        self._port_free_at = 0.0
        self.rank, self.size, self.backend = inner.rank, inner.size, inner.backend

    def _record(self, kind, peer, x, out, sums=False):
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                self._inner.abort(f"the grader made rank {self.rank} fail")
                raise tessera.Aborted("the grader made this rank fail")
        self.calls.append({"kind": kind, "peer": peer, "in": extent(x), "out": extent(out), "mark": self.mark, "sums": sums})

    def _slowed(self, work, kind, x, out):
        if self.link is None or self.size == 1:
            return work
        latency, rate = self.link
        elements = max(0 if array is None else np.asarray(array).nbytes for array in (x, out))
        factor = {"all_reduce": 2.0}.get(kind, 1.0) * (self.size - 1) / self.size
        self._port_free_at = max(self._port_free_at, time.monotonic()) + factor * elements / rate
        return DelayedWork(work, self._port_free_at + latency)

    def all_reduce(self, x, out=None, op="sum", factor=0, **rest):
        self._record("all_reduce", 0, x, x if out is None else out, op == "sum")
        return self._slowed(self._inner.all_reduce(x, out, op=op, factor=factor, **rest), "all_reduce", x, out)

    def all_gather(self, out, x, counts=None, **rest):
        self._record("all_gather", 0, x, out)
        return self._slowed(self._inner.all_gather(out, x, counts=counts, **rest), "all_gather", x, out)

    def reduce_scatter(self, out, x, op="sum", factor=0, counts=None, **rest):
        self._record("reduce_scatter", 0, x, out, op == "sum")
        return self._slowed(self._inner.reduce_scatter(out, x, op=op, factor=factor, counts=counts, **rest), "reduce_scatter", x, out)

    def send(self, x, peer, *rest, **named):
        self._record("send", peer, x, None)
        return self._inner.send(x, peer, *rest, **named)

    def recv(self, x, peer=None, *rest, **named):
        self._record("recv", -1 if peer is None else peer, None, x)
        return self._inner.recv(x, peer, *rest, **named)

    def batch(self, sends, receives, **named):
        for x, peer, _ in sends:
            self._record("send", peer, x, None)
        for x, peer, _ in receives:
            self._record("recv", peer, None, x)
        return self._inner.batch(sends, receives, **named)

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if name in KINDS:  # those without a method above
            self._record(name, 0, None, None)
        return found

    def traffic(self):
        """Calls of this object, and the bytes that the backend counted."""
        counted = self._inner.traffic()
        called = [call["kind"] for call in self.calls]
        return {kind: [called.count(kind), counted.get(kind, {}).get("bytes_sent", 0)] for kind in KINDS
                if kind in called or kind in counted}


def calls_of(recorder, memory=None):
    """[[kind, peer, offset, count, out_offset, out_count, mark], ..]: offsets in elements from the start of `memory`, or -1."""
    begin = 0 if memory is None else address(memory)
    end = 0 if memory is None else begin + memory.nbytes

    def place(extent):
        at, count = extent
        return (at - begin) // 4 if 0 < begin <= at <= end else -1, count

    return [[call["kind"], call["peer"], *place(call["in"]), *place(call["out"]), call["mark"]] for call in recorder.calls]


def text_of(error):
    """The error with the line of the student's file that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == sys.argv[1]]
    where = f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


class Grading:
    """The world of the grading on one rank."""

    def __init__(self):
        self.world, self.argument, self.stopped = tessera.init(), "", False

    def run(self, name, ranks, says, body):
        """As Grading::run() in C++."""
        if self.stopped:
            return
        takes_part = self.world.rank < ranks
        group = self.world.split(0 if takes_part else -1, self.world.rank)
        timed_out = np.zeros(1, np.int32)
        if takes_part:
            fact = {"case": name, "says": says, "rank": group.rank, "ranks": ranks, "part": self.argument}
            self.report(fact | {"status": "began"})
            try:
                body(Recorder(group), fact)
                fact["status"] = "ok"
            except SystemExit:
                self.report(fact | {"status": "error", "kind": "exit", "error": "your code ended the process by exit()"})
                raise
            except Exception as error:  # noqa: BLE001  (the grader reports it)
                timed_out[0] = isinstance(error, tessera.Timeout)
                fact.update(status="error", kind=type(error).__name__, error=text_of(error))
                group.abort(f"rank {group.rank} raised an exception")
            self.report(fact)
        self.world.all_reduce(timed_out, op="max", timeout=50).wait()
        self.stopped = bool(timed_out[0])

    def report(self, fact):
        if FOLDER is None:
            print(json.dumps(fact), file=sys.stderr)
            return
        with open(os.path.join(FOLDER, f"rank{self.world.rank}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(fact) + "\n")

    def write_floats(self, fact, key, values):
        if FOLDER is None:
            return
        name = f"{fact['case']}.{key}.{self.world.rank}.f32"
        np.ascontiguousarray(values, np.float32).tofile(os.path.join(FOLDER, name))
        fact[key] = name


def fails(body):
    """Whether `body` raises an error of the library."""
    try:
        body()
    except tessera.Error:
        return True
    return False


def run_grading(body):
    """Loads the student's file and runs `body(grading, student, kind, ranks, amount)` for each argument KIND,RANKS,AMOUNT."""
    student, grading = load(sys.argv[1]), Grading()
    for argument in sys.argv[2:]:
        grading.argument = argument
        kind, ranks, amount = argument.split(",")
        body(grading, student, kind, int(ranks), int(amount))
