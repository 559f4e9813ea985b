"""A rank that may not map BLAS's buffer ends with an error: address_space_test.py TOOL."""

import os
import subprocess
import sys
import tempfile
import unittest


class AddressSpaceTest(unittest.TestCase):
    def test_limit_is_error_and_not_hang(self):
        """OpenBLAS would retry forever to allocate its buffer."""
        with tempfile.TemporaryDirectory() as folder:
            text = os.path.join(folder, "text.txt")
            with open(text, "w") as file:
                file.write("the quick brown fox jumps over the lazy dog; " * 50)
            command = f"{{limit}} exec '{TOOL}' train --backend tcp --model gpt-nano --ranks 4 --steps 1 --seq-len 16 --data '{text}'"
            by_blas = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
            done = subprocess.run(["sh", "-c", command.format(limit="ulimit -v 500000;")], capture_output=True, text=True, timeout=30, env=by_blas)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertRegex(done.stderr.splitlines()[-1],
                             r"^tessera: rank \d: gemm: BLAS needs 128 MiB of address space .* refuses \d+ MiB: Cannot allocate memory; ")
            done = subprocess.run(["sh", "-c", command.format(limit="")], capture_output=True, text=True, timeout=30, env=by_blas)
            self.assertEqual(done.returncode, 0, done.stderr)  # negative control
            done = subprocess.run(["sh", "-c", command.format(limit="ulimit -v 500000;")], capture_output=True, text=True, timeout=30)
            self.assertIn(done.returncode, (0, 1), done.stderr)  # it ends with any BLAS library
            # Where not even BLAS's threads have memory, neither a fork nor the end of the process waits for them.
            done = subprocess.run(["sh", "-c", command.format(limit="ulimit -v 200000;")], capture_output=True, text=True, timeout=30, env=by_blas)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertRegex(done.stderr.splitlines()[-1], r"^tessera: .*Cannot allocate memory")
            # Where products come from another library, this may be enough.
            done = subprocess.run(["sh", "-c", command.format(limit="ulimit -v 200000;")], capture_output=True, text=True, timeout=30)
            self.assertIn(done.returncode, (0, 1), done.stderr)

    def test_programs_without_products_need_no_room_for_them(self):
        """OpenBLAS 0.3.29 maps buffers for all of its threads while it is loaded, and tries for ever."""
        done = subprocess.run(["sh", "-c", f"ulimit -v 150000; exec '{TOOL}' info --models"], capture_output=True, text=True, timeout=30)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_small_stack_is_refused(self):
        done = subprocess.run(["sh", "-c", f"ulimit -s 64; exec '{TOOL}' info"], capture_output=True, text=True, timeout=30)
        self.assertEqual((done.returncode, done.stderr), (2, "tessera: the stack is limited to 64 kB; allow 128 kB or more (ulimit -s 8192)\n"))
        done = subprocess.run(["sh", "-c", f"ulimit -s 128; exec '{TOOL}' info"], capture_output=True, text=True, timeout=30)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
