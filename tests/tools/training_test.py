"""train and compare as a user runs them: bitwise equality, counted costs, input and output files, mistakes."""

import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import tempfile
import unittest
import uuid

TOOL = None
TEXT = ("It was a bright cold day in April, and the clocks were striking thirteen. " * 40 + "0123456789 " * 30) * 8


def tool(*arguments, env=None, timeout=100):
    done = subprocess.run([TOOL, *arguments], text=True, capture_output=True, timeout=timeout, env={**os.environ, **(env or {})})
    return done.returncode, done.stdout, done.stderr


def usable_backends():
    _, out, _ = tool("info", "--json")
    return [backend["name"] for backend in json.loads(out)["backends"] if backend["available"]]


def ranks_marked(mark):
    """The pids by rank of the processes that have the mark in their environment."""
    pids = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = [entry.split(b"=")[1] for entry in environment if entry.startswith(b"TESSERA_RANK=")]
        if f"{mark}=1".encode() in environment and rank:
            pids[int(rank[0])] = int(folder.name)
    return pids


def threads_cores(pid):
    return {tuple(sorted(os.sched_getaffinity(int(thread.name)))) for thread in pathlib.Path(f"/proc/{pid}/task").iterdir()}


def cut(k, total):
    """(k-1)/k of a total that k divides."""
    return total * (k - 1) // k


