#!/usr/bin/env python3
"""Writes the table of docs/h100_by_arithmetic.md that says what one training step must move and compute, and how long an H100 needs for it.

    docs/roofline.py build/release/tests/print_kernel_counts           writes the table
    docs/roofline.py build/release/tests/print_kernel_counts --check   fails if the page has another table

The counts are those of print_kernel_counts, which takes them from the program's own calls.
"""

import json
import pathlib
import subprocess
import sys

PAGE = pathlib.Path(__file__).with_name("h100_by_arithmetic.md")
BEGIN, END = "<!-- written by docs/roofline.py -->\n", "<!-- end of what docs/roofline.py writes -->\n"
# The data sheet of the H100 SXM: bytes per second of its memory, and operations per second of bf16 products without sparsity.
MEMORY, PRODUCTS = 3.35e12, 989e12
NAMES = {"linear_forward": "linear, forward", "linear_activation_forward": "linear with GELU, forward", "linear_backward": "linear, backward",
         "attention_forward": "attention, forward", "attention_backward": "attention, backward", "layer_norm_forward": "layer norm, forward",
         "add_layer_norm_forward": "residual sum and layer norm, forward", "layer_norm_backward": "layer norm, backward",
         "add": "residual sum alone", "activation_backward": "GELU, backward", "embedding_forward": "embedding, forward",
         "embedding_backward": "embedding, backward", "cross_entropy_forward": "loss, forward", "cross_entropy_backward": "loss, backward",
         "adam_step": "AdamW", "norm_part": "norm of the gradient", "clip_factor": "clipping factor", "clear": "clears",
         "positions": "token ids and positions"}


VOCABULARY = 50257


def name_of(call):
    name = NAMES.get(call["kernel"], call["kernel"])
    return name.replace("linear", "head") if call["columns"] == VOCABULARY else name


def parsed(output):
    """What print_kernel_counts prints"""
    return [json.loads(line) for line in output.splitlines()]


def times(call):
    """Seconds of one call by the memory and by the products of an H100."""
    return (call["reads"] + call["writes"]) / MEMORY, call["operations"] / PRODUCTS


def rows_of(calls):
    """{name: launches, bytes read and written, operations, seconds, seconds in which products are the limit}, the longest first"""
    rows = {}
    for call in calls:
        row = rows.setdefault(name_of(call), [0, 0.0, 0.0, 0.0, 0.0, 0.0])
        n, memory, products = call["calls"], *times(call)
        of_call = (call["launches"], n * call["reads"], n * call["writes"], n * call["operations"], n * max(memory, products),
                   n * products if products > memory else 0)
        for i, value in enumerate(of_call):
            row[i] += value
    return dict(sorted(rows.items(), key=lambda item: -item[1][4]))


def step_ms(calls):
    """The least time of a step in which kernels follow each other without gaps, in milliseconds."""
    return 1e3 * sum(call["calls"] * max(times(call)) for call in calls)


def table(calls):
    lines = ["| kernel | launches | GB read | GB written | TFLOP | limit | ms |", "| -- | -- | -- | -- | -- | -- | -- |"]
    rows = rows_of(calls)

    def line(name, row, limit):
        return f"| {name} | {row[0]} | {row[1] / 1e9:.2f} | {row[2] / 1e9:.2f} | {row[3] / 1e12:.2f} | {limit} | {1e3 * row[4]:.2f} |"

    for name, row in rows.items():
        lines.append(line(name, row, "products" if 2 * row[5] > row[4] else "memory"))
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines.append(line("**one step**", total, f"products: {100 * total[5] / total[4]:.0f} % of the time"))
    return "\n".join(lines) + "\n"


def with_table(text, written):
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + written + "\n" + END + rest.split(END)[1]


def main():
    done = subprocess.run([sys.argv[1]], text=True, stdout=subprocess.PIPE, timeout=120, check=True)
    calls, text = parsed(done.stdout), PAGE.read_text()
    wanted = with_table(text, table(calls))
    if "--check" not in sys.argv:
        PAGE.write_text(wanted)
        return 0
    more = [dict(calls[0], reads=calls[0]["reads"] + 1e9), *calls[1:]]
    assert with_table(text, table(more)) != wanted, "the control: another count is another table"
    if text != wanted:
        print(f"{PAGE} is old: run docs/roofline.py PROGRAM")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
