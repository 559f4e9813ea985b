"""Typical mistakes in the solutions: each changes one text and must lose the points of a test, with a message that helps."""

import dataclasses


@dataclasses.dataclass
class Mistake:
    name: str
    find: str
    replace: str
    test: str  # a part of the name of the test that it fails
    message: str  # a regular expression that its output matches
    keeps: str = ""  # a part of the name of a test that it passes nevertheless


RING_CPP = [
    Mistake("the last slices are the longer ones", "i * (count / n) + std::min(i, rest)", "i * (count / n)",
            "the messages", r"sends slice \d, which starts at [\d,]+, yours at [\d,]+", keeps="equal slices"),
    Mistake("one step of phase 1 is missing", "for (int k = 0; k < n - 1; ++k) {\n    const Slice out = slice(rank - k)",
            "for (int k = 0; k < n - 2; ++k) {\n    const Slice out = slice(rank - k)",
            "equal slices", r"holds only the values of rank 1"),
    Mistake("sends are waited for before receives", "    const std::array parts = {P2POp::send(view_of(x.data() + out.begin, out.count()), next),\n"
            "                              P2POp::recv(view_of(into, count), before)};\n    world.batch(parts).wait();",
            "    if (n > 1) world.send(view_of(x.data() + out.begin, out.count()), next).wait();\n"
            "    if (n > 1) world.recv(view_of(into, count), before).wait();",
            "large slices over tcp", r"the ranks wait for each other.*use batch", keeps="equal slices"),
    Mistake("an error is swallowed", "world.batch(parts).wait();", "try { world.batch(parts).wait(); } catch (const std::exception&) {}",
            "a rank that fails", r"returned as if all were well", keeps="equal slices"),
    Mistake("the whole ring runs the other way", "const int next = (rank + 1) % n, before = (rank + n - 1) % n;",
            "const int before = (rank + 1) % n, next = (rank + n - 1) % n;",
            "the messages", r"in the ring it sends only to rank \d"),
]
RING_PYTHON = [
    Mistake("slices are rounded up", "    length, rest = divmod(count, slices)\n    begin = index * length + min(index, rest)\n"
            "    return slice(begin, begin + length + (1 if index < rest else 0))",
            "    length = -(-count // slices)\n    return slice(index * length, min(count, (index + 1) * length))",
            "the messages", r"rank 0 sends slice 2, which starts at 33,327, yours at 33,328", keeps="equal slices"),
    Mistake("the library's own operation is used", "    for k in range(n - 1):\n        mine = part", "    world.all_reduce(x).wait()\n"
            "    for k in range(0):\n        mine = part", "the messages", r"calls all_reduce: only send, recv and batch are allowed"),
    Mistake("the sum is divided", "        mine[:] = arrived + mine\n", "        mine[:] = arrived + mine\n        if k == n - 2: mine /= n\n",
            "equal slices", r"off by a factor of \d: it should be the sum, not an average"),
    Mistake("what arrives is not added", "mine[:] = arrived + mine", "mine[:] = arrived", "equal slices", r"rank \d"),
]
MISTAKES = {("ring", "cpp"): RING_CPP, ("ring", "python"): RING_PYTHON}
