"""Comparisons of records that are made by hand: replicas, missing tensors, other numbers of ranks."""

import json

import pytest

from tessera.oracle import RecordError, compare, report

FULL = {"dtype": "f32", "shape": [4, 2]}


def entry(value, **layout):
    return {"hash": f"{value:016x}", "layout": {**FULL, **layout}, "squares": 1.0}


def write(folder, ranks):
    """A record of one step. `ranks` has the gradients of each rank, by name; the parameters are always equal."""
    folder.mkdir()
    for rank, gradients in enumerate(ranks):
        lines = [
            {"tessera_oracle": 1, "rank": rank, "ranks": len(ranks)},
            {"step": 0, "optimizer": 0, "update": 0, "parameters": {"w": entry(1)}, "state": {}},
            {
                "step": 1,
                "optimizer": 0,
                "update": 1,
                "gradients": gradients,
                "parameters": {"w": entry(2)},
                "state": {},
            },
            {"end": True, "complete": True},
        ]
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


@pytest.fixture
def compared(tmp_path):
    def result(a, b):
        return compare(write(tmp_path / "a", a), write(tmp_path / "b", b))

    return result


BIG = (1 << 64) - 5


def shards(*values):
    """2x2 ranks: two replicas of two shards each."""
    return [{"w": entry(value, replica=[index // 2])} for index, value in enumerate(values)]


def test_replicas_of_shards_equal_whole_tensors(compared):
    whole = [{"w": entry(10)}] * 4
    assert compared(whole, shards(BIG, 15, 3, 7)).equal  # hashes add up modulo 2^64


def test_detects_replica_that_differs(compared):
    found = compared([{"w": entry(10)}] * 4, shards(BIG, 15, 3, 8))
    assert not found.equal and found.first.title == "gradient of w"


def test_detects_rank_that_differs(compared):
    found = compared([{"w": entry(10)}] * 4, [{"w": entry(10)}] * 3 + [{"w": entry(11)}])
    assert found.first.ranks == [3]
    assert report(found).startswith("different: step 1, gradient of w [4x2 f32] differs first on rank 3\n")
    assert "gradients are not reduced in B: w differ between its ranks" in report(found)


def test_other_number_of_ranks(compared):
    assert compared([{"w": entry(10)}] * 2, [{"w": entry(10)}] * 4).equal


def test_other_number_of_ranks_detects_difference(compared):
    assert not compared([{"w": entry(10)}] * 2, [{"w": entry(11)}] * 4).equal


def test_missing_gradient(compared):
    found = compared([{"w": entry(10)}] * 2, [{"w": entry(10)}, {}])
    assert report(found).startswith("different: step 1, gradient of w is missing in B on rank 1\n")


def test_gradient_that_both_lack_on_a_rank_is_equal(compared):
    assert compared([{"w": entry(10)}, {}], [{"w": entry(10)}, {}]).equal


@pytest.mark.parametrize(
    "layout, text",
    [({"dtype": "bf16"}, "is f32 in A and bf16 in B"), ({"shape": [8]}, "has shape [4, 2] in A and [8] in B")],
)
def test_other_layout(compared, layout, text):
    found = compared([{"w": entry(10)}], [{"w": entry(10, **layout)}])
    assert text in report(found)


def test_placements_that_cannot_be_compared_are_named(compared):
    found = compared([{"w": entry(10)}], [{"w": entry(10, local="['S(1)']")}])
    assert found.equal
    assert report(found).endswith("not compared, because of their placements: gradient of w")


def test_nothing_to_compare_is_an_error(tmp_path):
    a = write(tmp_path / "a", [{"w": entry(10)}])
    b = write(tmp_path / "b", [{"w": entry(10)}])
    path = tmp_path / "b" / "rank0.jsonl"
    assert compare(a, b).equal
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1:3]:
        line["parameters"]["w"]["layout"]["local"] = "['S(1)']"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RecordError, match="no parameter has placements that can be compared"):
        compare(a, b)
