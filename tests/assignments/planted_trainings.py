"""Makes what assignment 7 hands out: records of a training, right and with planted mistakes, and texts of `plan --why`.

    planted_trainings.py --write TOOL     writes them anew; then put the digests that it prints into assignments/grading/bug.py
    planted_trainings.py --check TOOL     fails if they are not what this program and the tool make, or the answers don't fit

The ranks of the training are computed one after the other in this process, in plain Python, and written in the format of
tessera.oracle.
"""

import argparse
import array
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = ROOT / "assignments" / "7-bug"
sys.path.insert(0, str(ROOT / "assignments"))
sys.dont_write_bytecode = True

from grading.bug import DIGESTS, digest  # noqa: E402

RANKS, STEPS, MICROBATCHES, ROWS = 3, 4, 2, 4
SHAPES = {"inner.weight": (8, 6), "inner.bias": (8,), "outer.weight": (3, 8), "outer.bias": (3,)}
SETTINGS = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
# What is wrong in each training; answers.json says where it shows.
MISTAKES = {"1": "lost_microbatch", "2": "wrong_divisor", "3": "left_out", "4": "extra_step", "5": "changed_parameter", "6": "settings"}
# The strategies of the trainings that are only slow.
SLOW = {"7": "hsdp", "8": "shard_grad_op"}
WHY = ("--model", "gpt-tall", "--ranks", "4", "--link", "20us,20MB/s", "--mesh", "2x2")


def f32(values):
    """Rounds to f32; additions and products of a few values are exact enough in f64 to be the same everywhere."""
    return array.array("f", values)


def size(shape):
    count = 1
    for extent in shape:
        count *= extent
    return count


def wave(count, key):
    return f32((((i * 7919 + key * 104729) % 2003) - 1001) / 2000 for i in range(count))


def text_hash(data):
    return hashlib.sha256(bytes(data)).hexdigest()[:16]


def total(values):
    """As sum() adds up to Python 3.11; later ones compensate for the rounding, which would be other bits."""
    result = 0
    for value in values:
        result += value
    return result


def squares(values):
    return total(value * value for value in values)


