"""tessera plan --model: simulated steps against real runs, hand-computed ones and each other.

    plan_model_test.py TOOL
"""

import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

from report_test import Page, draw

TOOL = None
TALL = ("--model", "gpt-tall", "--ranks", 4)
SAME = ("calls_per_step", "wire_bytes_per_step", "model_state_bytes", "copied_bytes_per_step", "units")


def tool(*arguments, timeout=300):
    done = subprocess.run([TOOL, *map(str, arguments)], text=True, capture_output=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


class PlanModelTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.text = self.folder / "text"
        self.text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 60)

    def plan(self, *arguments):
        out = self.folder / "plan.json"
        code, text, err = tool("plan", *arguments, "--json", out)
        self.assertEqual((code, err), (0, ""), arguments)
        self.shown = text
        return json.loads(out.read_text())

    def runs(self, *arguments):
        return {(run["strategy"], run.get("wrap", "")): run for run in self.plan(*arguments)["runs"]}

    def steps(self, *arguments):
        return {name: round(run["step_ms"]["median"], 3) for (name, _), run in self.runs(*arguments).items()}

    def wrong(self, hint, *arguments):
        code, out, err = tool("plan", *arguments)
        self.assertEqual((code, out, err.count("\n")), (2, "", 1), (arguments, out, err))
        self.assertIn(hint, err)

    def test_calls_bytes_and_memory_are_those_of_a_real_run(self):
        for options in ((), ("--precision", "bf16", "--reduce-dtype", "f32"), ("--accumulate", 3, "--reduce-when", "last", "--clip-norm", 1, "--recompute", "activation,norm"),
                        ("--checkpoint-activations", "--prefetch", 2, "--reshard-after-forward", "true"),
                        ("--optimizer", "sgd", "--momentum", 0.9, "--collectives", "int8", "--strategies", "ddp,fsdp")):
            shared = ("--model", "gpt-nano", "--ranks", 4, "--seq-len", 32, *options)
            planned = self.plan(*shared)["runs"]
            code, _, err = tool("compare", *shared, "--data", self.text, "--steps", 3, "--json", self.folder / "real.json")
            self.assertEqual(code, 0, err)
            real = json.loads((self.folder / "real.json").read_text())["runs"]
            self.assertEqual([run["strategy"] for run in planned], [run["strategy"] for run in real])
            for ours, theirs in zip(planned, real):
                for key in SAME:
                    self.assertEqual(ours[key], theirs[key], (ours["strategy"], key, options))
                # The backend's own memory is not simulated.
                for kind in set(theirs["peak_bytes"]) - {"communication", "total", "reserved"}:
                    self.assertEqual(ours["peak_bytes"][kind], theirs["peak_bytes"][kind], (ours["strategy"], kind, options))
                real_total, backend = theirs["peak_bytes"]["total"], theirs["peak_bytes"]["communication"]
                self.assertTrue(real_total - backend <= ours["peak_bytes"]["total"] <= real_total, (ours["strategy"], options))
                self.assertEqual(sum(ours["bytes_at_peak"].values()), ours["peak_bytes"]["total"])
            # The control: with another number of ranks other bytes are sent.
            other = self.plan("--model", "gpt-nano", "--ranks", 2, "--seq-len", 32, *options)["runs"]
            self.assertNotEqual(other[0]["wire_bytes_per_step"], real[0]["wire_bytes_per_step"])

    def test_activations_on_a_gpu_are_those_of_its_kernels(self):
        # A block keeps ln_1's input and the sum after attention, qkv (3 rows), attention's output and the hidden layer (4): 10 rows of the width,
        # as llm.c's lists them with recompute=2; beside them the logits, in rows of a multiple of 128, that their gradient overwrites.
        tokens, width, layers = 16 * 1024, 768, 12
        row, logits, statistics = 2 * tokens * width, 2 * tokens * 50304, 4 * tokens * (2 * 2 + 12)
        one, = self.plan("--model", "gpt2", "--ranks", 1, "--strategies", "ddp", "--precision", "bf16", "--global-batch", 16, "--seq-len", 1024,
                         "--recompute", "activation,norm", "--cluster", "h100-400g")["runs"]
        activation = one["peak_bytes"]["activation"]
        self.assertGreater(activation, 10 * layers * row + logits)
        self.assertLess(activation, (10 * layers + 6) * row + logits + layers * statistics)
        host = self.plan("--model", "gpt2", "--ranks", 1, "--strategies", "ddp", "--precision", "bf16", "--global-batch", 16, "--seq-len", 1024,
                         "--recompute", "activation,norm", "--link", "10us,1GB/s", "--machine", "1TFLOP/s,10GB/s")["runs"][0]
        self.assertGreater(host["peak_bytes"]["activation"], activation + logits, "the control: f32 copies of the logits")

    def test_attention_of_a_gpu_is_that_of_the_environment(self):
        # So many heads on so few elements that the peak is in the backward of attention.
        model = {"model_type": "gpt2", "n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 1024, "vocab_size": 256, "attn_pdrop": 0.0}
        options = ("--model", self.folder, "--ranks", 1, "--strategies", "ddp", "--precision", "bf16", "--global-batch", 8, "--seq-len", 1024, "--cluster", "h100-400g")

        def activations(choice, **more):
            (self.folder / "config.json").write_text(json.dumps(model | more))
            with unittest.mock.patch.dict(os.environ, TESSERA_ATTENTION=choice):
                return self.plan(*options)["runs"][0]["peak_bytes"]["activation"]

        rows = 8 * 8 * 1024
        gradient_of_scores, own = rows * 1024 * 2 + rows * 4, rows * (2 + 64) * 4 + rows // 64 * 4 + 64
        self.assertEqual(activations("auto") - activations("own"), gradient_of_scores - own)
        self.assertEqual(activations("cudnn"), activations("auto"))
        self.assertEqual(activations("auto", attn_pdrop=0.1), activations("own", attn_pdrop=0.1), "cuDNN computes no dropout here")
        with unittest.mock.patch.dict(os.environ, TESSERA_ATTENTION="some"):
            self.wrong("TESSERA_ATTENTION", *options)

    def test_machine_of_a_cluster_computes_over_the_given_link(self):
        file = self.folder / "machine.json"
        tool("plan", "--cluster", "laptop", "--json", file)
        options = (*TALL, "--strategies", "ddp,fsdp", "--link", "20us,20MB/s", "--machine")
        named = self.steps(*options, "laptop")
        self.assertEqual(self.steps(*options, file), named)
        cluster = json.loads(file.read_text())
        cluster["measured"] = {"all_reduce": {"ranks": 4, "points": [[8, 1e6]]}}  # not of this link: no effect
        cluster["communicators"] = [{"ranks": 4, "bytes": 1000}]
        file.write_text(json.dumps(cluster))
        self.assertEqual(self.steps(*options, file), named)
        self.assertGreater(self.runs(*options, file)["ddp", ""]["peak_bytes"]["communication"], 1000)
        # The controls: another machine and another link.
        self.assertNotEqual(self.steps(*options, "50GFLOP/s,10GB/s"), named)
        faster = self.steps(*TALL, "--strategies", "ddp,fsdp", "--link", "20us,2GB/s", "--machine", "laptop")
        self.assertLess(faster["fsdp"], 0.5 * named["fsdp"])
        self.wrong("--machine is not FLOPS,BYTES, and 'no.json' is no preset, and as a file: No such file", *options, "no.json")

    # 4 ranks of 50 GFLOP/s and 10 GB/s on links of 20 us and 20 MB/s; by an independent program for shared ports.
    def test_slow_links_take_the_times_of_shared_ports(self):
        alone = self.steps(*TALL, "--link", "20us,20MB/s", "--strategies", "ddp,fsdp,hsdp")
        hosts = self.steps(*TALL, "--link", "20us,20MB/s", "--hosts", 2, "--link-intra", "5us,5GB/s", "--strategies", "ddp,fsdp,hsdp")
        for got, expected in ((alone, {"ddp": 132.434, "fsdp": 179.9, "hsdp": 162.7}), (hosts, {"ddp": 90.4, "fsdp": 120.3, "hsdp": 49.0})):
            for name, value in expected.items():
                self.assertAlmostEqual(got[name], value, delta=0.1, msg=name)
        self.assertLess(self.steps(*TALL, "--link", "20us,10GB/s", "--strategies", "fsdp")["fsdp"], 0.2 * alone["fsdp"])

    def test_cause_of_exposed_time_changes_it(self):
        def exposed(*options, link="20us,100MB/s"):
            return self.runs(*TALL, "--strategies", "fsdp", "--link", link, *options)["fsdp", ""]["exposed_communication_ms"]
        base = exposed()
        self.assertGreater(exposed("--prefetch", 0), base + 5)
        self.assertLess(exposed("--global-batch", 96), 0.5 * base)
        self.assertGreater(exposed(link="1ms,100MB/s"), base + 1)
        self.assertLess(exposed("--precision", "bf16"), 0.7 * base)
        self.assertLess(exposed("--reshard-after-forward", "false"), base)

    def test_every_option_that_changes_cost_counts(self):
        def run(*options):
            return self.plan("--model", "gpt-tall", "--ranks", 4, "--global-batch", 24, "--strategies", "fsdp", *options)["runs"][0]
        base = run()
        for options, key in ((("--precision", "bf16"), "model_state_bytes"), (("--optimizer", "sgd"), "model_state_bytes"),
                             (("--accumulate", 2), "calls_per_step"), (("--checkpoint-activations",), "peak_bytes"), (("--recompute", "norm"), "peak_bytes"),
                             (("--reshard-after-forward", "true"), "calls_per_step"), (("--reshard-after-forward", "false"), "calls_per_step"),
                             (("--prefetch", 0), "step_ms"), (("--limit-all-gathers", 1), "step_ms"), (("--backward-prefetch", "post"), "step_ms"),
                             (("--collectives", "int8"), "wire_bytes_per_step"), (("--clip-norm", 1), "calls_per_step"),
                             (("--seq-len", 32), "tokens_per_second"), (("--wrap", "none"), "calls_per_step"), (("--lora", 4), "model_state_bytes")):
            self.assertNotEqual(run(*options)[key], base[key], options)
        period = self.runs("--model", "gpt-tall", "--ranks", 4, "--strategies", "diloco", "--sync-every", 5)["diloco", ""]
        self.assertNotEqual(period["step_ms"], self.runs("--model", "gpt-tall", "--ranks", 4, "--strategies", "diloco", "--sync-every", 10)["diloco", ""]["step_ms"])
        device = ("--model", "gpt-tall", "--ranks", 4, "--cluster", "a100-200g", "--strategies", "fsdp")
        on, off = (self.runs(*device, *more)["fsdp", ""] for more in (("--cpu-offload",), ()))
        self.assertEqual((on["model_state_bytes"]["optimizer"], on["peak_bytes"]["offloaded"] > 0), (0, True))
        self.assertGreater(on["step_ms"]["median"], off["step_ms"]["median"])

    def test_quantized_weights_need_no_values(self):
        base = ("--model", "gpt-tall", "--ranks", 4, "--strategies", "fsdp", "--lora", 4)
        plain, small = (self.plan(*base, *more)["runs"][0]["model_state_bytes"]["parameter"] for more in ((), ("--quantize", "nf4")))
        self.assertLess(small, 0.35 * plain)
        shared = ("--model", "gpt-nano", "--ranks", 2, "--lora", 4, "--quantize", "nf4")
        for command in (["explain"], ["bench", "--of-step", "--iterations", 1]):
            code, out, err = tool(*command, *shared)
            self.assertEqual(code, 0, out + err)
        self.wrong("train adapters with --lora", *base[:-2], "--quantize", "nf4")

    def test_config_of_gpt2_by_its_other_names(self):
        config = self.folder / "config.json"
        config.write_text('{"model_type": "gpt2", "num_hidden_layers": 3}')
        self.assertEqual(self.plan("--model", config, "--ranks", 2, "--strategies", "ddp", "--seq-len", 32)["parameters"], 60648960)
        config.write_text('{"model_type": "gpt2", "layers": 3}')  # the control: a field that no class has
        self.assertEqual(self.plan("--model", config, "--ranks", 2, "--strategies", "ddp", "--seq-len", 32)["parameters"], 124439808)

    def test_the_page_has_the_terms_of_why(self):
        out, page = self.folder / "plan.json", self.folder / "page.html"
        code, _, err = tool("plan", "--model", "gpt-tall", "--ranks", 4, "--link", "20us,20MB/s", "--why", "ddp,fsdp", "--json", out, "--report", page)
        self.assertEqual((code, err), (0, ""))
        why = json.loads(out.read_text())["why"]
        shown = {row[0]: float(row[1]) for row in Page(page.read_text()).table("Milliseconds by which")[1:]}
        self.assertEqual(shown.keys(), {*why["terms"], "sum"})
        for name, ms in {**why["terms"], "sum": why["gap_ms"]}.items():
            self.assertAlmostEqual(shown[name], ms, delta=1e-4 * abs(ms))

    def test_offload_that_does_nothing_is_said(self):
        code, _, err = tool("plan", "--model", "gpt-nano", "--strategies", "fsdp", "--cpu-offload")
        self.assertEqual((code, err.count("\n")), (0, 1))
        self.assertIn("--cpu-offload does nothing on cluster link", err)

    def test_frozen_parameters_need_fewer_operations(self):
        seconds = lambda run: run["step_ms"]["median"] / 1e3 * run["mfu"] * 4 * 50e9 / (12 * 64)  # operations for a token
        frozen, all_trained = (self.plan("--model", "gpt-nano", "--ranks", 4, "--strategies", "ddp", *more) for more in (("--lora", 4), ()))
        attention = 12 * 2 * 64 * 64
        self.assertAlmostEqual(seconds(all_trained["runs"][0]), 6 * 120576 + attention, delta=1)
        self.assertAlmostEqual(seconds(frozen["runs"][0]), 6 * (frozen["parameters"] - 120576) + 4 * 120576 + attention, delta=1)

    def test_wrappings_are_planned_side_by_side(self):
        wraps = "block,none,h.0+h.1;h.2+h.3;h.4+h.5;h.6+h.7"
        slow = {wrap: run["step_ms"]["median"] for (_, wrap), run in
                self.runs(*TALL, "--strategies", "fsdp", "--wraps", wraps, "--link", "5ms,1GB/s").items()}
        fast = {wrap: run["step_ms"]["median"] for (_, wrap), run in
                self.runs(*TALL, "--strategies", "fsdp", "--wraps", wraps, "--link", "20us,400MB/s").items()}
        order = lambda steps: sorted(steps, key=steps.get)
        self.assertEqual(order(slow)[0], "none")  # few messages where latency counts
        self.assertEqual(order(fast)[0], "block")  # small units where bandwidth counts
        self.assertEqual(order(fast)[-1], "none")

    def test_large_worlds_take_little_time(self):
        begun = time.monotonic()
        self.plan("--model", "llama-7b", "--ranks", 1024, "--global-batch", 1024, "--precision", "bf16", "--cluster", "h100-400g", "--strategies", "fsdp")
        config = self.folder / "gpt-175b.json"
        config.write_text(json.dumps({"model_type": "gpt2", "n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048, "vocab_size": 50257,
                                      "activation_function": "gelu_new", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}))
        big = self.plan("--model", config, "--ranks", 512, "--global-batch", 512, "--precision", "bf16", "--cluster", "a100-200g", "--strategies", "fsdp")
        self.assertAlmostEqual(big["parameters"], 175e9, delta=1e9)
        self.plan("--model", "llama-7b", "--ranks", 16384, "--global-batch", 16384, "--precision", "bf16", "--cluster", "h100-400g", "--strategies", "fsdp")
        self.assertLess(time.monotonic() - begun, 15)  # each takes less than a second on an idle core

    def test_scaling(self):
        plan = self.plan("--model", "gpt2", "--ranks", 8, "--global-batch", 16, "--precision", "bf16", "--cluster", "a100-200g",
                         "--strategies", "ddp,fsdp", "--scale", "16,64", "--report", self.folder / "page.html")
        weak, strong = plan["scale"]["weak"], plan["scale"]["strong"]
        self.assertEqual([world["ranks"] for world in weak], [8, 16, 64])
        self.assertEqual([world["ranks"] for world in strong], [8, 16])
        self.assertIn("64 ranks: --global-batch 16", plan["scale"]["skipped"][0])
        for worlds in (weak, strong):
            self.assertEqual([run["efficiency"] for run in worlds[0]["runs"]], [1, 1])
            self.assertTrue(all(run["efficiency"] < 1 for world in worlds[1:] for run in world["runs"]))
        # Per rank, weak scaling computes the same; strong scaling half.
        self.assertLess(strong[1]["runs"][1]["step_ms"]["median"], weak[1]["runs"][1]["step_ms"]["median"])
        page = Page(draw(self.folder / "page.html", self.folder))
        self.assertIn("Strong scaling: tokens per second and rank", [table["caption"] for table in page.tables])
        charts = [chart for chart in page.charts if chart["label"].startswith("Tokens per second")]
        self.assertEqual([len(chart["lines"]) for chart in charts], [2, 2])
        self.assertEqual([[text for text in chart["texts"] if "ranks" in text] for chart in charts],
                         [["8 ranks", "16 ranks", "64 ranks"], ["8 ranks", "16 ranks"]])
        self.assertEqual([line.count("L") for line in charts[0]["lines"]], [2, 2])

    def test_advice_fits_and_says_why(self):
        advice = self.plan("--model", "llama-7b", "--ranks", 64, "--global-batch", 64, "--precision", "bf16", "--cluster", "h100-400g", "--advise",
                           "--report", self.folder / "page.html")["advice"]
        self.assertTrue(all(one["peak_bytes"] <= 80e9 for one in advice["pareto"]))
        steps = [one["step_ms"] for one in advice["pareto"]]
        self.assertEqual(steps, sorted(steps, reverse=True))
        peaks = [one["peak_bytes"] for one in advice["pareto"]]
        self.assertEqual(peaks, sorted(peaks))
        self.assertEqual(advice["best"], advice["pareto"][-1])
        self.assertTrue(any("ddp needs at least 1" in reason for reason in advice["reasons"]), advice["reasons"])
        self.assertTrue(any("tokens per rank compute" in reason for reason in advice["reasons"]), advice["reasons"])
        self.assertIn("take: " + advice["best"]["options"], self.shown)
        self.assertIn("Memory against time", (self.folder / "page.html").read_text())
        # The advised options give the advised step.
        again = self.plan("--model", "llama-7b", "--ranks", 64, "--global-batch", 64, "--precision", "bf16", "--cluster", "h100-400g",
                          *shlex.split(advice["best"]["options"]))["runs"][0]
        self.assertEqual((again["step_ms"]["median"], again["peak_bytes"]["total"]), (advice["best"]["step_ms"], advice["best"]["peak_bytes"]))
        # Plans include temporaries of this host's kernels: f32 copies where the processor has no instructions for bf16.
        native = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL") not in ("SSE41", "AVX", "AVX2", "AVX512_CORE") and \
            any(flag in pathlib.Path("/proc/cpuinfo").read_text() for flag in ("avx512_bf16", "amx_bf16"))
        budget = "600MB" if native else "640MB"
        # A small model fits everywhere; less memory makes another choice.
        small = self.plan("--model", "gpt2", "--ranks", 8, "--global-batch", 16, "--precision", "bf16", "--cluster", "a100-200g", "--advise")["advice"]
        less = self.plan("--model", "gpt2", "--ranks", 8, "--global-batch", 16, "--precision", "bf16", "--cluster", "a100-200g", "--advise", "--memory", budget)["advice"]
        self.assertLess(less["best"]["peak_bytes"], float(budget[:-2]) * 1e6)
        self.assertLessEqual(small["best"]["step_ms"], less["best"]["step_ms"])

    def test_unequal_ranks(self):
        shared = ("--model", "gpt2", "--ranks", 16, "--global-batch", 16, "--precision", "bf16", "--cluster", "a100-200g", "--strategies", "fsdp")
        def run(*options):
            return self.runs(*shared, *options)["fsdp", ""]
        equal, slow = run(), run("--slow-rank", "3:1.5")
        self.assertNotIn("rank_step_ms", equal)
        self.assertEqual(len(slow["rank_step_ms"]), 16)
        self.assertGreater(slow["step_ms"]["median"], equal["step_ms"]["median"])
        self.assertEqual(run("--slow-rank", "3:1")["step_ms"]["median"], equal["step_ms"]["median"])
        self.assertGreater(run("--slow-link", "1:4")["step_ms"]["median"], equal["step_ms"]["median"])
        for option in ("--slow-rank", "3:4"), ("--slow-link", "1:50"):  # the rank that waits most waits for almost all that the step grew by
            unequal = run(*option)
            grown = unequal["step_ms"]["median"] - equal["step_ms"]["median"]
            self.assertAlmostEqual(unequal["exposed_communication_ms"] / (equal["exposed_communication_ms"] + grown), 1, delta=0.02)
        jitter = run("--jitter", 5)
        self.assertEqual(jitter, run("--jitter", 5))
        self.assertGreater(jitter["step_ms"]["median"], equal["step_ms"]["median"])

    def test_times_beyond_what_is_counted_are_refused(self):
        cluster = {"name": "slow", "ranks_per_host": 2, "links": {"intra": {"latency_us": 1, "bytes_per_second": 1e9}, "inter": {"latency_us": 25, "bytes_per_second": 1e-5}},
                   "compute": {"kind": "host", "memory_bytes": 1e10, "memory_bytes_per_second": 1e10, "peak_flops": {"f32": 1e12}}}
        file = self.folder / "cluster.json"
        def wrong(**changes):
            file.write_text(json.dumps({**cluster, **changes}))
            self.wrong("a step takes longer than 146 years", "--model", "gpt-nano", "--ranks", 4, "--strategies", "fsdp", "--cluster", file)
        wrong()
        links = {**cluster["links"], "inter": {"latency_us": 25, "bytes_per_second": 1e9}}
        wrong(links=links, compute={"kind": "host", "memory_bytes": 1e10, "memory_bytes_per_second": 1e10, "peak_flops": {"f32": 1e-9}})
        self.wrong("a step takes longer than 146 years", "--model", "gpt-nano", "--strategies", "fsdp", "--jitter", "1e17")
        file.write_text(json.dumps({**cluster, "links": links}))  # the control
        self.assertGreater(self.runs("--model", "gpt-nano", "--ranks", 4, "--strategies", "fsdp", "--cluster", file)["fsdp", ""]["step_ms"]["median"], 0)

    def test_secondary_shards_concern_what_is_sharded(self):
        plain, secondary = (self.runs("--model", "gpt-nano", "--ranks", 4, "--strategies", "ddp,zero1,fsdp", *more) for more in ((), ("--reshard-after-forward", 2)))
        for strategy in ("ddp", "zero1"):
            self.assertEqual(plain[strategy, ""], secondary[strategy, ""])
        self.assertNotEqual(plain["fsdp", ""]["wire_bytes_per_step"], secondary["fsdp", ""]["wire_bytes_per_step"])  # the control

    def test_options_without_effect_are_said(self):
        for option, value in (("--mesh", "3x5"), ("--prefetch", 5), ("--reshard-after-forward", "true"), ("--limit-all-gathers", 3)):
            for command, strategy in (("plan", "--strategies"), ("explain", "--strategy")):
                code, _, err = tool(command, "--model", "gpt-nano", strategy, "ddp", option, value)
                self.assertEqual((code, f"{option} does nothing with --strategy ddp" in err), (0, True), err)
        code, _, err = tool("plan", "--model", "gpt-nano", "--strategies", "ddp,hsdp", "--mesh", "2x2", "--prefetch", 2)  # the control
        self.assertEqual((code, err), (0, ""))

    def test_calls_that_are_not_in_every_step_are_shown(self):
        self.plan("--model", "gpt-nano", "--strategies", "ddp,diloco")
        row = next(line for line in self.shown.splitlines() if line.startswith("diloco"))
        self.assertRegex(row, r" 0\.3 / [0-9.]+ kB")
        self.wrong("--why: diloco synchronizes its replicas after every 10 steps", "--model", "gpt-nano", "--link", "1us,1GB/s", "--why", "ddp,diloco")
        self.plan("--model", "gpt-nano", "--link", "1us,1GB/s", "--why", "ddp,diloco", "--sync-every", 1)  # the control

    def test_waits_between_rounds_of_an_unshard_are_exposed(self):
        for options in (("--reshard-after-forward", 2), ("--reshard-after-forward", "true")):
            fsdp = ("--model", "gpt-nano", "--ranks", 4, "--seq-len", 16, "--strategies", "fsdp", *options)
            slow, free = (self.runs(*fsdp, "--link", link)["fsdp", ""] for link in ("200us,1GB/s", "0us,1000000GB/s"))
            waits = slow["step_ms"]["median"] - free["step_ms"]["median"]
            self.assertGreater(waits, free["step_ms"]["median"])
            self.assertAlmostEqual(slow["exposed_communication_ms"], waits, delta=0.02 * waits, msg=options)

    def test_trace_is_that_of_a_run_with_its_transfers(self):
        run = self.runs(*TALL, "--strategies", "fsdp", "--trace", self.folder / "trace.json")["fsdp", ""]
        planned = json.loads((self.folder / "trace.json").read_text())["traceEvents"]
        code, _, err = tool("compare", *TALL, "--strategies", "fsdp", "--data", self.text, "--steps", 2, "--trace", self.folder / "real.json")
        self.assertEqual(code, 0, err)
        real = json.loads((self.folder / "real.json").read_text())["traceEvents"]
        order = lambda events, rank: [(event["name"], event["args"]["bytes"]) for event in events if event["pid"] == rank and "unit" in event["args"]]
        self.assertEqual(order(planned, 3), order(real, 3))  # the last rank
        transfers = [event for event in planned if event.get("cat") == "transfer"]
        calls = sum(run["calls_per_step"].values()) - 1  # the loss is not simulated
        self.assertEqual(len(transfers), calls)
        sent = sum(event["args"]["bytes"] for event in transfers)
        total = sum(run["wire_bytes_per_step"].values())
        self.assertTrue(0.99 * total <= sent <= total, (sent, total))
        exposed = sum(event["dur"] for event in planned if event.get("cat") in ("unshard_wait", "reduce_wait") and "dur" in event)
        self.assertAlmostEqual(exposed / 1e3, run["exposed_communication_ms"], places=5)

    def test_one_line_for_each_mistake(self):
        self.wrong("give --model", "--ranks", 4)
        self.wrong("unknown model", "--model", "no-such", "--ranks", 4)
        self.wrong("--ranks", "--model", "gpt-nano", "--ranks", "4,8")
        self.wrong("12 can't be split evenly", "--model", "gpt-nano", "--ranks", 5, "--global-batch", 12)
        self.wrong("is not a link", "--model", "gpt-nano", "--link", "fast")
        self.wrong("--machine is not FLOPS,BYTES, and 'fast' is no preset", "--model", "gpt-nano", "--machine", "fast")
        self.wrong("don't divide into hosts", "--model", "gpt-nano", "--ranks", 4, "--hosts", 3)
        self.wrong("give --hosts too", "--model", "gpt-nano", "--link-intra", "1us,1GB/s")
        self.wrong("--cluster", "--model", "gpt-nano", "--link", "1us,1GB/s", "--cluster", "laptop")
        self.wrong("no-such-cluster", "--model", "gpt-nano", "--cluster", "no-such-cluster")
        self.wrong("--memory has no effect", "--model", "gpt-nano", "--memory", "1GB")
        self.wrong("amount of memory", "--model", "gpt-nano", "--advise", "--memory", "lots")
        for option in (("--prefetch", 2), ("--mesh", "2x2"), ("--accumulate", 2), ("--checkpoint-activations",), ("--reshard-after-forward", "true"),
                       ("--wraps", "block,none"), ("--slow-rank", "1:2"), ("--jitter", 1)):
            self.wrong(option[0] + " has no effect on --advise", "--model", "gpt-nano", "--advise", *option)
        self.wrong("all ranks are on one host", "--model", "gpt-nano", "--slow-link", "0:2", "--strategies", "ddp")
        self.wrong("fits in no way", "--model", "llama-7b", "--ranks", 8, "--global-batch", 8, "--cluster", "a100-efa", "--advise", "--memory", "10GB")
        self.wrong("there are 4 ranks", "--model", "gpt-nano", "--slow-rank", "4:2", "--strategies", "ddp")
        self.wrong("NUMBER:FACTOR", "--model", "gpt-nano", "--slow-rank", "4")
        self.wrong("mesh", "--model", "gpt-nano", "--ranks", 4, "--strategies", "hsdp", "--mesh", "3x2")
        self.wrong("--scale", "--model", "gpt-nano", "--scale", "0")


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
