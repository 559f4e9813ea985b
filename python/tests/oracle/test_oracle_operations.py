"""Recording changes neither the results nor the order of operations, and sees all of them."""

import json
import subprocess
import sys

import pytest
from runs import OPERATIONS, oracle

from tessera.oracle import RecordError, compare
from tessera.oracle.files import read_run

EXPECTED = {
    "all_reduce",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "scatter",
    "gather",
    "all_to_all",
    "barrier",
    "send",
    "recv",
}


@pytest.mark.parametrize("part", ["collectives", "crossing_groups", "threads", "changes_after_wait"])
def test_programs_run_as_without_recording(part, tmp_path):
    code, _, err = oracle("record", "--ranks", 2, "--timeout", 60, "-o", tmp_path, OPERATIONS, part)
    assert code == 0, err
    run = read_run(str(tmp_path))
    operations = [c for step in run.ranks[0].steps for c in step.collectives]
    assert [c["number"] for c in operations] == list(range(1, len(operations) + 1))
    assert not [c for c in operations if "unhashed" in c]
    if part == "collectives":
        assert {c["kind"] for c in operations} == EXPECTED
        assert [c["op"] for c in operations if c["kind"] == "all_reduce"][:2] == ["sum", "max"]
    if part == "threads":
        assert sum(c["kind"] == "all_reduce" for c in operations) == 80
    if part == "changes_after_wait":
        reductions = [c for c in operations if c["kind"] == "all_reduce" and c["count"] == 50_000]
        assert len(reductions) == 50
        # A hash of the zeros that the program writes after its wait would be 0.
        assert {c["outputs"]["hashes"][0] for c in reductions} == {reductions[0]["outputs"]["hashes"][0]}
        assert reductions[0]["outputs"]["hashes"] != ["0" * 16]


def test_parts_of_gathers_are_the_inputs_of_the_ranks(tmp_path):
    code, _, err = oracle("record", "--ranks", 2, "--timeout", 60, "-o", tmp_path, OPERATIONS, "collectives")
    assert code == 0, err
    run = read_run(str(tmp_path))
    for index, mine in enumerate(run.ranks[0].steps[1].collectives):
        other = run.ranks[1].steps[1].collectives[index]
        if mine["kind"] == "all_gather" and len(mine["inputs"]["hashes"]) == 1:
            parts = mine["inputs"]["hashes"] + other["inputs"]["hashes"]
            assert mine["outputs"]["hashes"] == other["outputs"]["hashes"] == parts


def test_failed_operation_raises_in_wait(tmp_path):
    code, out, err = oracle("record", "--ranks", 2, "--timeout", 60, "-o", tmp_path, OPERATIONS, "fails")
    assert code == 2
    assert "wait raises" in out
    assert "rank 0" in err
    with pytest.raises(RecordError, match="rank0.jsonl: "):
        read_run(str(tmp_path))


def test_record_in_a_program(tmp_path):
    """The context manager, without a process group, and the end of recording with it."""
    program = f"""
import torch
from tessera.oracle import record

def train(seed, steps):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        other.step()
    return model, optimizer

backward, wait = torch.autograd.backward, torch.distributed.Work.wait
with record({str(tmp_path / "a")!r}):
    train(1, 2)
train(2, 1)  # not recorded
with record({str(tmp_path / "b")!r}, keep_values=3):
    train(1, 2)
model, optimizer = train(3, 1)
with record({str(tmp_path / "c")!r}, model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
assert torch.autograd.backward is backward and torch.distributed.Work.wait is wait
try:
    with record({str(tmp_path / "d")!r}):
        train(1, 1)
        raise KeyError("stop")
except KeyError:
    pass
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    found = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found.equal and found.compared["parameters"] == 4
    lines = [json.loads(line) for line in open(tmp_path / "b" / "rank0.jsonl", encoding="utf-8")]
    steps = [line for line in lines if "step" in line]
    assert [(s["optimizer"], s["update"]) for s in steps] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    assert len(steps[1]["gradients"]["0.weight"]["values"][1]) == 3
    assert [len(s["backwards"]) for s in steps if s["update"]] == [1, 0, 1, 0]
    only = read_run(str(tmp_path / "c"))
    assert list(only.ranks[0].steps[1].tensors["gradients"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with pytest.raises(RecordError, match="did not end normally"):
        read_run(str(tmp_path / "d"))
