"""bench/plan_chakra.py: its files, read with the schema alone, describe the step that the plan prints.

    chakra_test.py TOOL
"""

import collections
import copy
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import types
import unittest

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

TOOL = None
BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
# Names and numbers of the public schema, github.com/mlcommons/chakra.
FIELDS = {"Node": {"id": 1, "name": 2, "type": 3, "ctrl_deps": 4, "data_deps": 5, "start_time_micros": 6, "duration_micros": 7,
                   "inputs": 8, "attr": 10},
          "AttributeProto": {"name": 1, "int64_val": 9, "uint64_val": 13, "bool_val": 27, "string_val": 29},
          "GlobalMetadata": {"version": 1, "attr": 2}, "IOInfo": {"values": 1, "shapes": 2, "types": 3}}
TYPES = {"INVALID_NODE": 0, "METADATA_NODE": 1, "COMP_NODE": 4, "COMM_COLL_NODE": 7}
COLLECTIVES = {"ALL_REDUCE": 0, "REDUCE": 1, "ALL_GATHER": 2, "GATHER": 3, "SCATTER": 4, "BROADCAST": 5, "ALL_TO_ALL": 6,
               "REDUCE_SCATTER": 7, "BARRIER": 9}


def schema():
    """Classes, enumerations and numbers of bench/et_def.proto, as protoc would write them."""
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    scalars = {"string": field.TYPE_STRING, "bool": field.TYPE_BOOL, "int64": field.TYPE_INT64, "uint64": field.TYPE_UINT64}
    open_blocks = []
    for line in (BENCH / "et_def.proto").read_text().splitlines():
        words = re.findall(r"[\w.]+", line.partition("//")[0])
        if not words:
            if "}" in line:
                open_blocks.pop()
        elif words[0] == "package":
            file.package = words[1]
        elif words[0] in ("message", "enum"):
            open_blocks.append((file.message_type if words[0] == "message" else file.enum_type).add(name=words[1]))
        elif words[0] == "oneof":
            open_blocks[-1].oneof_decl.add(name=words[1])
            open_blocks.append(open_blocks[-1])
        elif words[0] not in ("syntax", "option") and isinstance(open_blocks[-1], descriptor_pb2.EnumDescriptorProto):
            open_blocks[-1].value.add(name=words[0], number=int(words[1]))
        elif words[0] not in ("syntax", "option"):
            *repeated, kind, name, number = words
            added = open_blocks[-1].field.add(name=name, number=int(number), label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL)
            if kind in scalars:
                added.type = scalars[kind]
            else:
                added.type_name = f".{file.package}.{kind}"
            if len(open_blocks) > 1:
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    described = pool.FindFileByName(file.name)
    new_class = getattr(message_factory, "GetMessageClass", None) or message_factory.MessageFactory(pool).GetPrototype
    names = {name: new_class(message) for name, message in described.message_types_by_name.items()}
    names.update((name, {value.name: value.number for value in kind.values}) for name, kind in described.enum_types_by_name.items())
    names.update((value.name, value.number) for kind in described.enum_types_by_name.values() for value in kind.values)
    return types.SimpleNamespace(DESCRIPTOR=described, **names)


SCHEMA = schema()


def messages(data):
    """The bytes of each message of a length-delimited stream."""
    place = 0
    while place < len(data):
        length = shift = 0
        while True:
            byte, place = data[place], place + 1
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if place + length > len(data):
            raise ValueError("the last message is cut off")
        yield data[place:place + length]
        place += length


def read(path):
    """The metadata and the nodes of one rank."""
    first, *others = messages(path.read_bytes())
    return SCHEMA.GlobalMetadata.FromString(first), [SCHEMA.Node.FromString(one) for one in others]


def value(node, name):
    found = [attribute for attribute in node.attr if attribute.name == name]
    return getattr(found[0], found[0].WhichOneof("value"))


def collectives(nodes):
    return [node for node in nodes if node.type == SCHEMA.COMM_COLL_NODE]


