"""Norms, sums over rows and optimizer steps read and write whole vectors of 16 bytes, as their PTX code shows. Needs no GPU.

    cuda_wide_access_test.py NVCC ARCHITECTURE ROOT INCLUDE
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

INCLUDE, ROOT, ARCHITECTURE, NVCC = sys.argv.pop(), sys.argv.pop(), sys.argv.pop(), sys.argv.pop()
# As in cmake/cuda.cmake.
FLAGS = ["-std=c++20", "-O3", "-DNDEBUG", f"--generate-code=arch=compute_{ARCHITECTURE},code=sm_{ARCHITECTURE}", "-fmad=false",
         "--expt-relaxed-constexpr", f"-I{INCLUDE}", f"-I{ROOT}", "-ptx"]
LOAD, STORE = (re.compile(operation + r"(\.\w+)*\.(v4\.\w32|v2\.\w64)\b") for operation in (r"\bld\.global", r"\bst\.global"))
SOURCE = """
#include "tessera/nn/kernels/cuda/norm.cuh"
#include "tessera/nn/kernels/cuda/optimizer.cuh"
namespace tessera::nn::cuda {
template <class T>
void all(NativeStream stream) {
  norm_forward<T, true>(stream, {});
  norm_forward<T, false>(stream, {});
  norm_backward<T, true>(stream, {}, nullptr);
  norm_backward<T, false>(stream, {}, nullptr);
  column_sums<T>(stream, {}, nullptr);
  norm_parts<T>(stream, {}, nullptr);
}
void kernels(NativeStream stream) {
  all<float>(stream), all<bf16>(stream);
  optimizer_step(stream, kernels::AdamStep<float>{}), optimizer_step(stream, kernels::SgdStep<float>{});
}
__global__ void narrow_control(const float* in, float* out) { out[threadIdx.x] = 2 * in[threadIdx.x]; }
}
"""


def code_of_kernels():
    """{name of a kernel: its instructions}"""
    with tempfile.TemporaryDirectory() as folder:
        source, ptx = pathlib.Path(folder) / "kernels.cu", pathlib.Path(folder) / "kernels.ptx"
        source.write_text(SOURCE)
        subprocess.run([NVCC, *FLAGS, "-o", str(ptx), str(source)], check=True)
        text = ptx.read_text()
    parts = re.split(r"\.entry (\w+)", text)[1:]
    names = subprocess.run(["c++filt"], input="\n".join(parts[::2]), text=True, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    return dict(zip(names, parts[1::2], strict=True))


class WideAccess(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.code = code_of_kernels()

    def counts(self, kernel, *types):
        """(wide loads, wide stores) of the kernels whose name has these words"""
        found = [text for name, text in self.code.items() if re.search(kernel, name) and all(one in name for one in types)]
        self.assertTrue(found, f"no kernel {kernel} of {types}")
        return [(len(LOAD.findall(text)), len(STORE.findall(text))) for text in found]

    def test_rows_are_read_and_written_in_vectors(self):
        for dtype in ("<float", "<tessera::base::bf16"):
            for centered in ("true", "false"):
                for packs in (1, 2, 3, 4):
                    kernel = f"{dtype}, {centered}, {packs}>"
                    with self.subTest(kernel):
                        for loads, stores in self.counts("norm_forward_kernel", kernel):  # x, added, weight; sum, y
                            self.assertGreaterEqual(loads, 3 * packs)
                            self.assertGreaterEqual(stores, 2 * packs)
                        for loads, stores in self.counts("norm_backward_kernel", kernel):  # x, dy, weight, dx; dx
                            self.assertGreaterEqual(loads, 4 * packs)
                            self.assertGreaterEqual(stores, packs)

    def test_sums_over_rows_read_vectors(self):
        for kernel in ("column_parts_kernel", "norm_kernel"):
            for dtype in ("<float", "<tessera::base::bf16"):
                for loads, _ in self.counts(kernel, dtype):
                    self.assertGreaterEqual(loads, 1, kernel)

    def test_optimizers_update_vectors(self):
        for body, arrays in (("AdamBody", 3), ("SgdBody", 2)):  # parameter and state
            for loads, stores in self.counts(r"elements_kernel<\(?(int\))?4", body):
                self.assertGreaterEqual(loads, arrays, body)
                self.assertGreaterEqual(stores, arrays, body)

    def test_detects_narrow_access(self):
        self.assertEqual(self.counts("narrow_control"), [(0, 0)])


if __name__ == "__main__":
    unittest.main()
