"""Two kinds of hosts: this machine, and one of arm64 that qemu emulates. Their ranks are started one by one, as by hand."""

import functools
import json
import os
import pathlib
import sys
import unittest

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / folder) for folder in ("launchers", "harness")]
import jobs  # noqa: E402
import processes  # noqa: E402

NATIVE = (os.environ["TESSERA_TOOL"],)
ARM64 = tuple(os.environ["TESSERA_ARM64_TOOL"].split())
MODEL = ("--model", "gpt-nano", "--global-batch", "4", "--seq-len", "16", "--threads", "1")
# oneDNN has products for some processors of x86 only; the others take OpenBLAS's.
SETTINGS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "TESSERA_TIMEOUT": "120s"}


@functools.lru_cache(None)
def has_own_products():
    """Whether products can be this library's own, and so the same on every processor. OpenBLAS has other sums for each."""
    listed = [json.loads(jobs.run([*tool, "info", "--json"], jobs.environment()).out)["env"] for tool in (NATIVE, ARM64)]
    return all(any(one["name"] == "TESSERA_PRODUCTS" for one in each) for each in listed)


def environment(**changes):
    settings = dict(SETTINGS, TESSERA_PRODUCTS="own") if has_own_products() else SETTINGS
    return jobs.environment(**settings, **changes)


class Case(jobs.Case):
    def end_world(self, commands, seconds=300, **changes):
        """How each rank ended, over tcp; a command for each."""
        common = dict(TESSERA_WORLD_SIZE=len(commands), TESSERA_LOCAL_WORLD_SIZE=len(commands), TESSERA_TOKEN="swordfish",
                      TESSERA_MASTER=f"127.0.0.1:{processes.free_port()}", TESSERA_BACKEND="tcp", **changes)
        with jobs.Job([jobs.start([*map(str, command)], environment(**common, TESSERA_RANK=rank, TESSERA_LOCAL_RANK=rank))
                       for rank, command in enumerate(commands)]) as job:
            return [jobs.finish(process, seconds) for process in job.processes]

    def run_world(self, kinds, *arguments, **changes):
        """The output of rank 0. All ranks end well."""
        ended = self.end_world([(*tool, *arguments) for tool in kinds], **changes)
        for rank, one in enumerate(ended):
            words = [line for line in jobs.last_words(one.err) if "--resume" not in arguments or "no step is made" not in line]
            self.assertEqual((one.code, words), (0, []), f"rank {rank}: {one.out}{one.err}")
        return ended[0].out

    def train(self, kinds, *arguments, steps=2):
        """The losses by step and the final hash."""
        record = self.path("train.json")
        self.run_world(kinds, "train", *MODEL, "--data", self.text, "--steps", steps, "--json", record, *arguments)
        with open(record, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}, lines[-1]["final_parameters_hash"]

    def run_on(self, tool, *arguments):
        ended = jobs.run([*tool, *map(str, arguments)], environment(), 300)
        self.assertEqual(ended.code, 0, ended.out + ended.err)
        return ended.out


main = unittest.main
