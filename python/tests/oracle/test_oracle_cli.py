"""The command line: its forms, errors and exit codes."""

import json
import os
import re
import time

import pytest
from runs import PLANTED, oracle

TRAINING = """
import os, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ.get("LR", "0.1")))
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    if "double" in sys.argv and step == 1:
        model.weight.grad *= 2
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


def test_two_scripts(tmp_path, script):
    other = tmp_path / "other.py"
    other.write_text(TRAINING.replace("ones(1, 3)", "zeros(1, 3)"))
    code, out, err = oracle(script, script)
    assert (code, err.count("run ")) == (0, 2), err
    assert out.startswith("equal: 2 steps of 1 rank; at each step 2 gradients, 2 parameters, 0 optimizer tensors\n")
    code, out, _ = oracle(script, other)
    assert code == 1
    assert out.startswith("different: step 1, gradient of weight [2x3 f32] differs first\n")


def test_one_script_with_two_configurations(script, tmp_path):
    code, out, _ = oracle(script, "--b", "double", "--keep-values", 2, "-o", tmp_path / "out")
    assert code == 1
    assert out.startswith("different: step 2, gradient of weight [2x3 f32] differs first\n")
    assert "in B 2 times those in A" in out
    assert "values       of the first 2 elements: the difference is at most 1, 1 in the mean" in out
    assert (tmp_path / "out" / "a" / "rank0.jsonl").exists() and (tmp_path / "out" / "b" / "rank0.log").exists()
    code, out, _ = oracle(script, "--env-a", "LR=0.1", "--env-b", "LR=0.3")
    assert code == 1
    assert "lr of group 0 is 0.1 in A and 0.3 in B" in out


def test_record_and_compare(script, tmp_path):
    assert oracle("record", "-o", tmp_path / "a", script)[0] == 0
    assert oracle("record", "-o", tmp_path / "b", script, "double")[0] == 0
    assert oracle("compare", tmp_path / "a", tmp_path / "a")[0] == 0
    code, out, _ = oracle("compare", tmp_path / "a", tmp_path / "b")
    assert code == 1 and "step 2" in out


def test_a_launchers_process_records_itself(script, tmp_path):
    for rank in range(2):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2"}
        assert oracle("record", "-o", tmp_path / "a", script, environment=environment)[0] == 0
    assert oracle("compare", tmp_path / "a", tmp_path / "a")[0] == 0
    header = json.loads((tmp_path / "a" / "rank1.jsonl").read_text().splitlines()[0])
    assert (header["rank"], header["ranks"]) == (1, 2)
    (tmp_path / "a" / "rank0.jsonl").unlink()
    code, _, err = oracle("compare", tmp_path / "a", tmp_path / "a")
    assert code == 2 and "it has ranks [1] of 2" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "required: A.py"),
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--ranks", "0", "x.py"], "'0' is not a number of at least 1"),
        (["--env-a", "LR", "x.py"], "'LR' is not NAME=VALUE"),
        (["--timeout", "-1", "x.py"], "'-1' is not a positive number of seconds"),
        (["record", "x.py"], "required: -o/--output"),
        (["record", "-o", "/tmp/none"], "the script is missing"),
        (["compare", "/nowhere", "/nowhere"], "/nowhere: not a record: No such file or directory"),
        (["compare", "a"], "required: DIR_B"),
    ],
)
def test_usage_errors(arguments, message):
    code, out, err = oracle(*arguments)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1, err


@pytest.mark.parametrize("command", [[], ["record"], ["compare"]])
def test_help(command):
    code, out, _ = oracle(*command, "--help")
    assert code == 0 and "exit codes: 0 the trainings are equal" in out


def test_failed_run(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text(TRAINING + "raise ValueError('this one fails')\n")
    code, out, err = oracle(path)
    assert (code, out) == (2, "")
    assert re.search(r"rank 0 of \S+/a ended with code 1; the end of its output:", err)
    assert "ValueError: this one fails" in err


def test_run_without_steps(tmp_path):
    path = tmp_path / "nothing.py"
    path.write_text("import sys\nsys.exit(0)\n")
    code, _, err = oracle(path)
    assert code == 2 and "no optimizer made a step" in err


def test_failed_rank_ends_the_others(tmp_path):
    path = tmp_path / "uneven.py"
    path.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(300)\n")
    begin = time.monotonic()
    code, _, err = oracle(path, "--ranks", 2, limit=60)
    assert code == 2 and "rank 1" in err and "ended with code 7" in err
    assert time.monotonic() - begin < 50


def test_timeout(tmp_path):
    path = tmp_path / "sleeps.py"
    path.write_text("import time\ntime.sleep(300)\n")
    code, _, err = oracle(path, "--timeout", 3, limit=60)
    assert code == 2 and "ranks [0]" in err and "did not end within 3 s" in err


def test_termination_ends_the_ranks(tmp_path):
    path = tmp_path / "sleeps.py"
    path.write_text(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)\n")
    with pytest.raises(AssertionError, match="did not end within 12 s"):
        oracle(path, limit=12)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_end_of_a_script_is_as_without_recording(tmp_path):
    path = tmp_path / "ends.py"
    path.write_text(TRAINING + f"""
import atexit, threading, time
atexit.register(lambda: print("at exit"))
file = open({str(tmp_path / "file")!r}, "w")
file.write("not flushed")
threading.Thread(target=lambda: (time.sleep(0.5), print("thread"))).start()
""")
    code, out, err = oracle("record", "-o", tmp_path / "a", path)
    assert (code, out) == (0, "thread\nat exit\n"), err
    assert (tmp_path / "file").read_text() == "not flushed"
    for ending, shown in (("3", ""), ("'a reason'", "a reason")):
        path.write_text(f"{TRAINING}\nsys.exit({ending})\n")
        code, _, err = oracle("record", "-o", tmp_path / "a", path)
        assert code == 2 and shown in err and f"ended with code {ending if ending == '3' else '1'}" in err


def test_damaged_record(script, tmp_path):
    assert oracle("record", "-o", tmp_path / "a", script)[0] == 0
    record = tmp_path / "a" / "rank0.jsonl"
    whole = record.read_text()
    for text, message in (
        (whole[: len(whole) // 2], "not a record"),
        ("\n".join(whole.splitlines()[:-1]) + "\n", "the run did not end normally"),
        (whole.replace('"tessera_oracle":1', '"tessera_oracle":99'), "format 99 is not 1"),
    ):
        record.write_text(text)
        code, _, err = oracle("compare", tmp_path / "a", tmp_path / "a")
        assert code == 2 and message in err and err.count("\n") == 1, err


def test_ranks_are_started_with_the_script(tmp_path):
    code, out, err = oracle(PLANTED, "--ranks", 2, "--a=--steps 1", "--b", "--steps 1 --strategy fsdp2", "-o", tmp_path)
    assert code == 0, out + err
    assert out.startswith("equal: 1 step of 2 ranks")