def sample(values):
    """Sixteen elements, evenly spaced, as the oracle keeps them."""
    count = min(16, len(values))
    return [values[i * (len(values) - 1) // max(1, count - 1)] for i in range(count)]


def entry(values, shape, norms=False):
    found = {"hash": text_hash(values), "layout": {"dtype": "f32", "shape": list(shape)}}
    if norms:
        found.update(squares=squares(values), sample=sample(values))
    return found


def gradient_of(parameters, step, microbatch, rank):
    """The loss of a microbatch, and its gradients: two layers with ReLU, mean squared error."""
    key = 100 * step + 10 * microbatch + rank
    x, y = wave(ROWS * 6, 2 * key + 1), wave(ROWS * 3, 2 * key + 2)
    gradients = {name: [0.0] * size(shape) for name, shape in SHAPES.items()}
    loss = 0.0
    for row in range(ROWS):
        inputs = x[6 * row : 6 * row + 6]
        hidden = [total(parameters["inner.weight"][6 * j + i] * inputs[i] for i in range(6)) + parameters["inner.bias"][j] for j in range(8)]
        active = [max(0.0, value) for value in hidden]
        back = [0.0] * 8
        for k in range(3):
            out = total(parameters["outer.weight"][8 * k + j] * active[j] for j in range(8)) + parameters["outer.bias"][k]
            error = out - y[3 * row + k]
            loss += error * error / (3 * ROWS)
            slope = 2 * error / (3 * ROWS)
            gradients["outer.bias"][k] += slope
            for j in range(8):
                gradients["outer.weight"][8 * k + j] += slope * active[j]
                back[j] += slope * parameters["outer.weight"][8 * k + j]
        for j in range(8):
            if hidden[j] > 0:
                gradients["inner.bias"][j] += back[j]
                for i in range(6):
                    gradients["inner.weight"][6 * j + i] += back[j] * inputs[i]
    return loss, {name: f32(values) for name, values in gradients.items()}


class Rank:
    """One rank of the training, and the lines of its record."""

    def __init__(self, rank):
        self.rank, self.lines, self.operations, self.updates = rank, [], 0, 0
        self.parameters = {name: wave(size(shape), index) for index, (name, shape) in enumerate(SHAPES.items())}
        self.moments = {name: (f32([0.0] * size(shape)), f32([0.0] * size(shape))) for name, shape in SHAPES.items()}
        self.settings = dict(SETTINGS)
        self.lines.append({"tessera_oracle": 1, "rank": rank, "ranks": RANKS, "torch": "", "command": ["train"], "keep_values": 0})
        self.lines.append({"step": 0, "optimizer": 0, "update": 0, "parameters": self.parameter_entries(), "state": {}})
        self.after_step = {}

    def parameter_entries(self):
        return {name: entry(values, SHAPES[name]) for name, values in self.parameters.items()}

    def state_entries(self):
        return {f"{name}.{kind}": entry(values, SHAPES[name]) for name, both in self.moments.items()
                for kind, values in zip(("exp_avg", "exp_avg_sq"), both)}

    def backwards(self, step, count):
        """Gradients of `count` microbatches, added, and the entries of the passes."""
        total = {name: [0.0] * size(shape) for name, shape in SHAPES.items()}
        passes = []
        for microbatch in range(count):
            loss, gradients = gradient_of(self.parameters, step, microbatch, self.rank)
            one = {"issued": self.operations, "loss": loss / MICROBATCHES, "hash": text_hash(array.array("d", [loss]))}
            changed = {name: found["hash"] for name, found in self.parameter_entries().items()
                       if self.after_step.get(name, found["hash"]) != found["hash"]}
            if changed and not passes:
                one["changed"] = changed
            passes.append(one)
            for name, values in gradients.items():
                total[name] = [a + b / MICROBATCHES for a, b in zip(total[name], values)]
        return {name: f32(values) for name, values in total.items()}, passes

    def update(self, gradients):
        self.updates += 1
        lr, (beta1, beta2), decay = self.settings["lr"], self.settings["betas"], self.settings["weight_decay"]
        for name, values in self.parameters.items():
            m, v = self.moments[name]
            m[:] = f32(beta1 * a + (1 - beta1) * g for a, g in zip(m, gradients[name]))
            v[:] = f32(beta2 * a + (1 - beta2) * g * g for a, g in zip(v, gradients[name]))
            first, second = 1 - beta1**self.updates, 1 - beta2**self.updates
            values[:] = f32(p * (1 - lr * decay) - lr * (a / first) / ((b / second) ** 0.5 + self.settings["eps"])
                            for p, a, b in zip(values, m, v))

    def write_step(self, gradients, passes, operations):
        self.lines.append({
            "step": self.updates, "optimizer": 0, "update": self.updates, "random": text_hash(b"seed"), "settings": [dict(self.settings)],
            "gradients": {name: entry(values, SHAPES[name], norms=True) for name, values in gradients.items()}, "backwards": passes,
            "parameters": self.parameter_entries(), "state": self.state_entries(), "collectives": operations})
        self.after_step = {name: found["hash"] for name, found in self.lines[-1]["parameters"].items()}


def reduced(ranks, every, names, divisor):
    """One all_reduce of all ranks' gradients of `names`: the reduced ones, and each rank's entry of the operation."""
    flats = [f32(value / divisor for name in names for value in gradients[name]) for gradients in every]
    total = flats[0]
    for other in flats[1:]:
        total = f32(a + b for a, b in zip(total, other))
    entries = []
    for rank, flat in zip(ranks, flats):
        rank.operations += 1
        entries.append({"kind": "all_reduce", "group": list(range(RANKS)), "op": "sum", "dtype": "f32", "count": len(flat),
                        "inputs": {"hashes": [text_hash(flat)], "squares": squares(flat), "sample": sample(flat)},
                        "outputs": {"hashes": [text_hash(total)]}, "number": rank.operations, "carries": list(names)})
    found, offset = {}, 0
    for name in names:
        found[name] = total[offset : offset + size(SHAPES[name])]
        offset += size(SHAPES[name])
    return found, entries


def train(mistake):
    """The lines of each rank's record."""
    ranks = [Rank(rank) for rank in range(RANKS)]
    names = [name for name in SHAPES if not (mistake == "left_out" and name == "outer.bias")]
    for step in range(1, STEPS + 1):
        if mistake == "settings" and step == 3:
            for rank in ranks:
                rank.settings["betas"] = [0.9, 0.99]
        if mistake == "changed_parameter" and step == 3:
            ranks[1].parameters["outer.weight"][2] += 0.25
        count = 1 if mistake == "lost_microbatch" and step == 3 else MICROBATCHES
        made = [rank.backwards(step, count) for rank in ranks]
        divisor = 2 if mistake == "wrong_divisor" and step >= 2 else RANKS
        mean, operations = reduced(ranks, [gradients for gradients, _ in made], names, divisor)
        for rank, (gradients, passes), operation in zip(ranks, made, operations):
            own = {name: mean.get(name, gradients[name]) for name in SHAPES}
            rank.update(own)
            rank.write_step(own, passes, [operation])
            if mistake == "extra_step" and step == 2:
                rank.update(own)
                rank.write_step(own, [], [])
    for rank in ranks:
        rank.lines.append({"end": True, "complete": True})
    return [rank.lines for rank in ranks]


def why_text(tool, name):
    """What `plan --why` says of a strategy whose name is hidden."""
    command = [tool, "plan", *WHY, "--why", f"ddp,{name}"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    part = text[text.index("Why a step of") :].split("\n\n")[0]
    kept = [line for line in part.splitlines() if line.strip()][:11]
    return "\n".join(line.replace(f" {name} ", " X ") for line in kept) + "\n"


def files(tool):
    """All files to hand out: path below FOLDER and text."""
    for label, mistake in {"right": "", **MISTAKES}.items():
        for rank, lines in enumerate(train(mistake)):
            yield f"records/{label}/rank{rank}.jsonl", "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    for label, name in SLOW.items():
        yield f"why/{label}.txt", why_text(tool, name)


def oracle_report(number):
    command = [sys.executable, "-m", "tessera.oracle", "compare", str(FOLDER / "records" / "right"), str(FOLDER / "records" / number)]
    return subprocess.run(command, env=dict(os.environ, PYTHONPATH=str(ROOT / "python")), capture_output=True, text=True, check=False)


def problems(tool):
    for path, text in files(tool):
        if not (FOLDER / path).exists() or (FOLDER / path).read_text() != text:
            yield f"{path} is not what this program makes: run it with --write"
    answers = json.loads((HERE / "solutions" / "answers.json").read_text())
    for number, answer in answers.items():
        for field, value in answer.items():
            if digest(number, field, value) != DIGESTS[number].get(field):
                yield f"training {number}: the digest of {field} in grading/bug.py is not that of the solution: {digest(number, field, value)}"
    for number in MISTAKES:
        said = oracle_report(number)
        where = f"different: step {answers[number]['step']}, "
        if said.returncode != 1 or where not in said.stdout or f" {answers[number]['tensor']} " not in said.stdout.splitlines()[0]:
            yield f"training {number}: the oracle says something else than the solution:\n{said.stdout}{said.stderr}"
    with tempfile.TemporaryDirectory() as folder:  # the control: a record that is changed is seen
        broken = pathlib.Path(folder) / "rank0.jsonl"
        broken.write_text((FOLDER / "records" / "right" / "rank0.jsonl").read_text() + " ")
        assert broken.read_text() != next(iter(files(tool)))[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tool")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.write:
        for path, text in files(options.tool):
            (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
            (FOLDER / path).write_text(text)
        for number, answer in json.loads((HERE / "solutions" / "answers.json").read_text()).items():
            print(f'    "{number}": {{' + ", ".join(f'"{field}": "{digest(number, field, value)}"' for field, value in answer.items()) + "},")
        return 0
    found = list(problems(options.tool))
    print("\n".join(found) or "all as this program makes it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