def groups(nodes):
    """Of the metadata node, as ASTRA-sim reads it: the JSON is inside a list with one string."""
    node = next(node for node in nodes if node.type == SCHEMA.METADATA_NODE)
    return {group["pg_name"]: group["ranks"] for group in json.loads(node.inputs.values[2:-2])}


def check_order(nodes):
    """Returns the nanoseconds of the longest chain. Each node must start when the last one that it waits for is done."""
    done = {}
    for node in nodes:  # in the file, a node follows those that it waits for: so the graph has no cycle
        assert node.id not in done, f"id {node.id} is not unique"
        before = list(node.data_deps) + list(node.ctrl_deps)
        assert all(earlier in done for earlier in before), f"{node.id} waits for a node that does not precede it"
        if node.type == SCHEMA.METADATA_NODE:
            assert not before
            done[node.id] = 0
            continue
        assert before, f"{node.id} waits for nothing, not even for the groups"
        start = max(done[earlier] for earlier in before)
        assert start == value(node, "start_ns"), f"{node.id} {node.name} starts at {value(node, 'start_ns')}, not {start}"
        done[node.id] = start + value(node, "duration_ns")
    return max(done.values())


def check_waits(nodes, run):
    """Compute waits for every operation, except for those of control that only compare values."""
    followed = {node.id: False for node in nodes}
    for node in reversed(nodes):
        for earlier in list(node.data_deps) + list(node.ctrl_deps):
            followed[earlier] |= followed[node.id] or node.type == SCHEMA.COMP_NODE
    updated = set()  # nodes after the optimizer: the next step waits for the gathers of what it wrote
    for node in nodes:
        if node.name.endswith("_step") or updated.intersection(node.data_deps):
            updated.add(node.id)
    left = [node for node in collectives(nodes) if not followed[node.id] and node.id not in updated]
    assert len(left) < run["calls_per_step"]["control"], f"no compute waits for {[node.id for node in left]}"
    assert all(value(node, "comm_size") <= 256 for node in left), f"no compute waits for {[node.id for node in left]}"


def check_calls(nodes, run):
    """As the plan prints them. Control gathers or reduces; its last call, the mean of the losses, follows the step."""
    calls, sent = collections.Counter(), collections.Counter()
    for node in collectives(nodes):
        calls[value(node, "comm_type")] += 1
        sent[value(node, "comm_type")] += value(node, "bytes_sent")
    loss = 8 * (run["mesh"][0] * run["mesh"][1] - 1)  # a double, to every other rank
    for found, wanted, last in ((calls, run["calls_per_step"], 1), (sent, run["wire_bytes_per_step"], loss)):
        control = wanted["control"] - last
        assert found[SCHEMA.REDUCE_SCATTER] == wanted["reduce_scatter"], (found, wanted)
        assert 0 <= found[SCHEMA.ALL_GATHER] - wanted["all_gather"] <= control, (found, wanted)
        assert 0 <= found[SCHEMA.ALL_REDUCE] - wanted["all_reduce"] <= control, (found, wanted)
        assert sum(found.values()) == sum(wanted.values()) - last, (found, wanted)


def check_groups(world):
    """Members of a group list the same group and call the same operations on it, in the same order."""
    calls = {}
    for rank, nodes in enumerate(world):
        mine = groups(nodes)
        for name, members in mine.items():
            assert rank in members, f"rank {rank} is not in its group {name}"
            for other in members:
                assert groups(world[other]).get(name) == members, f"ranks {rank} and {other} list another group {name}"
        order = collections.defaultdict(list)
        for node in collectives(nodes):
            order[value(node, "pg_name")].append((value(node, "comm_type"), value(node, "comm_size")))
        assert set(order) == set(mine), f"rank {rank} calls on {set(order)}, and is in {set(mine)}"
        for name, called in order.items():
            assert calls.setdefault(name, called) == called, f"rank {rank} calls other operations on group {name}"


class ChakraTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def plan(self, *arguments):
        return subprocess.run([TOOL, "plan", *map(str, arguments)], text=True, capture_output=True, timeout=120)

    def write(self, *arguments):
        return subprocess.run([sys.executable, BENCH / "plan_chakra.py", *arguments], text=True, capture_output=True, timeout=120)

    def export(self, strategy, ranks, *more):
        """The run that the plan prints, and the nodes of every rank."""
        target = self.folder / "et"
        subprocess.run(["rm", "-rf", target], check=True)
        done = self.plan("--model", "gpt-nano", "--ranks", ranks, "--strategy", strategy, "--json", self.folder / "p.json", *more)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        done = self.write(self.folder / "p.json", target)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        self.assertEqual({file.name for file in target.iterdir()}, {f"rank.{rank}.et" for rank in range(ranks)} | {"comm_groups.json"})
        world = []
        for rank in range(ranks):
            metadata, nodes = read(target / f"rank.{rank}.et")
            self.assertTrue(metadata.version)
            world.append(nodes)
        return json.loads((self.folder / "p.json").read_text())["runs"][0], world

    def step_by_itself(self, strategy, ranks):
        """Milliseconds until its gathers of updated parameters are done, which a plan hides behind the next forward."""
        done = subprocess.run([TOOL, "explain", "--model", "gpt-nano", "--ranks", str(ranks), "--strategy", strategy, "--global-batch", "16",
                               "--json", self.folder / "explained.json"], text=True, capture_output=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return json.loads((self.folder / "explained.json").read_text())["step_ms"]

    def test_schema_has_the_public_numbers(self):
        for message, fields in FIELDS.items():
            described = SCHEMA.DESCRIPTOR.message_types_by_name[message]
            self.assertEqual({field.name: field.number for field in described.fields}, fields)
        self.assertEqual((SCHEMA.DESCRIPTOR.package, SCHEMA.NodeType, SCHEMA.CollectiveCommType),
                         ("ChakraProtoMsg", TYPES, COLLECTIVES))

    def test_files_describe_the_step(self):
        for strategy, ranks, more in (("ddp", 4, ()), ("zero1", 4, ()), ("zero2", 4, ()), ("fsdp", 4, ("--clip-norm", 1)), ("hsdp", 8, ("--mesh", "2x4")),
                                      ("fsdp", 8, ("--cluster", "h100-400g", "--precision", "bf16", "--accumulate", 2)), ("fsdp", 1, ())):
            with self.subTest(strategy=strategy, ranks=ranks, more=more):
                run, world = self.export(strategy, ranks, "--global-batch", 16, *more)
                step = self.step_by_itself(strategy, ranks) if strategy.startswith("zero") else run["step_ms"]["median"]
                for nodes in world:
                    self.assertAlmostEqual(check_order(nodes) / 1e6, step, places=6)
                    if ranks > 1:
                        check_waits(nodes, run)
                        check_calls(nodes, run)
                    self.assertFalse(any(value(node, "is_cpu_op") for node in nodes))
                check_groups(world)
                self.assertEqual(sum(node.type == SCHEMA.COMM_COLL_NODE for node in world[0]) > 0, ranks > 1)

    def test_groups_of_a_mesh(self):
        _, world = self.export("hsdp", 8, "--mesh", "2x4", "--global-batch", 16)
        members = {tuple(ranks) for nodes in world for ranks in groups(nodes).values()}
        wanted = {(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5), (2, 6), (3, 7)}
        self.assertEqual(members - {tuple(range(8))}, wanted)
        listed = json.loads((self.folder / "et/comm_groups.json").read_text())
        self.assertEqual({name: ranks for nodes in world for name, ranks in groups(nodes).items() if name != "0"}, listed)

    def test_checks_find_what_is_missing(self):
        unseen = []
        for link in ("1ns,1000GB/s", "20us,100MB/s", "1ms,1MB/s"):  # a dependency counts where what it waits for is late
            run, world = self.export("hsdp", 8, "--mesh", "2x4", "--global-batch", 16, "--link", link)
            check_groups(world)
            unseen.append(set())
            for place, node in enumerate(world[0]):
                for i in range(len(node.data_deps)):
                    nodes = copy.deepcopy(world[0])
                    del nodes[place].data_deps[i]
                    try:
                        check_order(nodes)
                        check_waits(nodes, run)
                        unseen[-1].add((node.id, i))
                    except AssertionError:
                        pass
        self.assertEqual(set.intersection(*unseen), set(), "dependencies that the checks don't miss")
        for node in collectives(world[0]):  # without one operation
            nodes = [other for other in world[0] if other.id != node.id]
            with self.assertRaises(AssertionError):
                check_calls(nodes, run)
            with self.assertRaises(AssertionError):
                check_groups([nodes, *world[1:]])
        swapped = copy.deepcopy(world)
        swapped[3][0].inputs.values = world[4][0].inputs.values
        with self.assertRaises(AssertionError):
            check_groups(swapped)

    def test_several_strategies_have_a_folder_each(self):
        done = self.plan("--model", "gpt-nano", "--strategies", "ddp,fsdp", "--json", self.folder / "p.json")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        done = self.write(self.folder / "p.json", self.folder / "a/b")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual({str(file.relative_to(self.folder / "a/b")) for file in (self.folder / "a/b").rglob("*.et")},
                         {f"{strategy}/rank.{rank}.et" for strategy in ("ddp", "fsdp") for rank in range(4)})

    def test_trace_shows_the_transfers(self):
        trace = self.folder / "t.json"
        for strategy, ranks, axes in (("fsdp", 4, {"shard"}), ("hsdp", 4, {"shard", "replicate"})):
            run, world = self.export(strategy, ranks, "--trace", trace, "--global-batch", 16)
            events = json.loads(trace.read_text())["traceEvents"]
            rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
            self.assertLessEqual({"compute", "gather", "reduce"}, set(rows.values()))
            transfers = [event for event in events if event.get("cat") == "transfer"]
            self.assertEqual({event["args"]["axis"] for event in transfers} - {"world"}, axes)
            found = sorted((event["name"], event["args"]["bytes"]) for event in transfers)
            self.assertEqual(found, sorted((node.name, value(node, "bytes_sent")) for node in collectives(world[-1])))
            last = collections.defaultdict(float)
            for event in transfers:
                times = event["args"]
                self.assertLessEqual(times["called"], times["begun"])
                self.assertEqual(event["ts"], times["begun"])
                self.assertAlmostEqual(event["ts"] + event["dur"], times["done"], places=3)
                self.assertTrue(rows[event["tid"]].startswith("transfers " + times["axis"]))
                self.assertGreaterEqual(event["ts"], last[event["tid"]], "transfers of a row overlap")
                last[event["tid"]] = times["done"]

    def test_mistakes_are_one_line(self):
        plan = self.folder / "p.json"
        self.assertEqual(self.plan("--model", "gpt-nano", "--strategy", "fsdp", "--json", plan).returncode, 0)
        (self.folder / "file").write_text("")
        for target, expected in ((self.folder, "is not empty"), (self.folder / "file", "is not a folder"), ("/proc/none/x", "can't be created")):
            done = self.write(plan, target)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
            self.assertIn(expected, done.stderr)
        self.assertEqual(self.plan("--parameters", "7B", "--json", self.folder / "table.json").returncode, 0)
        (self.folder / "list.json").write_text("[1]")
        for source, expected in ((self.folder / "table.json", "has no steps"), (self.folder / "list.json", "has no steps"), (self.folder / "file", "has no steps"),
                                 (self.folder / "none", "No such file"), (self.folder, "Is a directory")):
            done = self.write(source, self.folder / "new")
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
            self.assertIn(expected, done.stderr)
            self.assertFalse((self.folder / "new").exists())
        done = self.write(plan)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        self.assertIn("PLAN.json", done.stderr)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main(verbosity=2)
