"""Writes the steps of a plan as MLCommons Chakra execution traces, one file for each rank.

    python3 bench/plan_chakra.py PLAN.json OUT

PLAN.json is what `tessera plan --model .. --json PLAN.json` writes, and OUT a folder that is new or empty. With several
runs in the file, each has a folder in OUT. docs/plan.md describes the files, and et_def.proto is their schema.
"""

import json
import os
import pathlib
import re
import sys

COLLECTIVES = {"all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5, "all_to_all": 6,
               "reduce_scatter": 7, "barrier": 9}
METADATA_NODE, COMP_NODE, COMM_COLL_NODE = 1, 4, 7
GROUPS_NODE = 1  # the node that defines the groups; those of the step follow it


class Problem(Exception):
    """A mistake of the user, in one line."""


def varint(number):
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    data.append(number)
    return bytes(data)


def number(field, value):
    return varint(field << 3) + varint(value)


def delimited(field, data):
    """A text, bytes or a message."""
    data = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(data)) + data


def framed(message):
    return varint(len(message)) + message


def attribute(name, value):
    """`value`: ("int64" | "uint64" | "bool" | "string", value)."""
    kind, value = value
    place = {"int64": 9, "uint64": 13, "bool": 27, "string": 29}[kind]
    return delimited(10, delimited(1, name) + (delimited(place, value) if kind == "string" else number(place, int(value))))


def input_bytes(operation):
    """Of the buffer that each rank passes, as readers of the schema expect."""
    grows = operation["kind"] in ("all_gather", "gather")
    return operation["bytes"] // operation["ranks"] if grows else operation["bytes"]


def node_of(node, index):
    """The node of the step with this index. The group of an operation, its last attribute, is missing."""
    operation, after = node.get("operation"), node["after"]
    micros = lambda ns: (ns + 500) // 1000
    data = number(1, GROUPS_NODE + 1 + index) + delimited(2, node["name"])
    data += number(3, COMM_COLL_NODE if operation else COMP_NODE)
    data += delimited(5, b"".join(varint(GROUPS_NODE + 1 + earlier) for earlier in after) if after else varint(GROUPS_NODE))
    for field, value in ((6, micros(node["start_ns"])), (7, micros(node["duration_ns"]))):
        data += number(field, value) if value else b""
    data += attribute("is_cpu_op", ("bool", False))
    for key in ("start_ns", "duration_ns"):
        data += attribute(key, ("uint64", node[key]))
    if operation:
        if operation["kind"] not in COLLECTIVES:
            raise Problem(f"no collective of the schema is {operation['kind']}")
        data += attribute("comm_type", ("int64", COLLECTIVES[operation["kind"]]))
        data += attribute("comm_size", ("int64", input_bytes(operation)))
        data += attribute("bytes_sent", ("uint64", operation["bytes_sent"]))
    return data


class Groups:
    """Numbers the groups of all ranks. Operations with the same members share a group; that of all ranks is 0."""

    def __init__(self, graph, ranks):
        self.ranks, self.first, following = ranks, {}, 1
        for operation in (node["operation"] for node in graph if "operation" in node):
            shape = operation["stride"], operation["ranks"]  # equal for the communicators along one axis
            if shape in self.first:
                continue
            self.first[shape] = 0 if shape[1] == ranks else following
            following += 0 if shape[1] == ranks else ranks // shape[1]

    def of(self, shape, rank):
        """The number and the members of the rank's group."""
        stride, ranks = shape
        block, place = stride * ranks, rank % stride  # a block: neighbors, divided into `stride` groups
        start = rank // block * block + place
        return self.first[shape] + rank // block * stride + place, [start + i * stride for i in range(ranks)]

    def of_rank(self, rank):
        return [self.of(shape, rank) for shape in self.first]


def groups_node(groups):
    """The groups of one rank, in the form of PyTorch's traces: a list with one string, the groups as JSON."""
    text = json.dumps([{"pg_name": str(name), "group_size": len(members), "ranks": members} for name, members in groups],
                      separators=(",", ":"))
    inputs = delimited(1, f"['{text}']") + delimited(2, "[[]]") + delimited(3, "['String']")
    return (number(1, GROUPS_NODE) + delimited(2, "## process_group:init ##") + number(3, METADATA_NODE) + delimited(8, inputs) +
            attribute("is_cpu_op", ("bool", False)))


def write_step(graph, ranks, folder):
    """What is the same for all ranks is encoded once."""
    folder.mkdir(parents=True, exist_ok=True)
    groups, encoded, named = Groups(graph, ranks), [node_of(node, i) for i, node in enumerate(graph)], {}
    # Alternately the nodes up to an operation, and the operation, which has the group of its rank.
    parts, shapes = [b""], []
    for node, data in zip(graph, encoded):
        if "operation" in node:
            shapes.append(((node["operation"]["stride"], node["operation"]["ranks"]), data))
            parts.append(b"")
        else:
            parts[-1] += framed(data)
    everyone = {}
    for rank in range(ranks):
        mine = groups.of_rank(rank)
        everyone.update(mine)
        name_of = dict(zip(groups.first, (name for name, _ in mine)))
        pieces = [framed(delimited(1, "0.0.4")), framed(groups_node(mine)), parts[0]]
        for i, (shape, data) in enumerate(shapes):
            key = i, name_of[shape]
            if key not in named:
                named[key] = framed(data + attribute("pg_name", ("string", str(name_of[shape]))))
            pieces += [named[key], parts[i + 1]]
        (folder / f"rank.{rank}.et").write_bytes(b"".join(pieces))
    listed = {str(name): everyone[name] for name in sorted(everyone) if name}
    (folder / "comm_groups.json").write_text(json.dumps(listed, separators=(",", ":")) + "\n")


def new_folder(path):
    if path.exists() and not path.is_dir():
        raise Problem(f"'{path}' is not a folder; name a new one")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(f"'{path}' can't be created: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise Problem(f"'{path}' can't be written; name another folder")
    if any(path.iterdir()):
        raise Problem(f"'{path}' is not empty; name a new folder")
    return path


def read_plan(path):
    try:
        plan = json.loads(pathlib.Path(path).read_text())
        if all(run["graph"] for run in plan["runs"]) and plan["ranks"] > 0:
            return plan
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"can't read '{path}': {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise Problem(f"'{path}' has no steps; give a file that `tessera plan --model NAME --json FILE` wrote")


def main(arguments):
    if len(arguments) != 2 or arguments[0].startswith("-"):
        raise Problem("give PLAN.json and a new folder: python3 bench/plan_chakra.py PLAN.json OUT")
    plan, target = read_plan(arguments[0]), new_folder(pathlib.Path(arguments[1]))
    for run in plan["runs"]:
        name = re.sub("[/;]", "_", ".".join(filter(None, (run["strategy"], run.get("wrap")))))
        write_step(run["graph"], plan["ranks"], target if len(plan["runs"]) == 1 else target / name)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Problem as problem:
        print(f"plan_chakra: {problem}", file=sys.stderr)
        sys.exit(2)
