"""Ranks that multiply matrices with different libraries round differently: the run fails before it trains."""

import os
import subprocess
import sys
import tempfile
import unittest

TOOL = None
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60


class ProductsTest(unittest.TestCase):
    def train(self, limited_rank):
        """Disables on one rank the instructions for which oneDNN is used."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
            text.write(TEXT)
            text.flush()
            script = f'[ "$TESSERA_RANK" != {limited_rank} ] || export ONEDNN_MAX_CPU_ISA=AVX2; exec "$@"'
            done = subprocess.run([TOOL, "run", "-n", "2", "--no-tag", "--", "sh", "-c", script, "rank", TOOL, "train", "--model", "gpt-nano", "--steps", "2",
                                   "--global-batch", "2", "--seq-len", "16", "--data", text.name], text=True, capture_output=True, timeout=60)
            return done.returncode, done.stdout, done.stderr

    def test_ranks_agree_on_the_library(self):
        code, out, err = self.train(limited_rank=None)
        self.assertEqual(code, 0, err)
        self.assertIn("final parameters", out)
        code, out, err = self.train(limited_rank=1)
        with open("/proc/cpuinfo") as file:
            processor = file.read()
        if "avx512vl" not in processor or "avx512bw" not in processor or "ONEDNN_MAX_CPU_ISA" in os.environ:
            self.assertEqual(code, 0, err)  # all ranks multiply by OpenBLAS
            return
        self.assertEqual(code, 1, err)
        self.assertIn("rank 0: the first backward with products by oneDNN", err)
        self.assertIn("rank 1: the first backward with products by OpenBLAS", err)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