def expected_cost(run, ranks, parameter=4, gradient=4, optimizer=8):
    """The costs by the table of docs/comparison.md, from the units of the run and the bytes per element of each kind."""
    sizes = [unit["elements"] + unit["padding"] for unit in run["units"]]
    units, psi = len(sizes), sum(sizes)
    kept = [size for size, unit in zip(sizes, run["units"]) if unit["kept_after_forward"]]
    replicas, shards = run["mesh"]
    strategy = run["strategy"]
    if strategy == "ddp":
        return (0, 0, units if ranks > 1 else 0), (0, 0, 2 * cut(ranks, gradient * psi)), (parameter + gradient + optimizer) * psi
    if strategy in ("zero1", "zero2"):
        calls = units if ranks > 1 else 0
        whole = parameter + (gradient if strategy == "zero1" else 0)
        state = whole * psi + (parameter + gradient + optimizer - whole) * psi // ranks
        return (calls, calls, 0), (cut(ranks, parameter * psi), cut(ranks, gradient * psi), 0), state
    gathers = (2 * units - len(kept)) if shards > 1 else 0
    calls = (gathers, units if shards > 1 else 0, units if replicas > 1 else 0)
    wire = (cut(shards, parameter * (2 * psi - sum(kept))), cut(shards, gradient * psi), 2 * cut(replicas, gradient * psi) // shards)
    return calls, wire, (parameter + gradient + optimizer) * psi // shards


class TrainingTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.text = self.path("text.txt")
        with open(self.text, "w") as file:
            file.write(TEXT)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def run_tool(self, *arguments, env=None):
        code, out, err = tool(*arguments, "--data", self.text, env=env)
        self.assertEqual(code, 0, (arguments, err))
        return out

    def compare(self, *arguments, env=None, steps=3):
        out = self.run_tool("compare", "--steps", str(steps), "--json", self.path("c.json"), *arguments, env=env)
        with open(self.path("c.json")) as file:
            return json.load(file), out

    def check_costs(self, comparison, **element_bytes):
        for run in comparison["runs"]:
            calls, wire, state = expected_cost(run, comparison["ranks"], **element_bytes)
            names = ("all_gather", "reduce_scatter", "all_reduce")
            self.assertEqual(tuple(run["calls_per_step"][name] for name in names), calls, run["strategy"])
            self.assertEqual(tuple(run["wire_bytes_per_step"][name] for name in names), wire, run["strategy"])
            self.assertEqual(run["wire_bytes_per_step"], run["formula_bytes_per_step"])
            self.assertEqual(sum(run["model_state_bytes"].values()), state, run["strategy"])
            self.assertEqual(run["copied_bytes_per_step"], 0)
            self.assertEqual(sum(unit["elements"] for unit in run["units"]), comparison["parameters"])
            if comparison["ranks"] == 1:
                self.assertEqual(sum(run["calls_per_step"].values()), 0)

    def test_strategies_are_bitwise_equal_at_formula_cost(self):
        for model, ranks in (("gpt-nano", 1), ("gpt-nano", 2), ("llama-nano", 3), ("gpt-nano", 4), ("llama-nano", 5)):
            comparison, out = self.compare("--model", model, "--ranks", str(ranks), "--global-batch", str(2 * ranks))
            names = [run["strategy"] for run in comparison["runs"]]
            odd = ranks in (3, 5)
            self.assertEqual(names, ["ddp", "zero1", "zero2", "fsdp"] + ([] if odd else ["hsdp"]))
            self.assertEqual("left out: hsdp" in out, odd)
            self.assertEqual(len({run["final_parameters_hash"] for run in comparison["runs"]}), 1, model)
            self.assertEqual(len({tuple(run["losses"]) for run in comparison["runs"]}), 1, model)
            self.assertIn("end bitwise equal", out)
            self.check_costs(comparison)

    def test_activation_checkpointing_changes_memory_only(self):
        for model in ("gpt-nano", "llama-nano"):
            arguments = ("--model", model, "--ranks", "2", "--precision", "bf16", "--global-batch", "4")
            plain, _ = self.compare(*arguments)
            checkpointed, out = self.compare(*arguments, "--checkpoint-activations")
            self.assertIn("activations", out)
            for a, b in zip(plain["runs"], checkpointed["runs"], strict=True):
                for same in ("strategy", "losses", "final_parameters_hash", "calls_per_step", "wire_bytes_per_step", "model_state_bytes"):
                    self.assertEqual(a[same], b[same], a["strategy"])
                self.assertLess(b["peak_bytes"]["activation"], a["peak_bytes"]["activation"])
            self.check_costs(checkpointed, parameter=2, gradient=2, optimizer=12)

    def test_bf16_costs_formulas_and_strategies_agree(self):
        for arguments, gradient, alike in ((["--strategies", "ddp,zero1,zero2,fsdp"], 2, 1), (["--reduce-dtype", "f32"], 4, 1), ([], 2, 2)):
            comparison, _ = self.compare("--model", "gpt-nano", "--precision", "bf16", "--clip-norm", "0.5", *arguments)
            # The two stages of hsdp round a bf16 sum twice; f32 sums follow the same tree as in the other strategies.
            self.assertEqual(len({run["final_parameters_hash"] for run in comparison["runs"]}), alike, arguments)
            self.check_costs(comparison, parameter=2, gradient=gradient, optimizer=12)

    def test_microbatches_cost_formulas_and_strategies_agree(self):
        hashes = {}
        for when, alike in (("every", 1), ("last", 1), ("scatter", 3)):
            comparison, _ = self.compare("--model", "gpt-nano", "--accumulate", "3", "--reduce-when", when, "--clip-norm", "0.5")
            # Each microbatch is reduce-scattered, the last one all-reduced: ddp only all-reduces, hsdp does both, the others only scatter.
            hashes[when] = [run["final_parameters_hash"] for run in comparison["runs"]]
            self.assertEqual(len(set(hashes[when])), alike, when)
            for run in comparison["runs"]:
                self.assertEqual(run["wire_bytes_per_step"], run["formula_bytes_per_step"], (when, run["strategy"]))
        whole, _ = self.compare("--model", "gpt-nano", "--clip-norm", "0.5", "--strategies", "fsdp")
        for a, b in zip(whole["runs"][0]["losses"], comparison["runs"][3]["losses"]):
            self.assertAlmostEqual(a, b, delta=3e-5 * a)
        self.assertNotEqual(hashes["every"][0], hashes["last"][0])

    def test_compressed_collectives_cost_formulas(self):
        for backend, ranks in (("shm", 2), ("shm", 3), ("tcp", 4)):
            strategies = "ddp,ddp+int8,ddp+powersgd,zero2+reduce_scatter=int8_feedback,fsdp,fsdp+bf16,fsdp+all_gather=int8"
            comparison, out = self.compare("--model", "gpt-nano", "--ranks", str(ranks), "--backend", backend, "--strategies", strategies)
            names = strategies.split(",")
            runs = {run["strategy"]: run for run in comparison["runs"]}
            self.assertEqual([run["strategy"] for run in comparison["runs"]], names)
            for run in comparison["runs"]:
                self.assertEqual(run["wire_bytes_per_step"], run["formula_bytes_per_step"], run["strategy"])
                saves = sum(run["plain_bytes_per_step"].values()) - sum(run["wire_bytes_per_step"].values())
                self.assertEqual(saves > 0, "+" in run["strategy"], run["strategy"])
                loss = runs["ddp"]["losses"][-1]
                self.assertLess(abs(run["losses"][-1] - loss), 0.05)
            part = [(unit["elements"] + unit["padding"]) // ranks for unit in runs["ddp"]["units"]]
            int8 = sum(count + 4 * -(-count // 256) for count in part) * (ranks - 1)
            self.assertEqual(runs["ddp+int8"]["wire_bytes_per_step"]["all_reduce"], 2 * int8)
            self.assertEqual(runs["zero2+reduce_scatter=int8_feedback"]["wire_bytes_per_step"]["reduce_scatter"], int8)
            self.assertEqual(2 * runs["fsdp+bf16"]["wire_bytes_per_step"]["all_gather"], runs["fsdp"]["wire_bytes_per_step"]["all_gather"])
            self.assertEqual(len({run["final_parameters_hash"] for run in comparison["runs"]}), len(names) - 1)  # ddp and fsdp have the same hash
            self.assertIn("formula", out)
        one, _ = self.compare("--model", "gpt-nano", "--ranks", "2", "--strategies", "fsdp+int8")
        two, out = self.compare("--model", "gpt-nano", "--ranks", "2", "--strategies", "fsdp", "--collectives", "int8")
        self.assertEqual(one["runs"][0]["final_parameters_hash"], two["runs"][0]["final_parameters_hash"])
        _, out = self.compare("--model", "gpt-nano", "--ranks", "2", "--collectives", "int8")
        self.assertEqual(out.count("left out: all_gather by int8: it rounds"), 2, out)  # zero1 and zero2

    def test_sync_period_reduces_cost(self):
        comparison, out = self.compare("--model", "gpt-nano", "--ranks", "4", "--strategies", "ddp,diloco,local_sgd,diloco+int8", "--sync-every", "2",
                                       steps=5)
        ddp, diloco, local_sgd, int8 = comparison["runs"]
        self.assertEqual(diloco["mesh"], [4, 1])
        for run in (diloco, local_sgd):
            self.assertEqual(run["wire_bytes_per_step"]["all_reduce"], ddp["wire_bytes_per_step"]["all_reduce"] // 2)
            self.assertEqual(run["losses"][0], ddp["losses"][0])
        for run in comparison["runs"]:
            self.assertEqual(run["wire_bytes_per_step"], run["formula_bytes_per_step"], run["strategy"])
            self.assertLess(abs(run["losses"][-1] - ddp["losses"][-1]), 0.5)
        # Of six steps the first does not count, and the four after it are two whole periods.
        longer, table = self.compare("--model", "gpt-nano", "--ranks", "4", "--strategies", "ddp,diloco", "--sync-every", "2", steps=6)
        calls = [run["calls_per_step"]["all_reduce"] for run in longer["runs"]]
        self.assertEqual((calls[1], isinstance(calls[0], int), calls[0] % 2), (calls[0] / 2, True, 1))
        self.assertIn(f"{calls[1]} / ", table)
        self.assertEqual(longer["runs"][1]["wire_bytes_per_step"], longer["runs"][1]["formula_bytes_per_step"])
        code, _, err = tool("compare", "--model", "gpt-nano", "--ranks", "2", "--data", self.text, "--why", "ddp,diloco", "--sync-every", "2")
        self.assertEqual((code, err.count("\n"), "no step is like the others; give --sync-every 1" in err), (2, 1, True), err)
        self.assertLess(int8["wire_bytes_per_step"]["all_reduce"], diloco["wire_bytes_per_step"]["all_reduce"] / 3)
        state = 4 * sum(unit["elements"] + unit["padding"] for unit in ddp["units"])
        extra = [run["model_state_bytes"]["optimizer"] - ddp["model_state_bytes"]["optimizer"] for run in (diloco, local_sgd)]
        self.assertEqual(extra, [2 * state, state])
        arguments = ("train", "--model", "gpt-nano", "--ranks", "4", "--strategy", "diloco", "--mesh", "2x2", "--sync-every", "3")
        whole = self.run_tool(*arguments, "--steps", "5").split()[-1]
        self.run_tool(*arguments, "--steps", "2", "--save", self.path("d"))
        self.assertEqual(self.run_tool(*arguments, "--steps", "5", "--resume", self.path("d")).split()[-1], whole)
        self.assertNotEqual(self.run_tool(*arguments, "--steps", "5", "--outer-lr", "0.5").split()[-1], whole)

    def test_plugin_state_is_saved_and_dropping_is_reported(self):
        arguments = ("train", "--model", "gpt-nano", "--global-batch", "4", "--strategy", "ddp+powersgd")
        hashes = []
        for steps in ((["--steps", "4"],), (["--steps", "2", "--save", self.path("s")], ["--steps", "4", "--resume", self.path("s")])):
            for more in steps:
                out = self.run_tool(*arguments, "--ranks", "2", *more)
            hashes.append(out.split()[-1])
        self.assertEqual(hashes[0], hashes[1])
        code, _, err = tool(*arguments, "--ranks", "4", "--steps", "4", "--resume", self.path("s"), "--data", self.text)
        self.assertEqual((code, err.count("\n")), (0, 1), err)
        self.assertIn("starts empty", err)

    def test_wrappings_side_by_side_differ_in_cost_and_not_in_bits(self):
        wraps = ["none", "block", "block;wpe;ln_f", "type:Mlp"]
        comparison, out = self.compare("--model", "gpt-nano", "--ranks", "2", "--strategies", "ddp,fsdp", "--wraps", ",".join(wraps))
        self.assertEqual([(run["strategy"], run["wrap"]) for run in comparison["runs"]], [(s, w) for s in ("ddp", "fsdp") for w in wraps])
        self.assertEqual(len({run["final_parameters_hash"] for run in comparison["runs"]}), 1)
        self.assertEqual([len(run["units"]) for run in comparison["runs"][:4]], [1, 3, 5, 3])
        self.assertEqual([run["calls_per_step"]["all_gather"] for run in comparison["runs"][4:]], [1, 4, 8, 4])
        for run in comparison["runs"]:
            self.assertEqual(run["wire_bytes_per_step"], run["formula_bytes_per_step"], (run["strategy"], run["wrap"]))
        self.assertIn("fsdp block;wpe;ln_f", out)
        self.assertEqual(tool("compare", "--wraps", "block,nothing", "--model", "gpt-nano")[0], 2)
        self.assertEqual(tool("compare", "--wraps", "block", "--wrap", "none", "--model", "gpt-nano")[0], 2)

    def test_prints_cost_of_accumulation_modes_before_run(self):
        arguments = ["train", "--model", "gpt-nano", "--ranks", "2", "--steps", "2", "--global-batch", "8", "--data", self.text]
        code, _, err = tool(*arguments, "--accumulate", "2")
        self.assertEqual(code, 0, err)
        self.assertEqual(err.count("--reduce-when"), 3)
        self.assertIn("2 microbatches a step under fsdp, per rank: --reduce-when every sends", err)
        self.assertEqual(tool(*arguments)[2], "")

    def test_hash_and_table_detect_difference(self):
        one, _ = self.compare("--model", "gpt-nano", "--ranks", "2", "--strategies", "ddp")
        two, _ = self.compare("--model", "gpt-nano", "--ranks", "2", "--strategies", "ddp", "--seed", "1")
        again, _ = self.compare("--model", "gpt-nano", "--ranks", "2", "--strategies", "ddp")
        hashes = [c["runs"][0]["final_parameters_hash"] for c in (one, two, again)]
        self.assertNotEqual(hashes[0], hashes[1])
        self.assertEqual(hashes[0], hashes[2])

    def test_results_are_independent_of_threads(self):
        hashes = set()
        for threads in ("1", "2"):
            comparison, _ = self.compare("--model", "gpt-nano", "--ranks", "2", "--strategies", "ddp,full_shard", "--threads", threads,
                                         "--clip-norm", "0.5")
            self.assertEqual([run["strategy"] for run in comparison["runs"]], ["ddp", "fsdp"])
            hashes |= {run["final_parameters_hash"] for run in comparison["runs"]}
            self.check_costs(comparison)
        self.assertEqual(len(hashes), 1)

    def cores_of_ranks(self, *launcher, ranks, threads, env=None):
        """The cores that every thread of each rank may use, read while they train."""
        mark = f"MARK_{uuid.uuid4().hex}"
        command = [*launcher, "--model", "gpt-nano", "--steps", "1000000", "--ranks", str(ranks), "--data", self.text]
        command += ["--threads", str(threads)] if threads else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, mark: "1", **(env or {})}) as training:
            try:
                training.stdout.readline()  # how much of the text it reads
                self.assertIn("step 1 ", training.stdout.readline())  # by then all threads are running
                return {rank: threads_cores(pid) for rank, pid in ranks_marked(mark).items()}
            finally:
                training.send_signal(signal.SIGTERM)
                training.stdout.read()

    def test_ranks_are_bound_to_cores_where_each_thread_has_one(self):
        allowed = sorted(os.sched_getaffinity(0))
        shares = [allowed[:len(allowed) // 2], allowed[len(allowed) // 2:len(allowed) // 2 * 2]]
        together = {rank: {tuple(allowed)} for rank in (0, 1)}
        apart = {rank: {tuple(share)} for rank, share in enumerate(shares)} if len(allowed) > 1 else together
        train = [TOOL, "train"]
        self.assertEqual(self.cores_of_ranks(*train, ranks=2, threads=1), apart)
        self.assertEqual(self.cores_of_ranks(*train, ranks=2, threads=0), apart)
        self.assertEqual(self.cores_of_ranks(*train, ranks=2, threads=len(allowed)), together)
        self.assertEqual(self.cores_of_ranks(*[TOOL, "run", "--no-tag", "--bind", "none", "-n", "2", "--", *train], ranks=2, threads=1), together)

    def test_a_quota_of_processor_time_counts_as_fewer_cores(self):
        allowed = sorted(os.sched_getaffinity(0))
        mounted = pathlib.Path("/sys/fs/cgroup/cpu" if os.path.exists("/sys/fs/cgroup/cpu") else "/sys/fs/cgroup")
        group = mounted / f"tessera-{uuid.uuid4().hex}"
        if os.geteuid() != 0 or len(allowed) < 2 or not os.access(mounted, os.W_OK):
            self.skipTest("needs root, two cores and a cgroup of its own")
        group.mkdir()
        self.addCleanup(group.rmdir)
        inner = group / "inner"  # the quota of the group above counts
        inner.mkdir()
        self.addCleanup(inner.rmdir)
        enter = ["sh", "-c", f'echo $$ >{inner}/cgroup.procs && exec "$@"', "sh", TOOL, "train"]
        # The file of version 2, where there is none, in a file system of the test's.
        version_2 = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup && echo $QUOTA 100000 >/sys/fs/cgroup/cpu.max && exec "$@"',
                     "sh", TOOL, "train"]
        together = {rank: {tuple(allowed)} for rank in (0, 1)}
        for cores, bound in ((1, False), (1.5, True), (len(allowed), True)):  # 1.5 are rounded up
            quota = int(cores * 100000)
            if (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} 100000")
            for launcher, env in ((enter, {}), (version_2, {"QUOTA": str(quota)})):
                ranks = self.cores_of_ranks(*launcher, ranks=2, threads=0, env=env)
                self.assertEqual(ranks != together, bound, (cores, launcher, ranks))
        ranks = self.cores_of_ranks(*version_2, ranks=2, threads=0, env={"QUOTA": "max"})
        self.assertNotEqual(ranks, together)

    def test_one_rank_and_four_agree(self):
        for optimizer, rate in (("adamw", "1e-3"), ("sgd", "0.1")):
            curves = []
            for ranks in ("1", "4"):
                self.run_tool("train", "--model", "gpt-nano", "--ranks", ranks, "--steps", "20", "--optimizer", optimizer, "--lr", rate,
                              "--json", self.path("t.json"))
                with open(self.path("t.json")) as file:
                    curves.append([json.loads(line) for line in file][:20])
            self.assertLess(curves[1][-1]["loss"], curves[1][0]["loss"] - 0.5)  # the loss decreased
            for one, four in zip(*curves):
                for key in ("loss", "grad_norm"):
                    self.assertLess(abs(one[key] - four[key]), 3e-6 * one[key], (optimizer, key, one["step"]))

    def test_train_prints_a_line_per_step_and_writes_json_lines(self):
        out = self.run_tool("train", "--model", "gpt-nano", "--ranks", "2", "--steps", "3", "--json", self.path("t.json"))
        first, *steps = out.splitlines()[:4]
        self.assertEqual(first, f"{self.text}: trains on the first {len(TEXT) * 9 // 10} of {len(TEXT)} tokens; the last tenth is left for --eval")
        self.assertEqual([line.split()[:2] for line in steps], [["step", "1"], ["step", "2"], ["step", "3"]])
        with open(self.path("t.json")) as file:
            lines = [json.loads(line) for line in file]
        self.assertEqual(set(lines[0]), {"step", "loss", "tokens_per_second", "grad_norm", "learning_rate"})
        self.assertEqual(set(lines[-1]), {"final_parameters_hash", "steps"})

    def test_export_init_and_eval_agree_for_every_world_size(self):
        folder = self.path("exported")
        self.run_tool("train", "--model", "llama-nano", "--ranks", "3", "--steps", "2", "--export", folder)
        losses, hashes = [], set()
        for ranks, strategy in (("1", "ddp"), ("3", "fsdp"), ("4", "zero2")):
            self.run_tool("train", "--init", folder, "--steps", "0", "--eval", self.text, "--ranks", ranks, "--strategy", strategy,
                          "--json", self.path("e.json"))
            with open(self.path("e.json")) as file:
                lines = [json.loads(line) for line in file]
            losses.append(lines[0]["eval_loss"])
            self.assertEqual(lines[0]["tokens"], (len(TEXT) - 1) // 64 * 64)
            hashes.add(lines[1]["final_parameters_hash"])
        self.assertEqual(len(hashes), 1)
        for loss in losses:
            self.assertLess(abs(loss - losses[0]), 1e-6 * losses[0])

    def test_last_tenth_is_not_read(self):
        shared = ("train", "--model", "gpt-nano", "--ranks", "1", "--steps", "3", "--seq-len", "16")
        ends = []
        for tail in ("a", "b"):
            for share in (0.1, 0.5):
                size = len(TEXT) - int(share * len(TEXT))
                with open(self.text, "w") as file:
                    file.write(TEXT[:size] + tail * (len(TEXT) - size))
                ends.append(self.run_tool(*shared, "--global-batch", "64").split()[-1])
        self.assertEqual(ends[0], ends[2])
        self.assertNotEqual(ends[1], ends[3], "the control: more than a tenth")
        self.assertIn("never reads their last tenth", " ".join(tool("train", "--help")[1].split()))

    def test_default_batch_fits_the_ranks(self):
        for ranks, accumulate in (("5", "1"), ("7", "1"), ("2", "5")):
            self.run_tool("train", "--model", "gpt-nano", "--ranks", ranks, "--accumulate", accumulate, "--steps", "1", "--seq-len", "8")
        for ranks, batch in ((4, 12), (8, 16), (9, 18), (16, 16)):
            for command in (["plan", "--strategies", "fsdp"], ["explain"]):
                code, _, err = tool(*command, "--model", "gpt-nano", "--ranks", str(ranks), "--json", self.path("d.json"))
                self.assertEqual(code, 0, err)
            tool("plan", "--model", "gpt-nano", "--ranks", str(ranks), "--strategies", "fsdp", "--json", self.path("d.json"))
            with open(self.path("d.json")) as file:
                run = json.load(file)["runs"][0]
            self.assertAlmostEqual(run["tokens_per_second"] * run["step_ms"]["median"] / 1e3 / 64, batch, delta=0.01)

    def test_weight_decay_defaults_are_those_of_pytorch(self):
        shared = ("train", "--model", "gpt-nano", "--ranks", "1", "--steps", "3", "--seq-len", "16", "--lr", "0.1")
        def end(*options):
            return self.run_tool(*shared, *options).split()[-1]
        for optimizer, default, other in (("adamw", "0.01", "0"), ("adam", "0", "0.01"), ("sgd", "0", "0.01")):
            plain = end("--optimizer", optimizer)
            self.assertEqual(plain, end("--optimizer", optimizer, "--weight-decay", default))
            self.assertNotEqual(plain, end("--optimizer", optimizer, "--weight-decay", other))

    def test_text_is_refused_where_the_model_has_a_tokenizer(self):
        model, ids = self.path("model"), self.path("ids")
        self.run_tool("train", "--model", "gpt-nano", "--ranks", "1", "--steps", "0", "--export", model)
        with open(ids, "wb") as file:
            file.write(b"".join((i * 37 % 256).to_bytes(2, "little") for i in range(1000)))
        train = ("train", "--init", model, "--ranks", "1", "--steps", "1", "--seq-len", "16")
        self.run_tool(*train)  # the control: its tokens are bytes
        with open(os.path.join(model, "tokenizer.json"), "w") as file:
            file.write("{}")
        for data in (("--data", self.text), ("--data", ids)):
            code, out, err = tool(*train, *data)
            self.assertEqual((code, err.count("\n")), (2, 1), out + err)
            self.assertIn("are those of its tokenizer; write the ids", err)
        code, _, err = tool(*train, "--data", ids, "--data-format", "u16")
        self.assertEqual(code, 0, err)

    def test_f16_refuses_what_it_cannot_hold(self):
        model = self.path("model")
        self.run_tool("train", "--model", "gpt-nano", "--ranks", "1", "--steps", "0", "--export", model)
        file = pathlib.Path(model) / "model.safetensors"
        data = bytearray(file.read_bytes())
        length = struct.unpack("<Q", data[:8])[0]
        begin = json.loads(data[8:8 + length])["h.1.ln_1.weight"]["data_offsets"][0]
        train = ("train", "--init", model, "--ranks", "2", "--steps", "1", "--precision", "f16", "--data", self.text)
        for value, code in ((65504.0, 0), (70000.0, 2), (float("nan"), 2)):
            data[8 + length + begin:8 + length + begin + 4] = struct.pack("<f", value)
            file.write_bytes(data)
            got, out, err = tool(*train)
            self.assertEqual(got, code, out + err)
            if code:
                self.assertEqual(err.count("\n"), 1, err)
                self.assertIn("'h.1.ln_1.weight' has the value", err)
                self.assertIn("--precision bf16", err)
        got, out, err = tool(*train[:-3], "f32", *train[-2:])
        self.assertIn("grad_norm nan", out)
        self.assertNotIn("-nan", out)

    def test_compare_evaluates_as_train_does(self):
        shared = ("--model", "gpt-nano", "--ranks", "2", "--eval", self.text)
        comparison, out = self.compare(*shared)
        figures = [(run["eval_loss"], run["eval_tokens"]) for run in comparison["runs"]]
        self.assertEqual(figures, [figures[0]] * 5)
        self.run_tool("train", *shared, "--steps", "3", "--json", self.path("e.json"), env={"TESSERA_PRODUCTS": "own"})
        with open(self.path("e.json")) as file:
            line = [json.loads(line) for line in file][3]
        self.assertEqual((line["eval_loss"], line["tokens"]), figures[0])
        self.assertIn("eval loss", out)
        self.assertEqual(out.count(f"{figures[0][0]:.6f}"), 5, out)
        other, out = self.compare(*shared, "--strategy", "ddp", "--seed", "1")  # the negative control
        self.assertNotEqual(other["runs"][0]["eval_loss"], figures[0][0])
        without, out = self.compare("--model", "gpt-nano", "--ranks", "2", "--strategy", "ddp")
        self.assertNotIn("eval_loss", without["runs"][0])
        self.assertNotIn("eval loss", out)

    def test_warns_that_offload_on_cpu_has_no_effect(self):
        arguments = ["train", "--model", "gpt-nano", "--ranks", "2", "--steps", "2", "--global-batch", "4", "--data", self.text]
        plain, offloaded = tool(*arguments), tool(*arguments, "--cpu-offload", "--strategy", "ddp")
        self.assertEqual((plain[0], offloaded[0]), (0, 0), offloaded[2])
        self.assertEqual(offloaded[1].split()[-1], plain[1].split()[-1])
        self.assertEqual(offloaded[2].strip(), "tessera: --cpu-offload does nothing with --device cpu: it already uses host memory")
        self.assertEqual(plain[2], "")

    def test_says_which_options_do_nothing(self):
        arguments = ["train", "--model", "gpt-nano", "--ranks", "2", "--steps", "1", "--global-batch", "4", "--seq-len", "16", "--data", self.text]
        cases = [(("--strategy", "ddp"), ("--mesh", "2x1")), (("--strategy", "fsdp"), ("--mesh", "3x5")), (("--strategy", "ddp"), ("--prefetch", "5")),
                 (("--strategy", "ddp"), ("--limit-all-gathers", "3")), (("--strategy", "zero1"), ("--reshard-after-forward", "false")),
                 (("--optimizer", "sgd"), ("--betas", "0.1,0.2")), (("--optimizer", "sgd"), ("--eps", "1e-3"))]
        for with_what, option in cases:
            code, _, err = tool(*arguments, *with_what, *option)
            self.assertEqual(code, 0, err)
            self.assertRegex(err, rf"^tessera: {option[0]} does nothing with {' '.join(with_what)}.*\n$")
        for used in (("--strategy", "fsdp", "--prefetch", "2", "--limit-all-gathers", "3"), ("--strategy", "hsdp", "--mesh", "2x1"), ("--betas", "0.8,0.9")):
            self.assertEqual(tool(*arguments, *used)[::2], (0, ""))  # the control

    def test_compare_accepts_options_of_train(self):
        def options_of(command):
            _, out, _ = tool(command, "--help")
            return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", out))
        of_one_run = {"--export", "--export-adapter", "--save", "--save-every", "--keep-last", "--resume", "--log-csv"}
        self.assertEqual(options_of("train") - of_one_run - options_of("compare"), set())
        self.assertEqual(options_of("compare") & of_one_run, set())
        for option in sorted(of_one_run):
            code, _, err = tool("compare", option, self.path("x"), "--data", self.text)
            self.assertEqual((code, err.count("\n")), (2, 1), err)
            self.assertIn(option, err)

    def test_compare_names_backend(self):
        arguments = ("--model", "gpt-nano", "--ranks", "2", "--strategies", "ddp")
        for backend in usable_backends():
            comparison, out = self.compare(*arguments, env={"TESSERA_BACKEND": backend})
            self.assertEqual(comparison["backend"], backend)
            self.assertIn(f"over {backend},", out)
            comparison, _ = self.compare(*arguments, "--backend", "shm", env={"TESSERA_BACKEND": backend})
            self.assertEqual(comparison["backend"], "shm")

    def test_trace_has_every_rank_and_kind(self):
        self.run_tool("train", "--model", "gpt-nano", "--ranks", "2", "--steps", "2", "--trace", self.path("trace.json"))
        with open(self.path("trace.json")) as file:
            events = json.load(file)["traceEvents"]
        self.assertEqual({event["pid"] for event in events}, {0, 1})
        kinds = {event["cat"] for event in events if event["ph"] != "M"}
        self.assertEqual(kinds, {"unshard_issue", "unshard_wait", "forward", "backward", "reshard", "reduce_issue", "reduce_wait", "optimizer_step"})

    def test_compare_writes_a_report_and_one_trace_per_strategy(self):
        self.run_tool("compare", "--model", "gpt-nano", "--ranks", "2", "--steps", "2", "--strategies", "ddp,fsdp", "--report", self.path("r.html"),
                      "--trace", self.path("t"))
        with open(self.path("r.html")) as file:
            self.assertIn("fsdp", file.read())
        for strategy in ("ddp", "fsdp"):
            with open(self.path(f"t.{strategy}.json")) as file:
                json.load(file)

    def test_invalid_usage_is_one_line_and_code_2(self):
        empty, short, torn = self.path("empty"), self.path("short"), self.path("torn")
        open(empty, "w").close()
        with open(short, "w") as file:
            file.write("short")
        os.mkdir(torn)
        with open(os.path.join(torn, "config.json"), "w") as file:
            json.dump({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 256, "n_positions": 16}, file)
        with open(os.path.join(torn, "model.safetensors"), "wb") as file:
            file.write((1 << 62).to_bytes(8, "little") + b"{}")
        cases = [
            (["compare", "--model", "gpt-huge"], "gpt-nano"),
            (["compare", "--strategies", "ddp,fdsp"], "zero1"),
            (["train", "--strategy", "fdsp"], "fsdp"),
            (["train", "--strategy", "fsdp+int9"], "powersgd"),
            (["train", "--sync-every", "4"], "diloco"),
            (["compare", "--outer-lr", "1"], "diloco"),
            (["train", "--strategy", "diloco", "--outer-momentum", "1"], "momentum"),
            (["train", "--strategy", "diloco", "--outer-lr", "0"], "the rate must be above 0"),
            (["train", "--strategy", "diloco", "--precision", "f16"], "skip different steps"),
            (["train", "--collectives", "gather=int8"], "all_gather"),
            (["train", "--collectives", "all_gather=powersgd"], "known: bf16"),
            (["train", "--strategy", "zero1+int8"], "all_gather by int8: it rounds"),
            (["train", "--strategy", "hsdp+powersgd"], "all_reduce by powersgd: needs whole flat parameters"),
            (["train", "--strategy", "ddp+powersgd", "--precision", "bf16"], "only f32"),
            (["compare", "--collectives", "all_gather=powersgd"], "known: bf16"),
            (["train", "--backend", "carrier-pigeon"], "shm"),
            (["train", "--ranks", "5", "--global-batch", "12"], "multiple of 5"),
            (["train", "--data", "/no/such/file"], "/no/such/file"),
            (["train", "--data", empty], "empty"),
            (["train", "--data", short], "257"),
            (["train", "--json", "/no/such/folder/x.json"], "/no/such/folder"),
            (["compare", "--report", "/no/such/folder/x.html"], "/no/such/folder"),
            (["compare", "--strategies", "hsdp", "--ranks", "3"], "--mesh"),
            (["train", "--strategy", "hsdp", "--mesh", "3x3"], "9 positions"),
            (["train", "--strategy", "hsdp", "--mesh", "3y3"], "--mesh '3y3'"),
            (["train", "--wrap", "no.such.module"], "no.such.module"),
            (["train", "--wrap", "size:0"], "--wrap size:N"),
            (["train", "--seq-len", "100000"], "context"),
            (["train", "--lr", "0"], "--lr"),
            (["train", "--betas", "0.9,1.5"], "beta"),
            (["train", "--init", self.path("nothing")], "nothing"),
            (["train", "--init", torn], "model.safetensors"),
            (["train", "--reduce-when", "last"], "--accumulate"),
            (["train", "--accumulate", "5", "--global-batch", "12"], "5 microbatches"),
            (["train", "--accumulate", "0"], "--accumulate"),
            (["train", "--norm-type", "4"], "--norm-type"),
            (["compare", "--norm-type", "inf"], "give --clip-norm too"),
            (["train", "--backward-prefetch", "post", "--prefetch", "0"], "leave one of the two out"),
            (["train", "--graphs"], "device cpu has no graphs; use --device cuda"),
            (["compare", "--graphs"], "device cpu has no graphs; use --device cuda"),
            (["train", "--precision", "int8"], "--precision"),
            (["train", "--reduce-dtype", "bf16"], "--reduce-dtype"),
        ]
        for arguments, hint in cases:
            data = [] if "--data" in arguments else ["--data", self.text]
            code, out, err = tool(*arguments, *data)
            self.assertEqual((code, err.count("\n")), (2, 1), (arguments, out, err))
            self.assertIn(hint, err)
            self.assertLess(len(err), 500, err)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
