"""Prints the hashes of PyTorch's 8-bit casts that tests/nn/fp8_test.cpp compares: python3 tests/peers/fp8.py

The inputs are all finite bf16 values whose magnitude is at most the format's largest, and for each pair of neighboring
codes the f32 midpoint with the f32 values below and above it. Beyond the largest value the rules differ: PyTorch gives
infinity or saturates, Tessera saturates, as cuBLASLt's users do.
"""

import torch


def fnv(codes):
    """FNV-1a of 64 bits."""
    value = 0xCBF29CE484222325
    for code in codes:
        value = (value ^ code) * 0x100000001B3 % 2**64
    return value


def inputs(dtype):
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(torch.float32)
    largest = torch.finfo(dtype).max
    halves = halves[halves.isfinite() & (halves.abs() <= largest)]
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).to(torch.float32)
    codes = codes[codes.isfinite()]
    middle = (codes[1:] + codes[:-1]) / 2
    around = torch.stack([middle.nextafter(torch.tensor(0.0)), middle, middle.nextafter(torch.tensor(1e30))], 1)
    return torch.cat([halves, around.reshape(-1)])


for name, dtype in {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.items():
    values = inputs(dtype)
    print(f"{name}: {len(values)} values, {fnv(values.to(dtype).view(torch.uint8).tolist()):#018x}, PyTorch {torch.__version__}")
