"""Registers, spills and local memory of every CUDA kernel, as the compiler reports them, and loads and stores of 16 bytes.
Needs no GPU.

    cuda_resources_test.py NVCC ARCHITECTURE ROOT INCLUDE
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
         "--expt-relaxed-constexpr", f"-I{INCLUDE}", f"-I{ROOT}", "--resource-usage", "-cubin"]
REPORT = re.compile(r"Compiling entry function '(\w+)'.*?\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
                    r".*?Used (\d+) registers", re.DOTALL)
# Accesses of 16 bytes in the assembler's input, which it keeps as they are. Those of shared memory are not counted.
WIDE = r"\b{}(?:\.global)?(?:\.nc)?(?:\.v4\.[ubf]32|\.v2\.[ubf]64)\b"
# Kernels that must access memory by 16 bytes: at least so many loads and stores in the code of each.
WIDE_KERNELS = [(r" cross_entropy_kernel<.*, [248]>", 5, 0),
                (r" cross_entropy_backward_kernel<.*, [248], false>", 5, 6),
                (r" cross_entropy_backward_kernel<.*, [248], true>", 10, 5),
                (r" embedding_kernel<.*, [248]>", 2, 1),
                (r" embedding_pieces_kernel<.*, [248]>", 4, 2),
                (r" embedding_combine_kernel<", 4, 0),
                (r" fp8_amax_kernel<", 1, 0),
                (r" fp8_quantize_kernel<", 2, 2)]


class Kernel:
    def __init__(self, name, stack, stores, loads, registers, code):
        self.name, self.stack, self.spilled, self.registers = name, int(stack), int(stores) + int(loads), int(registers)
        self.wide_loads, self.wide_stores = (len(re.findall(WIDE.format(access), code)) for access in ("ld", "st"))


def codes_of(assembly):
    """The code of each kernel, by its mangled name."""
    return {part.partition("(")[0].strip(): part for part in re.split(r"\.entry ", assembly)[1:]}


def kernels_of(source, *more):
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([NVCC, *FLAGS, *more, "--keep", f"--keep-dir={folder}", "-o", str(pathlib.Path(folder) / "kernels.cubin"),
                               str(source)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
        codes = codes_of(next(pathlib.Path(folder).glob("*.ptx")).read_text())
    rows = REPORT.findall(done.stdout)
    names = subprocess.run(["c++filt"], input="\n".join(row[0] for row in rows), text=True, stdout=subprocess.PIPE, check=True).stdout
    return [Kernel(name, *row[1:], codes[row[0]]) for name, row in zip(names.splitlines(), rows, strict=True)]


def narrow(kernels, pattern, loads, stores):
    """Of the kernels that the pattern fits, those with fewer accesses of 16 bytes."""
    fit = [kernel for kernel in kernels if re.search(pattern, kernel.name.replace("tessera::nn::cuda::", ""))]
    return [kernel.name for kernel in fit if kernel.wide_loads < loads or kernel.wide_stores < stores] if fit else [f"no {pattern}"]


class Resources(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.kernels = kernels_of(pathlib.Path(ROOT) / "src/nn/kernels/cuda/kernels.cu")
        cls.sums = kernels_of(pathlib.Path(ROOT) / "src/comm/kernels/cuda/reduce.cu")

    def matching(self, text):
        found = [kernel for kernel in self.kernels if text in kernel.name]
        self.assertTrue(found, f"no kernel {text}")
        return found

    def test_no_kernel_spills(self):
        self.assertGreater(len(self.kernels), 300)
        self.assertGreater(len(self.sums), 5)
        spilling = [kernel.name for kernel in self.kernels + self.sums if kernel.spilled > 0]
        self.assertEqual(spilling, [])

    def test_elementwise_kernels_use_no_local_memory(self):
        self.assertEqual([kernel.name for kernel in self.matching("elements_kernel<") if kernel.stack > 0], [])

    def test_decoding_of_nf4_keeps_its_table_out_of_local_memory(self):
        self.assertEqual({kernel.stack for kernel in self.matching("DecodeNf4Body")}, {0})

    def test_attention_leaves_room_for_two_warps_per_scheduler(self):
        # 64 K registers of a multiprocessor: 255 for each of 256 threads.
        for kernel in self.matching("attention") + self.matching("tensor_"):
            self.assertLessEqual(kernel.registers, 255, kernel.name)
        # Shared memory also leaves room for two blocks of 128 threads, or one of 256.
        for kernel in self.matching("tensor_forward_kernel") + self.matching("tensor_backward_kernel"):
            self.assertEqual(kernel.stack, 0, kernel.name)

    def test_kernels_over_the_vocabulary_access_16_bytes(self):
        for pattern, loads, stores in WIDE_KERNELS:
            self.assertEqual(narrow(self.kernels, pattern, loads, stores), [])

    def test_detects_narrow_accesses(self):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "control.cu"
            source.write_text("struct alignas(16) Pack { unsigned short at[8]; };\n"
                              "__global__ void wide(const uint4* in, uint4* out) { out[threadIdx.x] = in[threadIdx.x]; }\n"
                              "__global__ void elements(const Pack* in, Pack* out) {\n"
                              "  for (int i = 0; i < 8; ++i) out[threadIdx.x].at[i] = in[threadIdx.x].at[i];\n}\n")
            kernels = kernels_of(source)
        self.assertEqual(narrow(kernels, "wide", 1, 1), [])
        self.assertEqual(len(narrow(kernels, "wide", 2, 1)), 1)
        self.assertEqual(len(narrow(kernels, "elements", 1, 1)), 1)
        self.assertEqual(narrow(kernels, "missing", 0, 0), ["no missing"])

    def test_detects_spills_and_local_memory(self):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "control.cu"
            source.write_text("struct Table { float at[16]; };\n"
                              "__global__ void copied(Table table, const int* i, float* out) {\n"
                              "  table.at[*i & 15] += 1; out[threadIdx.x] = table.at[threadIdx.x & 15];\n}\n"
                              "__global__ void spills(const float* in, float* out) {\n  float sums[64];\n"
                              "#pragma unroll\n  for (int i = 0; i < 64; ++i) sums[i] = in[i * 97 + threadIdx.x];\n  __syncthreads();\n"
                              "#pragma unroll\n  for (int i = 0; i < 64; ++i) out[i * 89 + threadIdx.x] = sums[i] * sums[63 - i];\n}\n")
            found = {kernel.name.partition("(")[0]: kernel for kernel in kernels_of(source, "-maxrregcount=24")}
        self.assertGreater(found["copied"].stack, 0)
        self.assertGreater(found["spills"].spilled, 0)


if __name__ == "__main__":
    unittest.main()
