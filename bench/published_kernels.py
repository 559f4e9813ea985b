"""How fast the kernels of a GPU are, by shape. docs/plan_published.md lists the figures with their sources. Times are in seconds."""

import math
from collections import namedtuple

KERNEL_GAP = 2e-6  # between two kernels of a busy stream
STREAMING = 0.85  # part of the memory's rate that streaming kernels reach
LONGEST_PRODUCT = 0.97  # efficiency of the shapes by which the best rates were measured

# Rates are those of the data sheet or measured with long products. `tile_start`: start and end of an output tile, as a
# length of the inner dimension; `link_rate`: of 8 ranks on one host; `prior`: efficiency of products before it is fitted.
Device = namedtuple("Device", "name multiprocessors flops tile_start memory_rate link_rate prior capacity hopper")


def a100(name, memory_rate, capacity):
    return Device(name, 108, 271.2e12 / LONGEST_PRODUCT, 150, memory_rate * STREAMING, 227e9, 0.87, capacity, False)


def h100(name, memory_rate, prior):
    return Device(name, 132, 794.5e12 / LONGEST_PRODUCT, 280, memory_rate * STREAMING, 360e9, prior, 80e9, True)


DEVICES = {device.name: device for device in (
    a100("A100-80GB", 2.0e12, 80e9), a100("A100-40GB", 1.555e12, 40e9), a100("A100", 2.0e12, 80e9),
    Device("A100-80GB-PCIe", 108, 252.9e12 / LONGEST_PRODUCT, 150, 1.94e12 * STREAMING, 20e9, 0.80, 80e9, False),
    h100("H100-80GB", 3.35e12, 0.80), h100("H100", 3.35e12, 0.80), h100("H200-SXM", 4.8e12, 0.80), h100("GH200", 4.0e12, 0.80),
    h100("H100-96GB-HBM2e-500W", 2.4e12, 0.68), h100("H100-95GiB", 2.4e12, 0.68))}


def device_named(name):
    """A name that is not known has the profile of its generation."""
    generation = "H200-SXM" if "H200" in name else "H100" if "H100" in name else "A100"
    return DEVICES.get(name, DEVICES[generation])


# Output tiles: rows, columns, and the rate as a part of that of the largest ones.
TILES = ((128, 256, 1), (256, 128, 1), (128, 128, 0.92), (128, 64, 0.80), (64, 64, 0.62))
SPLITS = (1, 2, 3, 4, 6, 8, 16)


def waves(tiles, multiprocessors):
    """Rounds in which the multiprocessors compute tiles. Those of a partial last one are a little faster."""
    full, rest = divmod(tiles, multiprocessors)
    if full == 0:
        return 1
    return full + (0.75 + 0.25 * rest / multiprocessors if rest else 0)


def product_time(device, m, n, k, batch=1):
    """(time, True if it is that of the bytes) of products of (m x k) by (k x n) at full efficiency."""
    rate, best = device.flops / device.multiprocessors, math.inf
    for rows, columns, part in TILES:
        tiles = -(-m // rows) * -(-n // columns) * batch
        for split in SPLITS:
            depth = k / split
            if split > 1 and (depth < 512 or tiles * split > 4 * device.multiprocessors):
                break
            time = waves(tiles * split, device.multiprocessors) * rows * columns * 2 * (depth + device.tile_start) / (rate * part)
            if split > 1:
                time += (split + 1) * m * n * batch * 4 / device.memory_rate + KERNEL_GAP
            best = min(best, time)
    floor = 2 * batch * (m * k + k * n + m * n) * 1.1 / device.memory_rate
    return (floor, True) if floor > best else (best, False)


# By generation and implementation: the rates of heads of up to 64 elements and of longer ones, forward and backward, and
# the positions at which half of the rate is reached.
ATTENTION = {(False, "triton"): ((130e12, 130e12), (83e12, 83e12), 350), (False, "flash1"): ((125e12, 120e12), (85e12, 85e12), 350),
             (False, "flash2"): ((195e12, 215e12), (171e12, 187e12), 540), (True, "triton"): ((235e12, 235e12), (150e12, 150e12), 350),
             (True, "flash1"): ((215e12, 210e12), (145e12, 145e12), 350), (True, "flash2"): ((320e12, 370e12), (285e12, 285e12), 540)}


def attention_time(device, kernel, heads, positions, head_dim, backward):
    """Causal attention, by an implementation that doesn't store the scores."""
    forward_rates, backward_rates, half_length = ATTENTION[device.hopper, kernel]
    rate = (backward_rates if backward else forward_rates)[0 if head_dim <= 64 else 1]
    if head_dim not in (64, 128):  # the kernel computes the next size that it has
        rate *= head_dim / next((size for size in (64, 96, 128) if head_dim <= size), 256)
    elements = heads * positions * head_dim
    flops = 2 * elements * (positions + half_length) * (2.5 if backward else 1)
    moved = elements * 2 * (16 if backward else 4)
    return max(flops / rate, moved / device.memory_rate) + KERNEL_GAP * (3 if backward else 1)
