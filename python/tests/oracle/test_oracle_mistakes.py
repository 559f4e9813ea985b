"""Ten planted mistakes are found by step 2, and equal trainings are equal."""

import os
import re

import pytest

from runs import PLANTED, oracle

from tessera.oracle import compare, report

RUNS = int(os.environ.get("TESSERA_ORACLE_RUNS", "10"))  # of the test for false alarms

# mistake, arguments of both runs, the step and tensor that must be named, what the report must say
MISTAKES = [
    ("extra_step", "", 2, "gradient of inner.weight", r"an extra optimizer step in B: .*A has 3 steps in all, B 4"),
    (
        "avg_for_sum",
        "--strategy plain --bucket",
        2,
        "gradient of inner.weight",
        r"all_reduce #2 \(sum, 83 f32, ranks 0-1\) in A is all_reduce #2 \(avg, .*another reduction: .*sum in A and avg in B",
    ),
    (
        "divided_sum",
        "--strategy plain --bucket",
        2,
        "gradient of inner.weight",
        r"0.5 times those in A, the number of ranks being 2: B uses AVG where A sums",
    ),
    (
        "skipped_all_reduce",
        "--strategy plain",
        2,
        "gradient of outer.weight",
        r"by no operation in B.*a skipped all_reduce in B: at step 2 rank 0 issues 4 in A and 3 in B",
    ),
    (
        "left_out",
        "--strategy plain --bucket",
        1,
        "gradient of inner.bias",
        r"a parameter, inner.bias, is left out of a bucket in B: .*83 elements in A and 75 in B",
    ),
    (
        "wrong_divisor",
        "--strategy plain --uneven",
        2,
        "gradient of inner.weight",
        r"a wrong divisor for uneven batches: .*\(1.33333 on rank 0, 0.8 on rank 1\)",
    ),
    ("changed_seed", "", 0, "parameter inner.weight", r"a changed seed"),
    (
        "stale_gather",
        "--strategy sharded",
        2,
        "gradient of shard",
        r"a stale gather: all_gather #3 in B gathers the values of all_gather #1 again",
    ),
    ("skipped_gather", "--strategy sharded", 2, "gradient of shard", r"a skipped all_gather in B.*: stale values"),
    (
        "swapped_ranks",
        "--strategy sharded",
        2,
        "gradient of shard",
        r"a swapped order of ranks: the parts of the inputs of reduce_scatter #4 in B are the parts \[1, 0\] of A",
    ),
    ("bf16_reduction", "", 1, "gradient of inner.weight", r"a reduction in another dtype: .*f32 in A and bf16 in B"),
    (
        "lost_microbatch",
        "",
        2,
        "gradient of inner.weight",
        r"a lost microbatch in B.*A makes 2 backward passes and B 1",
    ),
    (
        "missed_no_sync",
        "",
        2,
        "gradient of inner.weight",
        r"reduced in each of 2 backward passes in B and only in the last in A: no_sync\(\)",
    ),
    (
        "changed_parameter",
        "",
        2,
        "gradient of inner.weight",
        r"parameters changed outside the optimizer in B: .*before step 2 .*, inner.weight on rank 0",
    ),
    (
        "wrong_scale",
        "--strategy fsdp2",
        2,
        "gradient of outer.weight",  # the first that is reduced in the backward pass
        r"reduce_scatter #15 .*0.666667 times those in A: a wrong divisor",
    ),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The record of a run, by its arguments. A run without a mistake serves several tests."""
    folder = tmp_path_factory.mktemp("records")
    known = {}

    def record(arguments):
        if arguments not in known:
            directory = str(folder / str(len(known)))
            code, _, err = oracle("record", "--ranks", 2, "-o", directory, PLANTED, *arguments.split())
            assert code == 0, err
            known[arguments] = directory
        return known[arguments]

    return record


@pytest.mark.parametrize("mistake, arguments, step, tensor, cause", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_finds_mistake(recorded, mistake, arguments, step, tensor, cause):
    found = compare(recorded(arguments), recorded(f"{arguments} --mistake {mistake}"))
    text = report(found)
    assert not found.equal
    assert re.match(rf"different: step {step}, {re.escape(tensor)} ", text), text
    assert re.search(cause, text, re.DOTALL), text
    # The other way round it is found at the same place.
    turned = compare(recorded(f"{arguments} --mistake {mistake}"), recorded(arguments))
    assert (turned.number, turned.first.title) == (found.number, found.first.title)


def test_another_dropout_seed_is_no_factor(recorded):
    """Losses and norms of gradients change a little, by a factor for each rank; the elements don't."""
    base = "--strategy plain --mistake dropout_seed"
    text = report(compare(recorded(base), recorded(f"{base} --dropout-seed 7")))
    assert "divisor" not in text, text
    assert "a changed seed" in text, text


def test_ddp_equals_fsdp2(recorded):
    found = compare(recorded(""), recorded("--strategy fsdp2"))
    assert found.equal, report(found)
    assert found.compared == {"gradients": 4, "parameters": 4, "state": 12}
    assert "the runs use different operations between ranks" in report(found)


def test_ddp_against_fsdp2_detects_mistake(recorded):
    found = compare(recorded(""), recorded("--strategy fsdp2 --mistake wrong_scale"))
    assert (found.number, found.first.title) == (2, "gradient of inner.weight")
    assert re.search(r"all_reduce #7 .* in A, reduce_scatter #16 .* in B", report(found))


def test_changed_learning_rate_is_named(recorded):
    found = compare(recorded(""), recorded("--lr 0.02"))
    assert (found.number, found.first.title) == (1, "parameter inner.weight")
    assert "lr of group 0 is 0.01 in A and 0.02 in B" in report(found)


def test_fewer_steps_are_a_difference(recorded):
    found = compare(recorded(""), recorded("--steps 2"))
    assert not found.equal and found.first is None
    assert "A makes 1 step more than B; all steps that both make are equal" in report(found)


@pytest.mark.parametrize("arguments", ["", "--strategy fsdp2", "--strategy plain", "--strategy sharded"])
def test_no_false_alarm(recorded, arguments, tmp_path):
    first = recorded(arguments)
    for _ in range(max(1, RUNS // 4)):
        code, _, err = oracle("record", "--ranks", 2, "-o", tmp_path, PLANTED, *arguments.split())
        assert code == 0, err
        found = compare(first, str(tmp_path))
        assert found.equal, report(found)
        assert "operations of each rank are equal, too" in report(found), report(found)
