"""PyTorch's own tests of torch.distributed backends, which its package brings, with "gloo" being tessera.

    python python/tests/pytorch_suite.py [--ranks N] [-k TEXT,TEXT,..]

Prints what passed, what was skipped with PyTorch's reason, and what failed. Needs the packages expecttest and hypothesis.
"""

import argparse
import collections
import os
import sys
import tempfile
import unittest

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--ranks", type=int, default=3)
parser.add_argument("-k", dest="patterns", default="", help="only tests whose names have one of these texts")
options, _ = parser.parse_known_args()
os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", str(options.ranks))
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
os.environ.setdefault("TESSERA_TORCH_REPLACES_GLOO", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch.testing._internal.common_distributed import MultiProcessTestCase  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402

torch.set_num_threads(1)


class Suite(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()

    @property
    def world_size(self):
        return int(os.environ["WORLD_SIZE"])


def main():
    names = [n for n in unittest.TestLoader().getTestCaseNames(Suite) if any(p in n for p in options.patterns.split(","))]
    outcome = collections.defaultdict(list)
    for i, name in enumerate(names):
        result = unittest.TestResult()
        unittest.TestSuite([Suite(name)]).run(result)
        if result.skipped:
            outcome[f"skipped: {result.skipped[0][1]}"].append(name)
        elif result.failures or result.errors:
            text = (result.failures + result.errors)[0][1]
            outcome["failed"].append(name)
            print(f"FAILED {name}\n{text}", file=sys.stderr, flush=True)
        else:
            outcome["passed"].append(name)
        print(f"{i + 1}/{len(names)} {name}", file=sys.stderr, flush=True)
    for kind, tests in sorted(outcome.items(), key=lambda item: -len(item[1])):
        print(f"{len(tests):4} {kind}" + (f": {', '.join(tests)}" if kind == "failed" else ""))
    return 1 if outcome["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
